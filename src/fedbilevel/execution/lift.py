"""From a function of one client to a function of a stack of clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

Lift = Callable[[Callable[..., Any], Sequence[Tensor]], Any]


def stacked(fn: Callable[..., Any], values: Sequence[Tensor]) -> Any:
    """fn, written for the tensors of one client, over the leading axis of all of them."""
    return vmap(fn)(*values)


def single(fn: Callable[..., Any], values: Sequence[Tensor]) -> Any:
    """The same for a stack of one, without vmap."""
    return pytree.tree_map(lambda t: t.unsqueeze(0), fn(*(value[0] for value in values)))


def lifted(lift: Lift, fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn of nested values, lifted."""

    def run(*args: Any) -> Any:
        values, form = pytree.tree_flatten(args)
        return lift(lambda *values: fn(*pytree.tree_unflatten(values, form)), values)

    return run
