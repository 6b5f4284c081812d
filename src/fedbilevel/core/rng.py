"""Keyed randomness: every draw is a pure function of a key, the same on every runtime and device.

A key is an int64 tensor. Draws are counter-based (SplitMix64, Steele, Lea and Flood 2014) and made of integer tensor
operations only, so that they work under `torch.func.vmap` and give the same bits on a CPU and on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX1 = _signed(0xBF58476D1CE4E5B9)
MIX2 = _signed(0x94D049BB133111EB)
LARGEST = (1 << 63) - 1


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift (that of int64 tensors is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * MIX1
    bits = (bits ^ _shift(bits, 27)) * MIX2
    return bits ^ _shift(bits, 31)


@functools.lru_cache(maxsize=4096)
def _mix_number(value: int) -> int:
    """The same of a number, without a tensor: a GPU need not wait for one."""
    word = value % (1 << 64)
    for shift, factor in ((30, MIX1), (27, MIX2)):
        word = (word ^ word >> shift) * factor % (1 << 64)
    return _signed(word ^ word >> 31)


def root(seed: int, purpose: str) -> Tensor:
    """The key of everything drawn for one purpose: a run's streams never share a draw."""
    return torch.tensor(_mix_number(seed ^ _mix_number(crc32(purpose.encode()) + GOLDEN)))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number (a task, a client, a step)."""
    mixed = _mix(data.long() + GOLDEN) if isinstance(data, Tensor) else _mix_number(data + GOLDEN)
    return _mix(key ^ mixed)


def bits(key: Tensor, count: int) -> Tensor:
    """`count` 64-bit words for each key: shape (*key.shape, count)."""
    return _mix(key.unsqueeze(-1) + torch.arange(1, count + 1, device=key.device) * GOLDEN)


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), all bits of the mantissa random."""
    mantissa = 53 if dtype == torch.float64 else 24
    count = int(torch.Size(shape).numel())
    return (_shift(bits(key, count), 64 - mantissa).to(dtype) * 2.0**-mantissa).reshape(
        (*key.shape, *shape)
    )


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box-Muller)."""
    radius = (-2 * torch.log1p(-uniform(fold_in(key, 0), shape, dtype))).sqrt()
    return radius * torch.cos(2 * torch.pi * uniform(fold_in(key, 1), shape, dtype))


def integers(key: Tensor, low: int, high: int | Tensor) -> Tensor:
    """One integer in [low, high], both included, for each key."""
    return low + _shift(bits(key, 1)[..., 0], 1) % (high - low + 1)


def subset(key: Tensor, population: int, count: int) -> list[int]:
    """`count` distinct numbers below `population`, uniform, at a cost that does not depend on `population`."""
    if count >= population:
        return list(range(population))
    chosen: dict[int, None] = {}
    block = 0
    while len(chosen) < count:
        for draw in (_shift(bits(fold_in(key, block), 2 * count), 1) % population).tolist():
            chosen.setdefault(draw)
            if len(chosen) == count:
                break
        block += 1
    return list(chosen)


def rows(keys: Tensor, size: int, count: int, sizes: Tensor | None = None) -> Tensor:
    """For each key `count` distinct indices below `size`, uniform: mini-batches without replacement.

    sizes: of each key its own, at most `size`.
    """
    draws = _shift(bits(keys, size), 1)
    if sizes is not None:
        draws = draws.masked_fill(
            torch.arange(size, device=keys.device) >= sizes.unsqueeze(-1), LARGEST
        )
    return draws.topk(count, largest=False).indices
