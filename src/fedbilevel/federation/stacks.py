"""The replies of several clients as one value: their tensors have a leading axis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.tree import Tree

Values = dict[str, Any]  # a reply, or a stack of replies: trees and tensors, by name


class Sums(NamedTuple):
    """A stack that was added up where it was computed, without a look at it: `accepted` replies are finite, and
    `totals` and `steps` are theirs; `finite` has a row for each tensor of a reply, a column for each client."""

    totals: Values
    steps: Tensor
    accepted: Tensor
    finite: Tensor

    @property
    def names(self) -> list[str]:
        """What the rows of `finite` belong to."""
        return [name for name, value in self.totals.items() for _ in pytree.tree_leaves(value)]


def summed(stack: Values, weights: Tensor, steps: Tensor) -> Sums:
    largest = [torch.linalg.vector_norm(_rows(t), torch.inf, 1).double() for t in pytree.tree_leaves(stack)]
    finite = torch.stack(largest).isfinite()
    good = finite.all(0)
    mine = weights.where(good, 0.0)
    return Sums(weighted_sum(stack, weights, good), mine @ steps.double(), good.sum(), finite)


def weighted_sum(stack: Values, weights: Tensor, good: Tensor | None = None) -> Values:
    """Over all of them, or over those that are good."""
    there = functools.cache(weights.to)  # once for each device and dtype

    def total(values: Tensor) -> Tensor:
        rows = _rows(values)
        if good is not None:
            rows = rows.where(good.unsqueeze(1), 0.0)
        return (there(rows.device, rows.dtype) @ rows).reshape(values.shape[1:])

    return pytree.tree_map(total, stack)  # type: ignore[no-any-return]


def _rows(values: Tensor) -> Tensor:
    return (values if values.is_floating_point() else values.double()).reshape(len(values), -1)


class Packing(NamedTuple):
    """How the values of one client lie in a row of bytes: one tensor a client is little to keep."""

    kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    form: pytree.TreeSpec

    def stack(self, rows: Tensor) -> Values:
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in self.kinds]
        parts = zip(rows.split(sizes, 1), self.kinds, strict=True)
        values = [_own(part).view(-1).view(dtype).view(len(rows), *shape) for part, (dtype, shape) in parts]
        return pytree.tree_unflatten(values, self.form)  # type: ignore[no-any-return]


def packed(stack: Values) -> tuple[Tensor, Packing]:
    tensors, form = pytree.tree_flatten(stack)
    rows = [_own(t.reshape(len(t), -1)).view(torch.uint8) for t in tensors]
    return torch.cat(rows, 1), Packing(tuple((t.dtype, t.shape[1:]) for t in tensors), form)


def _own(t: Tensor) -> Tensor:
    # `contiguous` leaves a single row where it is, at a place and with strides that another dtype need not allow.
    return t.clone(memory_format=torch.contiguous_format)


def row(stack: Values, j: int) -> Values:
    """The reply of one client; a copy, because a view would keep the whole stack for as long as someone holds it."""

    def one(t: Tensor) -> Tensor:
        return t[j].clone()

    return {name: value.map(one) if isinstance(value, Tree) else one(value) for name, value in stack.items()}


def join(rows: Sequence[Values]) -> Values:
    """The other way round: the replies of several clients as a stack."""

    def stack(*values: Any) -> Any:
        return values[0].map(stack, *values[1:]) if isinstance(values[0], Tree) else torch.stack(values)

    return {name: stack(*(values[name] for values in rows)) for name in rows[0]}
