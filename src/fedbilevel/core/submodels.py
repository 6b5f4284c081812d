"""Submodels: parts of a network that are networks themselves, for clients that cannot hold the whole.

Tensors name their dimensions (`Problem.axes`); dimensions of one name, an axis, are cut together. An axis has as many
units as its smallest dimension; in a larger one every unit owns a contiguous block, as a channel of a flattened image.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.core.tree import Tree

Axes = Mapping[str, tuple[str | None, ...]]


def units(axes: Axes, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of units of every axis; refuses axes that do not fit the tensors."""
    sizes: dict[str, list[int]] = defaultdict(list)
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes is {axes!r}; it must be a dict that names the dimensions of tensors")
    for name, axis_names in axes.items():
        if not isinstance(axis_names, (tuple, list)):
            raise TypeError(
                f"axes[{name!r}] is {axis_names!r}; it must be a tuple, a name or None for each dimension"
            )
        if name not in tensors:
            raise ValueError(
                f"axes names {name!r}, which is neither in x nor in y; there are {', '.join(tensors)}"
            )
        if len(axis_names) != tensors[name].ndim:
            shape = tuple(tensors[name].shape)
            raise ValueError(
                f"axes[{name!r}] is {axis_names}; it must have an entry for each dimension of {shape}"
            )
        for axis, size in zip(axis_names, tensors[name].shape, strict=True):
            if axis is not None:
                sizes[axis].append(size)
    for axis, found in sizes.items():
        if any(size % min(found) for size in found):
            raise ValueError(
                f"axis {axis!r} names dimensions of {sorted(set(found))} entries; each must be a multiple of the least"
            )
    return {axis: min(found) for axis, found in sizes.items()}


@dataclass(frozen=True, eq=False)
class Submodel:
    """The part of a model that a client holds: of each axis the units that are kept, in order."""

    axes: Axes
    total: Mapping[str, int]
    kept: Mapping[str, Tensor]

    def cut(self, tree: Tree) -> Tree:
        """The submodel's own tensors."""
        cut = {}
        for name, value in tree.items():
            for dim, index in self._indices(name, value.shape):
                value = value.index_select(dim, index.to(value.device))
            cut[name] = value
        return Tree(cut)

    def spread(self, tree: Tree, like: Mapping[str, Tensor]) -> Tree:
        """Tensors of the submodel's shape in their places in the whole, with 0 elsewhere."""
        whole = {}
        for name, value in tree.items():
            for dim, index in self._indices(name, like[name].shape):
                shape = (*value.shape[:dim], like[name].shape[dim], *value.shape[dim + 1 :])
                value = value.new_zeros(shape).index_copy(dim, index.to(value.device), value)
            whole[name] = value
        return Tree(whole)

    def shapes(self, like: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes that `cut` gives."""
        found = {}
        for name, value in like.items():
            shape = list(value.shape)
            for dim, index in self._indices(name, value.shape):
                shape[dim] = len(index)
            found[name] = tuple(shape)
        return found

    def _indices(self, name: str, shape: Sequence[int]) -> list[tuple[int, Tensor]]:
        """For each dimension that is cut, the entries that are kept."""
        found = []
        for dim, axis in enumerate(self.axes.get(name, ())):
            if axis is not None and len(self.kept[axis]) < self.total[axis]:
                block = shape[dim] // self.total[axis]
                found.append(
                    (dim, (self.kept[axis][:, None] * block + torch.arange(block)).reshape(-1))
                )
        return found


Pick = Callable[
    [str, int, int, int], Tensor
]  # (axis, its units, how many to keep, group) -> those that are kept


def static(axis: str, total: int, count: int, group: int) -> Tensor:
    """The first units: everyone of one capacity holds the same (HeteroFL)."""
    return torch.arange(count)


def segments(axis: str, total: int, count: int, group: int) -> Tensor:
    """The segment with the number of the group: who holds what is chosen by hand."""
    return (group * count + torch.arange(count)) % total


def rolling(t: int) -> Pick:
    """A window that moves by one unit an iteration t, in every axis by itself (FedRolex)."""
    return lambda axis, total, count, group: (t + torch.arange(count)) % total


def importance(axes: Axes, tensors: Mapping[str, Tensor]) -> Pick:
    """The units whose weights, in all tensors of the axis, have the largest norm."""
    total, squares = units(axes, tensors), {}
    for axis, count in total.items():
        squares[axis] = torch.zeros(count, dtype=torch.float64)
        for name, names in axes.items():
            for dim in (dim for dim, other in enumerate(names) if other == axis):
                blocks = tensors[name].double().square().movedim(dim, 0).reshape(count, -1)
                squares[axis] += blocks.sum(1).cpu()
    order = {axis: values.argsort(descending=True, stable=True) for axis, values in squares.items()}
    return lambda axis, total, count, group: order[axis][:count]


def choose(
    axes: Axes,
    x: Tree,
    y: Tree,
    pick: Pick,
    ratios: Sequence[tuple[float, float]],
    groups: Sequence[int] | None = None,
) -> list[Submodel | None]:
    """A submodel for each client: ceil(r units) units of every axis; r is the first of its ratios where the axis is in
    x, the second where it is in y alone. None stands for the whole model; equal ones are one object."""
    total, groups = units(axes, {**x, **y}), groups or [0] * len(ratios)
    upper = {axis for name in x for axis in axes.get(name, ())}
    made: dict[tuple[int, tuple[float, float]], Submodel | None] = {}
    for group, ratio in dict.fromkeys(zip(groups, ratios, strict=True)):
        counts = {axis: _count(ratio[axis not in upper], n) for axis, n in total.items()}
        kept = {axis: pick(axis, n, counts[axis], group).sort().values for axis, n in total.items()}
        made[group, ratio] = None if counts == total else Submodel(axes, total, kept)
    return [made[key] for key in zip(groups, ratios, strict=True)]


def _count(ratio: float, total: int) -> int:
    return max(1, math.ceil(ratio * total - 1e-6))  # 0.28 * 25 is 7.000000000000001
