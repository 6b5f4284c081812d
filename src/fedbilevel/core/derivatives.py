"""`grad`, `vjp` and `vmap` of functions of trees; derivatives record no more than they must.

They do what the functions of these names in `torch.func` do, on the same primitives. Those record
every backward pass, in case that somebody differentiates it again, and import PyTorch's compiler,
which takes a second. These record a backward pass only if its operands are being differentiated
from outside, by an enclosing transform or by autograd. Otherwise it takes less time and memory, and
layers whose fused backward kernel has no derivative of its own, such as GroupNorm, use that kernel.

`unfused_kernels` is for layers whose fused kernels have no second derivative at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fedbilevel.core.nests import flatten, map_tensors, unflatten

Nested = Any  # tensors in any nest of tuples, lists, dicts and trees
Pullback = Callable[[Nested], Nested]


def grad(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    fill_unused: bool = True,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `fn`, as `torch.func.grad` does.

    Args:
        fn: A function that returns a 0-d tensor, or a pair of it and auxiliary values.
        argnums: The position of the argument to differentiate, or several.
        has_aux: Whether `fn` returns auxiliary values.
        fill_unused: Whether the gradient in a tensor that `fn` does not use is zeros; else None.

    Returns:
        A function with the arguments of `fn`. It returns the gradient, or a tuple of gradients if
        `argnums` is a tuple; with `has_aux`, a pair of that and the auxiliary values. It raises a
        `ValueError` if `fn` does not return a 0-d tensor.

    Examples:
        >>> square = lambda x: (x**2).sum()
        >>> grad(square)(torch.tensor([3.0]))
        tensor([6.])
        >>> grad(lambda x: grad(square)(x).sum())(torch.tensor([3.0]))
        tensor([2.])
    """
    positions = (argnums,) if isinstance(argnums, int) else argnums

    def gradient(*args: Any) -> Any:
        arguments = list(args)
        with _differentiation() as level:
            tracked = _track([args[position] for position in positions], level)
            for position, argument in zip(positions, tracked, strict=True):
                arguments[position] = argument
            value = fn(*arguments)
            aux = None
            if has_aux:
                value, aux = value
            if not isinstance(value, Tensor) or value.ndim:
                shape = tuple(getattr(value, "shape", ())) or type(value).__name__
                raise ValueError(f"a loss returned {shape}; it must return a 0-d tensor")
            record = is_differentiated(functorch._unwrap_for_grad(value, level))
            gradients = _backward(
                [value], [None], tracked, record=record, retain=record, fill_unused=fill_unused
            )
            gradients = _untrack(gradients, level)
            aux = _untrack(aux, level)
        if isinstance(argnums, int):
            (gradients,) = gradients
        else:
            gradients = tuple(gradients)
        if has_aux:
            return gradients, aux
        return gradients

    return gradient


def vjp(fn: Callable[[Nested], tuple[Nested, Any]], x: Nested) -> tuple[Nested, Pullback, Any]:
    """Evaluate a function and return what pulls gradients back through it, as `torch.func.vjp`.

    Args:
        fn: A function that returns floating tensors, and auxiliary values.
        x: Its argument.

    Returns:
        The tensors that `fn` returned; a function that maps gradients with respect to them to the
        gradient with respect to x, and can be called more than once; the auxiliary values.

    Examples:
        >>> value, pullback, _ = vjp(lambda x: (x**2, None), torch.tensor([1.0, 3.0]))
        >>> value
        tensor([1., 9.])
        >>> pullback(torch.tensor([1.0, 10.0]))
        tensor([ 2., 60.])
    """
    with _differentiation() as level:
        tracked = _track(x, level)
        value, aux = fn(tracked)
        tracked_values = pytree.tree_leaves(value)
        value = _untrack(value, level)
        aux = _untrack(aux, level)
    values = pytree.tree_leaves(value)

    def pullback(gradient: Nested) -> Nested:
        gradients = pytree.tree_leaves(gradient)
        record = any(map(is_differentiated, (*gradients, *values)))
        return _backward(
            tracked_values, gradients, tracked, record=record, retain=True, fill_unused=True
        )

    return value, pullback, aux


