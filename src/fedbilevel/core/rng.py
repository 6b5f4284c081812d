"""Keyed randomness: every draw is a pure function of a key, the same on every device.

A key is an int64 tensor, of shape () or of any other shape for many keys at once. `root` makes a
key from a seed, `fold_in` derives further keys, and the other functions draw numbers with a key.
Drawing twice with one key gives the same numbers; there is no hidden state. Draws are counter-based
(SplitMix64: Steele, Lea and Flood 2014) and consist of integer tensor operations, so that they work
under `torch.func.vmap` and give the same bits on a CPU and on a GPU.

Examples:
    >>> from fedbilevel.core import rng
    >>> key = rng.root(0, "example")
    >>> clients = rng.fold_in(key, torch.arange(3))  # a key per client
    >>> rng.uniform(clients, (2,)).shape
    torch.Size([3, 2])
    >>> bool((rng.uniform(clients, (2,)) == rng.uniform(clients, (2,))).all())
    True
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned number."""
    if value >> 63:
        return value - (1 << 64)
    return value


GOLDEN = _signed(0x9E3779B97F4A7C15)  # the constants of SplitMix64
MIX1 = _signed(0xBF58476D1CE4E5B9)
MIX2 = _signed(0x94D049BB133111EB)
LARGEST = (1 << 63) - 1
GOLDEN_WORD = np.uint64(0x9E3779B97F4A7C15)  # the same for NumPy
WORD1 = np.uint64(0xBF58476D1CE4E5B9)
WORD2 = np.uint64(0x94D049BB133111EB)
SHIFT1 = np.uint64(30)
SHIFT2 = np.uint64(27)
SHIFT3 = np.uint64(31)
SMALL = 1000
FEW = 8  # so many words are mixed faster one by one than as an array
MASK = (1 << 64) - 1


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; `>>` on int64 tensors is an arithmetic one."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    if _is_small_on_cpu(bits):
        return _from_words(_mix_words(_to_words(bits)), bits.shape)
    bits = (bits ^ _shift(bits, 30)) * MIX1
    bits = (bits ^ _shift(bits, 27)) * MIX2
    return bits ^ _shift(bits, 31)


def _is_small_on_cpu(bits: Tensor) -> bool:
    """Tell whether a tensor is a plain one on the CPU, with few entries, outside of transforms.

    NumPy takes a third of the time for the keys of a cohort.
    """
    if type(bits) is not Tensor or functorch.maybe_current_level() is not None:
        return False
    return bits.device.type == "cpu" and bits.numel() <= SMALL


def _to_words(bits: Tensor) -> np.ndarray:
    """View 64-bit integers as an array of unsigned ones, which has at least one dimension."""
    return np.atleast_1d(bits.numpy()).view(np.uint64)


def _mixed_words(data: int | Tensor) -> np.ndarray | np.uint64:
    """Return what is folded into a key for these numbers."""
    if isinstance(data, Tensor):
        return _mix_words(_to_words(data.long()) + GOLDEN_WORD)
    return np.uint64(_mix_int(data + GOLDEN) % (1 << 64))


@functools.lru_cache(maxsize=256)
def _mixed_range(numbers: range) -> np.ndarray:
    """`_mixed_words` of the numbers in a range."""
    return _mix_words(np.array(numbers, dtype=np.int64).view(np.uint64) + GOLDEN_WORD)


