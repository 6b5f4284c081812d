"""`Tree`, a dict of named tensors with the arithmetic of one vector, and functions of trees.

A problem's variables x and y, the clients' gradients and the server's updates are all trees, so
that an update reads as it is printed: `x - lr * direction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Scalar = float | Tensor


class Tree(dict[str, Tensor]):
    """A dict of named tensors that adds, subtracts and scales like one vector.

    A tree is constructed like a dict, `Tree(w=...)` or `Tree({"w": ...})`. Operations match tensors
    by name, return new trees and leave their operands unchanged. A tree is registered with PyTorch
    as a pytree node, so `torch.func.grad` and `torch.func.vmap` accept and return trees.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> y = fb.Tree(w=torch.tensor([1.0, 2.0]), b=torch.tensor(3.0))
        >>> gradient = fb.Tree(w=torch.tensor([2.0, 0.0]), b=torch.tensor(-2.0))
        >>> y - 0.5 * gradient
        {'w': tensor([0., 2.]), 'b': tensor(4.)}
        >>> torch.func.grad(lambda tree: (tree["w"] ** 2).sum() + tree["b"])(y)
        {'w': tensor([2., 4.]), 'b': tensor(1.)}
    """

    def map(self, fn: Callable[..., Tensor], *others: Mapping[str, Tensor]) -> Tree:
        """Apply a function to every tensor.

        Args:
            fn: Called with a tensor of this tree and the tensors of `others` that have its name.
            *others: Trees or dicts that have at least the names of this tree.

        Returns:
            A tree with the names of this one and the results of `fn`.

        Raises:
            KeyError: One of `others` lacks a name.

        Examples:
            >>> import torch
            >>> from fedbilevel import Tree
            >>> a = Tree(w=torch.tensor([1.0, -2.0]))
            >>> a.map(torch.abs)
            {'w': tensor([1., 2.])}
            >>> a.map(torch.maximum, Tree(w=torch.zeros(2)))
            {'w': tensor([1., 0.])}
        """
        return Tree(
            {name: fn(value, *(other[name] for other in others)) for name, value in self.items()}
        )

    def __add__(self, other: Tree) -> Tree:
        return Tree({name: value + other[name] for name, value in self.items()})

    def __sub__(self, other: Tree) -> Tree:
        return Tree({name: value - other[name] for name, value in self.items()})

    def __mul__(self, scale: Scalar) -> Tree:
        return Tree({name: value * scale for name, value in self.items()})

    __rmul__ = __mul__

    def __truediv__(self, scale: Scalar) -> Tree:
        return Tree({name: value / scale for name, value in self.items()})

    def __neg__(self) -> Tree:
        return self.map(torch.neg)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(value.nbytes for value in self.values())

    @property
    def numel(self) -> int:
        """The number of entries of all tensors."""
        return sum(value.numel() for value in self.values())


pytree.register_pytree_node(
    Tree,
    lambda tree: (list(tree.values()), list(tree)),
    lambda values, names: Tree(zip(names, values, strict=True)),
    serialized_type_name="fedbilevel.Tree",
)


def zeros_like(tree: Tree) -> Tree:
    """The zero vector with the names, shapes and dtypes of a tree.

    Args:
        tree: The tree whose form is copied.

    Returns:
        A tree of zeros.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, zeros_like
        >>> zeros_like(Tree(w=torch.ones(2)))
        {'w': tensor([0., 0.])}
    """
    return tree.map(torch.zeros_like)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product <a, b> over all tensors.

    Args:
        a: A tree.
        b: A tree with at least the names of `a`.

    Returns:
        A 0-d tensor.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, dot
        >>> a = Tree(w=torch.tensor([1.0, 2.0]), b=torch.tensor(3.0))
        >>> dot(a, a)
        tensor(14.)
    """
    if not a:
        return torch.zeros(())
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm of all tensors together.

    Args:
        tree: A tree.

    Returns:
        A 0-d tensor.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, norm
        >>> norm(Tree(w=torch.tensor([3.0, 0.0]), b=torch.tensor(-4.0)))
        tensor(5.)
    """
    if not tree:
        return torch.zeros(())
    norms: list[Tensor] = [torch.linalg.vector_norm(value) for value in tree.values()]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def project(tree: Tree, radius: float) -> Tree:
    """The closest point of the ball of this radius around 0: P_r(z) = z min(1, r / ||z||).

    Args:
        tree: The point z.
        radius: The radius r of the ball.

    Returns:
        A tree of norm at most `radius`.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, project
        >>> project(Tree(w=torch.tensor([3.0, 4.0])), radius=2.5)
        {'w': tensor([1.5000, 2.0000])}
    """
    return tree * (radius / norm(tree)).clamp(max=1.0)


def flatten(tree: Tree) -> Tensor:
    """All entries of a tree as one vector, tensor after tensor.

    Args:
        tree: A tree.

    Returns:
        A tensor of shape `(tree.numel,)`; `unflatten` inverts it.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, flatten
        >>> flatten(Tree(w=torch.tensor([[1.0, 2.0]]), b=torch.tensor(3.0)))
        tensor([1., 2., 3.])
    """
    if not tree:
        return torch.zeros(0)
    return torch.cat([value.reshape(-1) for value in tree.values()])


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """The inverse of `flatten`: a vector as a tree.

    Args:
        vector: A tensor of shape `(like.numel,)`.
        like: The tree that gives names, shapes and their order.

    Returns:
        A tree with the names and shapes of `like` and the entries of `vector`.

    Raises:
        RuntimeError: `vector` has another number of entries than `like`.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, unflatten
        >>> unflatten(torch.arange(3.0), like=Tree(w=torch.ones(1, 2), b=torch.ones(())))
        {'w': tensor([[0., 1.]]), 'b': tensor(2.)}
    """
    parts = torch.split(vector, [value.numel() for value in like.values()])
    tree = Tree()
    for (name, value), part in zip(like.items(), parts, strict=True):
        tree[name] = part.reshape(value.shape)
    return tree


def is_finite(values: object) -> bool:
    """Whether every tensor and every number in a nested value is finite.

    Args:
        values: Tensors and numbers, nested in dicts, lists, tuples and trees.

    Returns:
        False if one of them holds NaN or infinity.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, is_finite
        >>> is_finite({"x": Tree(w=torch.ones(2)), "steps": 3})
        True
        >>> is_finite([torch.tensor([1.0, float("nan")])])
        False
    """
    leaves = _leaves(values)
    if not all(math.isfinite(leaf) for leaf in leaves if not isinstance(leaf, Tensor)):
        return False
    by_device: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            by_device.setdefault(leaf.device, []).append(leaf)
    return all(map(_all_finite, by_device.values()))


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors on one device are finite; waits for the device once.

    A NaN or an infinity makes the sum of all entries NaN or infinite. Finite entries can overflow
    in the sum, though rarely: only then is every tensor looked at.
    """
    if tensors[0].is_cpu:
        finite = all(math.isfinite(tensor.sum().item()) for tensor in tensors)
    else:
        total = tensors[0].new_zeros((), dtype=torch.float64)
        for tensor in tensors:
            total += tensor.sum()
        finite = math.isfinite(total)
    return finite or all(bool(tensor.isfinite().all()) for tensor in tensors)


def nbytes(values: object) -> int:
    """The number of bytes of the tensors in a nested value.

    Args:
        values: Tensors and other values, nested in dicts, lists, tuples and trees.

    Returns:
        The sum over all tensors; plain numbers and strings count nothing.

    Examples:
        >>> import torch
        >>> from fedbilevel.core.tree import Tree, nbytes
        >>> nbytes({"x": Tree(w=torch.ones(2)), "steps": 3})
        8
    """
    return sum(leaf.nbytes for leaf in _leaves(values) if isinstance(leaf, Tensor))


def _leaves(values: object) -> list[Any]:
    """The leaves of a nested value; those of trees by name without PyTorch's slower pytrees."""
    if not isinstance(values, dict):
        return pytree.tree_leaves(values)
    leaves: list[Any] = []
    for value in values.values():
        if isinstance(value, Tensor):
            leaves.append(value)
        elif isinstance(value, Tree):
            leaves.extend(value.values())
        else:
            leaves.extend(pytree.tree_leaves(value))
    return leaves
