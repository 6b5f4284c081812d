"""Layers that take their width from their parameters, and dropout without global randomness."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm

from fedbilevel.core import checks
from fedbilevel.core.rng import fold_in, uniform


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018) of groups of `size` channels: weight and bias are (groups, size).

    There are as many groups as the weight has rows when it is called, so a network cut to fewer channels normalises the
    groups that are left, each as in the whole network. No buffers.
    """

    def __init__(self, groups: int, size: int) -> None:
        super().__init__()
        shape = checks.integer("groups", groups, 1), checks.integer("size", size, 1)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, h: Tensor) -> Tensor:
        return group_norm(h, len(self.weight), self.weight.flatten(), self.bias.flatten())


class Residual(nn.Module):
    """path(h) + shortcut(h)."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut

    def forward(self, h: Tensor) -> Tensor:
        return self.path(h) + self.shortcut(h)  # type: ignore[no-any-return]


_keys: ContextVar[Iterator[Tensor] | None] = ContextVar("keys", default=None)


@contextmanager
def randomness(rng: Tensor) -> Iterator[None]:
    """Within this context the n-th call of a `Dropout` draws with the key fold_in(rng, n)."""
    token = _keys.set(fold_in(rng, call) for call in itertools.count())
    try:
        yield
    finally:
        _keys.reset(token)


def dropout(h: Tensor, p: float, rng: Tensor) -> Tensor:
    """h with each entry zeroed with probability p and the others divided by 1 - p, drawn with the key rng."""
    _check_rate(p)
    return h * (uniform(rng, tuple(h.shape)) >= p) / (1 - p)


class Dropout(nn.Module):
    """`dropout` with a key of the enclosing `randomness(rng)`; the identity in evaluation mode."""

    def __init__(self, p: float) -> None:
        super().__init__()
        _check_rate(p)
        self.p = p

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        keys = _keys.get()
        if keys is None:
            raise RuntimeError(
                "Dropout in training mode must be called within `with fedbilevel.nets.randomness(rng):`"
            )
        return dropout(h, self.p, next(keys))


def _check_rate(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; it must be at least 0 and below 1")
