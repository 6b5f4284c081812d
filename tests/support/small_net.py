"""A small network on random images, for tests of submodels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.algorithms import Algorithm
from fedbilevel.core.tree import Tree, dot, flatten
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run


def small_net(
    net: nn.Module | None = None, clients: int = 5, ridge: float = 0.1, **options: Any
) -> tuple[fb.Problem, list[fb.ClientData], nn.Module]:
    """A problem on random images of 8 x 8, its clients and its network, in float64.

    The backbone of the network (a Conv-4 by default) is x, its head is y.
    """
    net = (net or nets.conv4(1, 8, 3, seed=1, hidden=16)).double()
    apply, x, y = fb.split_module(net, lower="head.")

    def upper(x: Tree, y: Tree, batch: Any) -> Tensor:
        return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: Any) -> Tensor:
        return upper(x, y, batch) + 0.5 * ridge * dot(y, y)

    draw = torch.Generator().manual_seed(0)

    def data() -> tuple[Tensor, Tensor]:
        images = torch.randn(6, 1, 8, 8, generator=draw, dtype=torch.float64)
        labels = torch.randint(3, (6,), generator=draw)
        return images, labels

    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y, axes=nets.axes(net), **options)
    return problem, [fb.ClientData(train=data(), val=data()) for _ in range(clients)], net


CAPACITY = [1.0, 0.5, 0.25, 0.125, 0.0625]
"""The capacities of the five clients of `cut_federation`."""


def cut_federation(environment: dict[str, Any] | None = None, **options: Any) -> Federation:
    """A simulated federation on `small_net` whose clients hold submodels of different sizes."""
    problem, clients, _ = small_net()
    conditions = fb.Environment(capacity=CAPACITY, **(environment or {}))
    return fb.simulated_federation(problem, clients, conditions, **options)


def small_net_run(
    algorithm: Algorithm,
    capacity: Any,
    kind: str = "mlp",
    clients: int = 5,
    lower_level: str = "shared",
    environment: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """A run that has not begun, of a method on clients of some capacity.

    The network is an MLP, or a Conv-4 with `kind="conv4"`; other options are those of the
    federation.
    """
    net = nets.mlp(64, 8, 3, seed=1)
    if kind == "conv4":
        net = nets.conv4(1, 8, 3, seed=1, hidden=8)
    problem, held, _ = small_net(net, clients, ridge=0.02, lower_level=lower_level)
    conditions = {"capacity": capacity, "batch_size": 4, "local_steps": 2, **(environment or {})}
    fed = fb.simulated_federation(problem, held, fb.Environment(**conditions), **options)
    return Run(algorithm, fed, {})


def advance(run: Run, iterations: int) -> None:
    """Run some iterations."""
    for _ in range(iterations):
        run.advance()


def weights_of(run: Run) -> Tensor:
    """x and y as one vector."""
    return torch.cat([flatten(run.state.x), flatten(run.state.y)])
