"""Networks with a `backbone` (outer variable) and a `head` (inner variable), and dropout without global randomness."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from fedbilevel.rng import fold_in, uniform


def mlp(inputs: int, hidden: int, outputs: int, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """One hidden layer of ReLU units."""

    def build() -> nn.Module:
        drop = [Dropout(dropout)] if dropout else []
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), *drop, nn.ReLU())
        return _classifier(backbone, nn.Linear(hidden, outputs))

    return seeded(build, seed)


def lenet(channels: int, size: int, outputs: int, seed: int = 0, head_layers: int = 1) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, for square images of 28 (padded to 32) or 32 pixels.

    The head is the last of its three fully connected layers, or the last two.
    """
    if size not in (28, 32):
        raise ValueError(f"size is {size}; it must be 28 or 32")
    if head_layers not in (1, 2):
        raise ValueError(f"head_layers is {head_layers}; it must be 1 or 2")

    def build() -> nn.Module:
        features = [
            *(nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        ]
        first, second = [nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()], [nn.Linear(120, 84), nn.ReLU()]
        last = nn.Linear(84, outputs)
        if head_layers == 1:
            return _classifier(nn.Sequential(*features, *first, *second), last)
        return _classifier(nn.Sequential(*features, *first), nn.Sequential(*second, last))

    return seeded(build, seed)


def _classifier(backbone: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` returns when initialised from `seed`, with the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the accelerators too, for good
        return build()


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
            raise RuntimeError("Dropout in training mode must be called within `with fedbilevel.nets.randomness(rng):`")
        return dropout(h, self.p, next(keys))


def _check_rate(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; it must be at least 0 and below 1")
