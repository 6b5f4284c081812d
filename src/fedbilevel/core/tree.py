"""`Tree`: a dict of tensors that adds and scales like one vector, so that updates read as they are printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Scalar = float | Tensor


class Tree(dict[str, Tensor]):
    """A dict of tensors with the operations of a vector space."""

    def map(self, fn: Callable[..., Tensor], *others: Mapping[str, Tensor]) -> Tree:
        return Tree(
            {name: fn(value, *(other[name] for other in others)) for name, value in self.items()}
        )

    def __add__(self, other: Tree) -> Tree:
        return self.map(torch.add, other)

    def __sub__(self, other: Tree) -> Tree:
        return self.map(torch.sub, other)

    def __mul__(self, scale: Scalar) -> Tree:
        return self.map(lambda value: value * scale)

    __rmul__ = __mul__

    def __truediv__(self, scale: Scalar) -> Tree:
        return self.map(lambda value: value / scale)

    def __neg__(self) -> Tree:
        return self.map(torch.neg)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values())

    @property
    def numel(self) -> int:
        return sum(value.numel() for value in self.values())


pytree.register_pytree_node(
    Tree,
    lambda tree: (list(tree.values()), list(tree)),
    lambda values, names: Tree(zip(names, values, strict=True)),
    serialized_type_name="fedbilevel.Tree",
)


def zeros_like(tree: Tree) -> Tree:
    return tree.map(torch.zeros_like)


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product <a, b>."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm of the whole tree."""
    length: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(value) for value in tree.values()])
    )
    return length


def project(tree: Tree, radius: float) -> Tree:
    """The closest point of the ball around 0: P_r(z) = z min(1, r / ||z||)."""
    return tree * (radius / norm(tree)).clamp(max=1.0)


def flatten(tree: Tree) -> Tensor:
    return torch.cat([value.reshape(-1) for value in tree.values()])


def unflatten(vector: Tensor, like: Tree) -> Tree:
    parts = torch.split(vector, [value.numel() for value in like.values()])
    return Tree(
        {
            name: part.reshape(value.shape)
            for (name, value), part in zip(like.items(), parts, strict=True)
        }
    )


def is_finite(values: Any) -> bool:
    """Whether every tensor and number in a nested value is finite."""
    leaves = pytree.tree_leaves(values)
    if not all(math.isfinite(leaf) for leaf in leaves if not isinstance(leaf, Tensor)):
        return False
    tensors: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.setdefault(leaf.device, []).append(leaf)
    # What is not finite makes a sum that is not, found by one look at each device; a sum of finite numbers may be too
    # large, but seldom is.
    sums = {
        device: torch.stack([t.sum().double() for t in found]).sum()
        for device, found in tensors.items()
    }
    return all(
        math.isfinite(total) or all(bool(torch.isfinite(t).all()) for t in tensors[device])
        for device, total in sums.items()
    )


def nbytes(values: Any) -> int:
    """Bytes of the tensors in a nested value (plain numbers are the envelope, not the letter)."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
