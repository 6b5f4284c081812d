"""Apply a function written for one client to a stack of clients.

A stack is a set of tensors whose leading axis runs over clients. Phases, losses and stages are
written for one client; executors run them on stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.derivatives import is_differentiated, vmap

Nested = Any  # tensors in any nest of tuples, dicts and trees

ApplyToStack = Callable[[Callable[..., Nested], Sequence[Tensor]], Nested]


def apply_vmap(fn: Callable[..., Nested], stacks: Sequence[Tensor]) -> Nested:
    """Call `fn`, a function of one client's tensors, on all clients at once under `vmap`.

    A stack that repeats one tensor for all clients (`Tensor.expand`) is passed as that tensor. What
    depends on such tensors alone is then computed once, and a product of a shared weight with the
    samples of all clients is one product.
    """
    shared = [_is_shared(stack) for stack in stacks]
    if all(shared):  # `vmap` needs an axis to map over
        return vmap(fn)(*stacks)
    in_dims = tuple(None if is_shared else 0 for is_shared in shared)
    args = [
        stack[0] if is_shared else stack for stack, is_shared in zip(stacks, shared, strict=True)
    ]
    return vmap(fn, in_dims=in_dims)(*args)


def _is_shared(stack: Tensor) -> bool:
    """Tell whether all entries of a stack are one tensor.

    They are not if somebody differentiates with respect to each of them.
    """
    return stack.stride(0) == 0 and len(stack) > 1 and not is_differentiated(stack)


def apply_to_one(fn: Callable[..., Nested], stacks: Sequence[Tensor]) -> Nested:
    """Call `fn` on a stack of one client without `vmap`; the result is a stack of one."""
    result = fn(*(stack[0] for stack in stacks))
    return pytree.tree_map(lambda tensor: tensor.unsqueeze(0), result)


def vectorized(
    fn: Callable[..., Nested], apply: ApplyToStack = apply_vmap
) -> Callable[..., Nested]:
    """Turn `fn`, a function of one client's nested values, into a function of stacked ones."""

    def on_stack(*args: Nested) -> Nested:
        tensors, spec = pytree.tree_flatten(args)

        def on_one(*tensors: Tensor) -> Nested:
            return fn(*pytree.tree_unflatten(tensors, spec))

        return apply(on_one, tensors)

    return on_stack
