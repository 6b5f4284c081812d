"""Gradient accumulation: derivatives on a batch as means over parts of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, Data, named_tensors, repack
from fedbilevel.core.rng import fold_in

Method = TypeVar("Method", bound=Callable[..., Any])

STREAM = 1_000_003  # folded into the key of a batch together with the number of a part


class Part(NamedTuple):
    """A part of a batch, and what its losses are multiplied by.

    Attributes:
        batch: The samples of the part.
        factors: Of the lower loss and of the upper loss. The mean over the parts of the multiplied
            losses is the loss on the whole batch.
    """

    batch: Batch
    factors: tuple[float, float]


def parts_of(batch: Batch, size: int | None) -> list[Part]:
    """Split a batch into parts of at most `size` samples of each side.

    The samples of a side that has fewer than there are parts take turns.

    Args:
        batch: The batch; a side may be missing.
        size: The most samples of a side in a part; None leaves the batch whole.

    Returns:
        The parts, whose random keys differ; a batch that is small enough is the only one.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> batch = fb.Batch(train=(torch.arange(5.0),), val=(torch.arange(2.0),))
        >>> for part, factors in parts_of(batch, size=2):
        ...     print(part.train, part.val, [round(factor, 2) for factor in factors])
        (tensor([0., 1.]),) (tensor([0.]),) [1.2, 0.75]
        (tensor([2., 3.]),) (tensor([1.]),) [1.2, 1.5]
        (tensor([4.]),) (tensor([0.]),) [0.6, 0.75]
    """
    if size is None or not is_split(batch, size):
        return [Part(batch, (1.0, 1.0))]
    count = -(-max(_size(batch.train), _size(batch.val)) // size)
    parts = []
    sides = zip(_split(batch.train, count), _split(batch.val, count), strict=True)
    for number, ((train, of_train), (val, of_val)) in enumerate(sides):
        key = batch.rng
        if isinstance(key, Tensor):
            key = fold_in(key, STREAM + number)
        part = batch._replace(train=train, val=val, rng=key)
        parts.append(Part(part, (of_train, of_val)))
    return parts


def is_split(batch: Batch, size: int | None) -> bool:
    """Tell whether a batch has more than `size` samples of a side; None is no limit."""
    return size is not None and max(_size(batch.train), _size(batch.val)) > size


def _size(side: Data) -> int:
    return len(named_tensors(side)[0][1]) if side else 0


def _split(side: Data, count: int) -> Iterator[tuple[Data, float]]:
    """Yield `count` parts of a side, and the factors of its loss."""
    size = _size(side)
    if size == 0:
        yield from [(side, 1.0)] * count
        return
    distinct = min(count, size)
    splits = [tensor.tensor_split(distinct) for _, tensor in named_tensors(side)]
    for number in range(count):
        tensors = [split[number % distinct] for split in splits]
        uses = len(range(number % distinct, count, distinct))
        yield repack(side, tensors), len(tensors[0]) / size * count / uses


def in_parts(method: Method) -> Method:
    """Return a method of an oracle that evaluates large batches part by part.

    The method must be linear in the two losses together. `Problem.micro_batch` says what is large.
    Only one part is in memory at a time. A part costs its share of the batch, so that `gradients`
    are counted once.

    Args:
        method: A method that takes a batch, and returns nested tensors.

    Returns:
        A method with the same arguments.
    """

    @functools.wraps(method)
    def evaluate(oracle: Any, *args: Any, **options: Any) -> Any:
        size = oracle.problem.micro_batch
        places = [i for i, arg in enumerate(args) if isinstance(arg, Batch)]
        if size is None or not places:
            return method(oracle, *args, **options)
        (place,) = places
        parts = parts_of(args[place], size)
        if len(parts) == 1:
            return method(oracle, *args, **options)
        total = None
        counted = oracle.gradients
        before = oracle.factors
        for part, factors in parts:
            oracle.gradients = counted
            oracle.factors = factors
            try:
                value = method(oracle, *args[:place], part, *args[place + 1 :], **options)
            finally:
                oracle.factors = before
            if total is None:
                total = value
            else:
                total = pytree.tree_map(Tensor.add, total, value)
        return pytree.tree_map(lambda tensor: tensor / len(parts), total)

    return evaluate  # type: ignore[return-value]