def vmap(fn: Callable[..., Nested], in_dims: Any = 0) -> Callable[..., Nested]:
    """Return `torch.vmap` of a function, without its warnings.

    Fused attention has no rule for stacks. PyTorch then loops over them, and warns each time.

    Args:
        fn: A function of tensors in any nest.
        in_dims: The axis of each argument that is mapped over; None for none.

    Returns:
        A function of stacks.

    Examples:
        >>> vmap(torch.dot)(torch.ones(2, 3), torch.ones(2, 3))
        tensor([3., 3.])
    """
    functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    stacked: Callable[..., Nested] = torch.vmap(fn, in_dims=in_dims)
    return stacked


def is_differentiated(value: Tensor) -> bool:
    """Tell whether a value is being differentiated, by a transform or by autograd.

    Args:
        value: A tensor, which may be wrapped by transforms such as `torch.vmap`.

    Returns:
        Whether a derivative of the value may be taken later.

    Examples:
        >>> is_differentiated(torch.ones(2))
        False
        >>> is_differentiated(torch.ones(2, requires_grad=True) * 2)
        True
    """
    while not value.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(value):
            return False
        value = functorch.get_unwrapped(value)
    return True


@contextmanager
def unfused_kernels() -> Iterator[None]:
    """A context in which what attention and recurrent layers compute has second derivatives.

    It sets PyTorch's kernels for attention to the unfused ones, and leaves cuDNN alone with nothing
    (convolutions too); both are restored at the end. Derivatives may be taken outside.

    Yields:
        Nothing.

    Examples:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> def loss(q):
        ...     with unfused_kernels():
        ...         return F.scaled_dot_product_attention(q, q, q).sum()
        >>> q = torch.ones(1, 2, 4)
        >>> grad(lambda q: grad(loss)(q).sum())(q).shape
        torch.Size([1, 2, 4])
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.enabled = enabled


@contextmanager
def _differentiation() -> Iterator[int]:
    """A level of differentiation: what is tracked at it is invisible to enclosing transforms."""
    level = functorch._grad_increment_nesting()
    try:
        with torch.enable_grad():
            yield level
    finally:
        functorch._grad_decrement_nesting()


def _track(values: Nested, level: int) -> Nested:
    """Return tensors whose uses are recorded at a level."""

    def track(tensor: Tensor) -> Tensor:
        tracked: Tensor = functorch._wrap_for_grad(tensor, level)
        allowed = functorch.get_inplace_requires_grad_allowed()
        functorch.set_inplace_requires_grad_allowed(True)
        try:
            return tracked.requires_grad_()
        finally:
            functorch.set_inplace_requires_grad_allowed(allowed)

    return map_tensors(track, values)


def _untrack(values: Nested, level: int) -> Nested:
    """Return tensors as enclosing transforms see them."""
    return map_tensors(lambda tensor: functorch._unwrap_for_grad(tensor, level), values)


def _backward(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Nested,
    *,
    record: bool,
    retain: bool,
    fill_unused: bool,
) -> Nested:
    """Return the gradient with respect to `inputs`, given those with respect to `values`.

    None stands for 1, for a value that is 0-d; PyTorch then imports less.
    """
    leaves, form = flatten(inputs)
    dependent = [
        (value, gradient)
        for value, gradient in zip(values, gradients, strict=True)
        if value.requires_grad
    ]
    results: Sequence[Tensor | None] = [None] * len(leaves)
    if dependent:
        results = torch.autograd.grad(
            [value for value, _ in dependent],
            leaves,
            [gradient for _, gradient in dependent],
            retain_graph=retain,
            create_graph=record,
            allow_unused=True,
        )
    if fill_unused:
        results = [
            torch.zeros_like(leaf) if result is None else result
            for leaf, result in zip(leaves, results, strict=True)
        ]
    return unflatten(results, form)
