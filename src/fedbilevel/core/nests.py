"""Flatten nested values, such as messages and carries, into tensors and a form.

PyTorch's pytrees do the same for more types, which takes four times as long: on a small problem,
longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.tree import Tree

Nested = Any  # tensors in any nest of tuples, dicts and trees
Form = Hashable  # what is left of a nest without its leaves; equal for nests of equal structure

LEAF = None
LEAF_TYPES = (Tensor, int, float, bool, str)


def flatten(nested: Nested) -> tuple[list[Tensor], Form]:
    """Return the leaves of a nest, and its form.

    Args:
        nested: Tensors in any nest of tuples, named tuples, lists, dicts, trees, and whatever else
            PyTorch knows as a pytree. Other values are leaves too.

    Examples:
        >>> import torch
        >>> leaves, form = flatten({"y": Tree(w=torch.ones(2)), "pair": (torch.zeros(1), 3)})
        >>> leaves
        [tensor([1., 1.]), tensor([0.]), 3]
        >>> unflatten([1, 2, 3], form)
        {'y': {'w': 1}, 'pair': (2, 3)}
    """
    leaves: list[Tensor] = []
    return leaves, _flatten(nested, leaves)


def unflatten(leaves: Iterable[Any], form: Form) -> Nested:
    """Return the nest of this form with these leaves.

    Args:
        leaves: In the order of `flatten`.
        form: What `flatten` returned.
    """
    return _unflatten(iter(leaves), form)


def map_tensors(fn: Callable[[Tensor], Tensor], nested: Nested) -> Nested:
    """Return the nest with a function of each of its tensors; other leaves stay as they are.

    Examples:
        >>> import torch
        >>> map_tensors(torch.neg, (torch.ones(1), 3))
        (tensor([-1.]), 3)
    """
    leaves, form = flatten(nested)
    mapped = [fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(mapped, form)


def _flatten(nested: Nested, leaves: list[Tensor]) -> Form:
    kind = type(nested)
    if kind in LEAF_TYPES:
        leaves.append(nested)
        return LEAF
    if kind is Tree:
        leaves.extend(nested.values())
        return kind, tuple(nested)
    if kind is dict:
        return kind, tuple(nested), tuple([_flatten(value, leaves) for value in nested.values()])
    if kind is tuple or kind is list or hasattr(kind, "_fields"):
        return kind, tuple([_flatten(value, leaves) for value in nested])
    others, spec = pytree.tree_flatten(nested)
    leaves.extend(others)
    if spec.is_leaf():
        return LEAF
    return pytree, spec, len(others)


def _unflatten(leaves: Iterator[Any], form: Any) -> Nested:
    if form is LEAF:
        return next(leaves)
    kind, *rest = form
    if kind is Tree:
        return Tree(zip(rest[0], leaves, strict=False))
    if kind is dict:
        names, forms = rest
        return dict(zip(names, [_unflatten(leaves, each) for each in forms], strict=True))
    if kind is pytree:
        spec, count = rest
        return pytree.tree_unflatten([next(leaves) for _ in range(count)], spec)
    values = [_unflatten(leaves, each) for each in rest[0]]
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    make: Callable[..., Nested] = kind
    return make(*values)