def _from_words(words: np.ndarray, shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(words.view(np.int64)).reshape(shape)


def _mix_words(words: np.ndarray) -> np.ndarray:
    """`_mix` of an array of unsigned words."""
    words = (words ^ (words >> SHIFT1)) * WORD1
    words = (words ^ (words >> SHIFT2)) * WORD2
    words ^= words >> SHIFT3
    return words


@functools.lru_cache(maxsize=4096)
def _mix_int(value: int) -> int:
    """`_mix` of a Python int, without a tensor that would have to be copied to a GPU."""
    return _mix_word(value)


def _mix_word(value: int) -> int:
    word = value & MASK
    word = (word ^ word >> 30) * MIX1 & MASK
    word = (word ^ word >> 27) * MIX2 & MASK
    return _signed(word ^ word >> 31)


def _fold_in_int(key: int, number: int) -> int:
    """`fold_in` of a number into one key."""
    return _mix_word(key ^ _mix_int(number + GOLDEN))


@functools.lru_cache(maxsize=256)
def root_number(seed: int, purpose: str) -> int:
    """Make the key of all draws for one purpose, as a plain number; see `root`.

    Args:
        seed: The seed of the run.
        purpose: A name for what is drawn, such as "cohort".

    Returns:
        The number that `root` returns as a tensor.

    Examples:
        >>> root_number(0, "cohort") == int(root(0, "cohort"))
        True
    """
    return _mix_int(seed ^ _mix_int(crc32(purpose.encode()) + GOLDEN))


def root(seed: int, purpose: str) -> Tensor:
    """Make the key of all draws for one purpose.

    Different purposes have independent draws, so that the streams of one run never share a draw.

    Args:
        seed: The seed of the run.
        purpose: A name for what is drawn, such as "cohort".

    Returns:
        A key of shape ().

    Examples:
        >>> root(0, "cohort")
        tensor(-2638440607767471136)
    """
    return torch.tensor(root_number(seed, purpose))


def fold_in(key: Tensor, *data: int | Tensor) -> Tensor:
    """Derive a key from a key and a number, such as the index of a client or of a step.

    Args:
        key: One key or many.
        *data: Numbers, or integer tensors whose shapes broadcast with that of `key`, to fold in one
            after the other.

    Returns:
        The new keys. The order matters: folding in 1 and then 2 is not folding in 2 and then 1.

    Examples:
        >>> fold_in(root(0, "cohort"), 5)
        tensor(-2367207789098686351)
        >>> fold_in(root(0, "cohort"), torch.arange(4)).shape
        torch.Size([4])
        >>> bool(fold_in(root(0, "cohort"), 1, 2) == fold_in(fold_in(root(0, "cohort"), 1), 2))
        True
    """
    tensors = [key, *(each for each in data if isinstance(each, Tensor))]
    if all(map(_is_small_on_cpu, tensors)):
        words = _to_words(key)
        for each in data:
            words = _mix_words(words ^ _mixed_words(each))
        is_single = not any(tensor.ndim for tensor in tensors)
        return _from_words(words, () if is_single else words.shape)
    for each in data:
        if isinstance(each, Tensor):
            key = _mix(key ^ _mix(each.long() + GOLDEN))
        else:
            key = _mix(key ^ _mix_int(each + GOLDEN))
    return key


def fold_in_each(keys: Sequence[int], *columns: Sequence[int]) -> list[int]:
    """Derive a key from each of several keys and numbers of its own, all as plain numbers.

    Args:
        keys: The keys.
        *columns: The numbers to fold in one after the other; a column has one entry per key.

    Returns:
        The new keys.

    Examples:
        >>> fold_in_each([root_number(0, "cohort")] * 2, [5, 6])
        [-2367207789098686351, 6899143605855731027]
        >>> fold_in(root(0, "cohort"), torch.tensor([5, 6]))
        tensor([-2367207789098686351,  6899143605855731027])
    """
    if len(keys) <= FEW:
        rows = zip(keys, *columns, strict=True)
        return [functools.reduce(_fold_in_int, row) for row in rows]
    folded: list[int] = fold_in(torch.tensor(keys), *map(torch.tensor, columns)).tolist()
    return folded


def fold_in_ranges(key: Tensor, *ranges: range) -> Tensor:
    """Derive a key for each combination of a key with a number of each range.

    Args:
        key: One key or many.
        *ranges: The numbers to fold in one after the other.

    Returns:
        Keys of shape (length of each range, *key.shape).

    Examples:
        >>> keys = fold_in(root(0, "example"), torch.arange(5))
        >>> by_step = fold_in_ranges(keys, range(3), range(10, 12))
        >>> by_step.shape
        torch.Size([3, 2, 5])
        >>> bool((by_step[2, 0] == fold_in(keys, 2, 10)).all())
        True
    """
    shape = (*map(len, ranges), *key.shape)
    size = math.prod(shape)
    if size <= SMALL and _is_small_on_cpu(key):
        if size <= FEW:
            derived = [
                functools.reduce(_fold_in_int, numbers, start)
                for numbers in itertools.product(*ranges)
                for start in key.flatten().tolist()
            ]
            return torch.tensor(derived, dtype=torch.int64).view(shape)
        words = _to_words(key)
        for position, each in enumerate(ranges):
            ones = (1,) * (len(shape) - position - 1)
            words = _mix_words(words ^ _mixed_range(each).reshape(-1, *ones))
        return _from_words(words, shape)
    for position, each in enumerate(ranges):
        ones = (1,) * (len(shape) - position - 1)
        numbers = torch.arange(each.start, each.stop, device=key.device)
        key = fold_in(key, numbers.view(-1, *ones))
    return key


def bits(key: Tensor, count: int) -> Tensor:
    """Draw random 64-bit words: the first outputs of SplitMix64 with `key` as its seed.

    Args:
        key: One key or many.
        count: The number of words per key.

    Returns:
        An int64 tensor of shape (*key.shape, count).

    Examples:
        >>> bits(torch.tensor(1234567), 2)
        tensor([6457827717110365317, 3203168211198807973])
    """
    return _mix(key.unsqueeze(-1) + torch.arange(1, count + 1, device=key.device) * GOLDEN)


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniform numbers in [0, 1), with every bit of the mantissa random.

    Args:
        key: One key or many.
        shape: The shape of the numbers of one key.
        dtype: `torch.float32` or `torch.float64`.

    Returns:
        A tensor of shape (*key.shape, *shape).

    Examples:
        >>> u = uniform(root(0, "example"), (1000,))
        >>> bool((u >= 0).all() and (u < 1).all())
        True
    """
    mantissa = 24
    if dtype == torch.float64:
        mantissa = 53
    count = int(torch.Size(shape).numel())
    numbers = _shift(bits(key, count), 64 - mantissa).to(dtype) * 2.0**-mantissa
    return numbers.reshape((*key.shape, *shape))


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers (Box-Muller).

    Args:
        key: One key or many.
        shape: The shape of the numbers of one key.
        dtype: `torch.float32` or `torch.float64`.

    Returns:
        A tensor of shape (*key.shape, *shape).

    Examples:
        >>> normal(fold_in(root(0, "example"), torch.arange(3)), (2, 5)).shape
        torch.Size([3, 2, 5])
    """
    radius = (-2 * torch.log1p(-uniform(fold_in(key, 0), shape, dtype))).sqrt()
    return radius * torch.cos(2 * torch.pi * uniform(fold_in(key, 1), shape, dtype))


def integers(key: Tensor, low: int, high: int | Tensor) -> Tensor:
    """Draw one integer per key, uniformly from low to high, both included.

    Args:
        key: One key or many.
        low: The smallest integer.
        high: The largest integer; a tensor has one entry per key.

    Returns:
        An int64 tensor of the shape of `key`.

    Examples:
        >>> draws = integers(fold_in(root(0, "example"), torch.arange(100)), 1, 6)
        >>> sorted(set(draws.tolist()))
        [1, 2, 3, 4, 5, 6]
    """
    return low + _shift(bits(key, 1)[..., 0], 1) % (high - low + 1)


def subset(key: Tensor, population: int, count: int) -> list[int]:
    """Draw distinct numbers from 0 to population - 1, in random order.

    The cost grows with `count` and not with `population`: a cohort of ten clients is drawn from a
    million as fast as from a hundred.

    Args:
        key: One key.
        population: The number of candidates.
        count: How many to draw; with `count >= population` all of them are returned, in order.

    Returns:
        The numbers.

    Examples:
        >>> cohort = subset(root(0, "example"), population=10**6, count=10)
        >>> len(set(cohort))
        10
    """
    if count >= population:
        return list(range(population))
    drawn: dict[int, None] = {}  # an ordered set
    block = 0
    while len(drawn) < count:
        for number in (_shift(bits(fold_in(key, block), 2 * count), 1) % population).tolist():
            drawn.setdefault(number)
            if len(drawn) == count:
                break
        block += 1
    return list(drawn)


def rows(keys: Tensor, size: int, count: int, sizes: Tensor | None = None) -> Tensor:
    """Draw row indices of mini-batches: for every key distinct indices, uniformly.

    Args:
        keys: A key per mini-batch.
        size: The number of rows to draw from.
        count: The number of indices per key; at most the number of rows to draw from.
        sizes: Where keys have different numbers of rows, that of every key, at most `size`.

    Returns:
        An int64 tensor of shape (*keys.shape, count) with indices in random order.

    Examples:
        >>> keys = fold_in(root(0, "example"), torch.arange(2))
        >>> batches = rows(keys, size=8, count=3, sizes=torch.tensor([8, 3]))
        >>> sorted(batches[1].tolist())
        [0, 1, 2]
    """
    draws = _shift(bits(keys, size), 1)
    if sizes is not None:
        missing = torch.arange(size, device=keys.device) >= sizes.unsqueeze(-1)
        draws = draws.masked_fill(missing, LARGEST)
    return draws.topk(count, largest=False).indices
