"""A problem with a private lower level and curved losses, and runs of methods on episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.core.tree import Tree, dot
from fedbilevel.runs.run import Run


def upper(x: Tree, y: Tree, batch: Any) -> Tensor:
    """The upper loss of `curved`."""
    return ((batch[0] @ (y["y"] + x["x"].sin())).cosh()).mean()


def lower(x: Tree, y: Tree, batch: Any) -> Tensor:
    """The lower loss of `curved`."""
    return ((batch[0] @ (y["y"] * x["x"].exp()) - 1) ** 2).mean() + 0.1 * dot(y, y)


def curved(clients: int = 2) -> tuple[fb.Problem, list[fb.ClientData]]:
    """A problem none of whose derivatives is constant, and its clients."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    problem = fb.Problem(upper, lower, {"x": random(3)}, {"y": random(3)}, lower_level="private")
    return problem, [fb.ClientData((random(4, 3),), (random(4, 3),)) for _ in range(clients)]


def run(
    problem: fb.Problem,
    clients: Sequence[fb.ClientData],
    method: Algorithm,
    environment: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """The run after one iteration; other options are those of the federation."""
    conditions = fb.Environment(**(environment or {}))
    fed = fb.simulated_federation(problem, clients, conditions, **options)
    started = Run(method, fed, {})
    started.advance()
    return started
