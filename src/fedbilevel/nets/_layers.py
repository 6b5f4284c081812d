"""Layers that take their width from their parameters, and dropout with keyed randomness."""

from __future__ import annotations

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
    """Group normalization over groups of a fixed number of channels, without buffers.

    The number of groups is the number of rows of the weight at the time of the call. A network that
    is cut to fewer channels therefore normalizes the groups that are left, each as in the whole
    network; `torch.nn.GroupNorm` would keep the number of groups and mix their channels.

    Args:
        groups: The number of groups.
        size: The number of channels per group. Weight and bias have the shape (groups, size).

    Raises:
        TypeError: An argument is not a whole number.
        ValueError: An argument is below 1.

    References:
        Wu and He, "Group Normalization", ECCV 2018.

    Examples:
        >>> import fedbilevel as fb
        >>> norm = fb.nets.GroupNorm(groups=2, size=4)
        >>> norm(torch.rand(3, 8, 5, 5)).shape
        torch.Size([3, 8, 5, 5])
    """

    def __init__(self, groups: int, size: int) -> None:
        super().__init__()
        shape = (checks.integer("groups", groups, least=1), checks.integer("size", size, least=1))
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, h: Tensor) -> Tensor:
        """Normalize h, of shape (batch, groups * size, ...)."""
        return group_norm(h, len(self.weight), self.weight.flatten(), self.bias.flatten())


class Residual(nn.Module):
    """A residual block: path(h) + shortcut(h).

    Args:
        path: The layers that are added to the shortcut.
        shortcut: `nn.Identity()`, or a projection where the path changes the shape.

    Examples:
        >>> import fedbilevel as fb
        >>> block = fb.nets.Residual(nn.Identity(), nn.Identity())
        >>> block(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut

    def forward(self, h: Tensor) -> Tensor:
        """Return path(h) + shortcut(h)."""
        return self.path(h) + self.shortcut(h)  # type: ignore[no-any-return]


_keys: ContextVar[Iterator[Tensor] | None] = ContextVar("keys", default=None)


@contextmanager
def randomness(rng: Tensor) -> Iterator[None]:
    """Give keys to the `Dropout` layers that are called in a `with` block.

    The n-th call of a `Dropout` layer in the block draws with the key fold_in(rng, n), counted from
    0. Blocks can be nested; the innermost one applies.

    Args:
        rng: A key (`fedbilevel.core.rng`); a loss with a fourth argument receives one.

    Yields:
        Nothing.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.rng import root
        >>> layer = fb.nets.Dropout(0.5)
        >>> with fb.nets.randomness(root(0, "example")):
        ...     first = layer(torch.ones(100))
        >>> with fb.nets.randomness(root(0, "example")):
        ...     second = layer(torch.ones(100))
        >>> torch.equal(first, second)
        True
    """
    token = _keys.set(fold_in(rng, call) for call in itertools.count())
    try:
        yield
    finally:
        _keys.reset(token)


def dropout(h: Tensor, p: float, rng: Tensor) -> Tensor:
    """Set every entry to 0 with probability p, and divide the others by 1 - p.

    Args:
        h: A tensor.
        p: The probability, in [0, 1).
        rng: A key (`fedbilevel.core.rng`). The same key gives the same mask.

    Returns:
        A tensor of the shape of h whose expectation is h.

    Raises:
        ValueError: p is not in [0, 1).

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.rng import root
        >>> dropped = fb.nets.dropout(torch.ones(100), p=0.5, rng=root(0, "example"))
        >>> sorted(set(dropped.tolist()))
        [0.0, 2.0]
    """
    _check_probability(p)
    return h * (uniform(rng, tuple(h.shape)) >= p) / (1 - p)


class Dropout(nn.Module):
    """A dropout layer that draws with a key of the enclosing `randomness` block.

    Use it instead of `torch.nn.Dropout`, which draws from the global generator, so that runs could
    not be repeated. In evaluation mode it returns its input.

    Args:
        p: The probability that an entry is set to 0, in [0, 1).

    Raises:
        ValueError: p is not in [0, 1).
        RuntimeError: The layer is called in training mode outside of a `randomness` block.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.rng import root
        >>> net = nn.Sequential(nn.Linear(4, 100), fb.nets.Dropout(0.5))
        >>> with fb.nets.randomness(root(0, "example")):
        ...     features = net(torch.ones(2, 4))
        >>> features.shape
        torch.Size([2, 100])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        _check_probability(p)
        self.p = p

    def forward(self, h: Tensor) -> Tensor:
        """Apply `dropout` to h with the next key of the block."""
        if not self.training:
            return h
        keys = _keys.get()
        if keys is None:
            raise RuntimeError(
                "Dropout in training mode must be called "
                "within `with fedbilevel.nets.randomness(rng):`"
            )
        return dropout(h, self.p, next(keys))


def _check_probability(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; it must be at least 0 and below 1")
