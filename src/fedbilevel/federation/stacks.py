"""Stacks of replies: values of several clients along a leading axis, and their weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.tree import Tree, flatten
from fedbilevel.federation.task import Sums, Values

MANY_TENSORS = 8


def weighted_sum(stack: Values, weights: Tensor, mask: Tensor | None = None) -> Values:
    """The sum over clients of weight times reply.

    Args:
        stack: The replies; whole numbers are summed in float64.
        weights: One weight per client.
        mask: Which clients to count; by default all of them.

    Returns:
        A value of the shape of one reply.
    """
    converted: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def total(values: Tensor) -> Tensor:
        rows = _rows(values)
        if mask is not None:
            rows = rows.where(mask.unsqueeze(1), 0.0)
        kind = rows.device, rows.dtype
        if kind not in converted:
            converted[kind] = weights.to(*kind)
        summed = converted[kind] @ rows
        return summed if values.ndim == 2 else summed.reshape(values.shape[1:])

    sums: Values = {}
    for name, value in stack.items():
        if isinstance(value, Tensor):
            sums[name] = total(value)
        elif isinstance(value, Tree):
            sums[name] = value.map(total)
        else:
            sums[name] = pytree.tree_map(total, value)
    return sums


def _joined(value: Any) -> Any:
    """The values of a stack with a tree of many tensors as one matrix, a row per client.

    A GPU takes longer to begin an operation on a small tensor than to carry it out.
    """
    if isinstance(value, Tree) and len(value) > MANY_TENSORS:
        return torch.cat([_rows(tensor) for tensor in value.values()], 1)
    return value


def _largest_entries(value: Any, clients: int, device: torch.device) -> Tensor:
    """The largest absolute entry of each client's value; not finite if an entry is not."""
    largest = [torch.zeros(clients, dtype=torch.float64, device=device)]
    for tensor in pytree.tree_leaves(value):
        largest.append(torch.linalg.vector_norm(_rows(tensor), torch.inf, 1).double())
    return torch.stack(largest).amax(0)


def sum_finite(stack: Values, weights: Tensor, steps: Tensor) -> Sums:
    """The weighted sums of those replies that are finite, computed without waiting for a GPU."""
    joined = {name: _joined(value) for name, value in stack.items()}
    clients = len(weights)
    largest = [_largest_entries(value, clients, weights.device) for value in joined.values()]
    finite = torch.stack(largest).isfinite()
    accepted = finite.all(0)
    accepted_weights = weights.where(accepted, 0.0)
    totals = weighted_sum(joined, weights, accepted)
    for name, total in totals.items():
        if isinstance(total, Tree):
            totals[name] = flatten(total)
    return Sums(
        totals,
        steps=accepted_weights @ steps.double(),
        accepted=accepted.sum(),
        weight=accepted_weights.sum(),
        finite=finite,
    )


def reply_at(stack: Values, index: int) -> Values:
    """The reply of one client; a copy, because a view would keep the whole stack in memory."""

    def entry(tensor: Tensor) -> Tensor:
        return tensor[index].clone()

    reply = {}
    for name, value in stack.items():
        if isinstance(value, Tree):
            reply[name] = value.map(entry)
        else:
            reply[name] = pytree.tree_map(entry, value)
    return reply


def stack_replies(replies: Sequence[Values]) -> Values:
    """The replies of several clients as a stack."""
    return pytree.tree_map(lambda *tensors: torch.stack(tensors), *replies)  # type: ignore[no-any-return]


def copies(values: Any, clients: int) -> Any:
    """A stack with the same values for every client."""
    return pytree.tree_map(lambda t: t.expand(clients, *t.shape).clone(), values)


def rows_of(stack: Any, clients: Sequence[int]) -> Any:
    """The rows of some of the clients of a stack, in the order given."""
    return pytree.tree_map(lambda t: t[list(clients)], stack)


def with_rows(stack: Any, clients: Sequence[int], rows: Any) -> Any:
    """A stack with other rows for some of its clients."""

    def replace(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, torch.tensor(clients, device=old.device), new)

    return pytree.tree_map(replace, stack, rows)


def _rows(values: Tensor) -> Tensor:
    """One row of floating-point numbers per client."""
    if not values.is_floating_point():
        values = values.double()
    if values.ndim == 2:
        return values
    return values.reshape(values.shape[0], -1)
