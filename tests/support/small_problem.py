"""A small, well-posed problem in float64, some of whose parts a test replaces by wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.diagnostics.advice import Report

Data = tuple[Tensor, ...]
Loss = Callable[..., Tensor]


def upper(x: fb.Tree, y: fb.Tree, batch: Data) -> Tensor:
    return ((batch[0] @ y["y"] - 1) ** 2).mean() + (x["x"] ** 2).sum()


def lower(x: fb.Tree, y: fb.Tree, batch: Data) -> Tensor:
    return ((batch[0] @ y["y"]) ** 2).mean() + ((y["y"] - x["x"]) ** 2).sum()


def problem(upper: Loss = upper, lower: Loss = lower) -> fb.Problem:
    """A problem with three entries in x and in y."""
    start = torch.ones(3, dtype=torch.float64) / 3
    return fb.Problem(upper, lower, {"x": start}, {"y": start})


def client(i: int, samples: int = 6) -> fb.ClientData:
    """Random data for `problem`; the same i gives the same data."""
    train = normal(root(i, "train"), (samples, 3), torch.float64)
    val = normal(root(i, "val"), (samples, 3), torch.float64)
    return fb.ClientData(train=(train,), val=(val,))


def check_losses(upper: Loss = upper, lower: Loss = lower) -> Report:
    """What `fb.check` reports about these losses, on three clients."""
    return fb.check(problem(upper, lower), [client(i) for i in range(3)])
