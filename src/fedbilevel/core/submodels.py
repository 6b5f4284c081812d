"""Submodels: parts of a network that are networks themselves, for clients of limited capacity.

A problem names the dimensions of its tensors (`Problem.axes`; `fedbilevel.nets.axes` derives the
names from a network). Dimensions of one name form an axis and are cut together: the outputs of one
layer and the inputs of the next. The smallest dimension of an axis has one entry per unit. In a
larger one, every unit owns a contiguous block of entries: the pixels of a channel after `Flatten`.

`choose_submodels` chooses the units of each client, and `Submodel.cut` cuts the tensors.

Examples:
    >>> from fedbilevel.core.submodels import choose_submodels, static
    >>> axes = {"w": ("hidden", None), "v": (None, "hidden")}
    >>> x = Tree(w=torch.arange(8.0).reshape(4, 2))
    >>> y = Tree(v=torch.ones(3, 4))
    >>> (half,) = choose_submodels(axes, x, y, static, [(0.5, 0.5)])
    >>> half.cut(x)
    {'w': tensor([[0., 1.],
            [2., 3.]])}
    >>> half.shapes({**x, **y})
    {'w': (2, 2), 'v': (3, 2)}
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
"""For every tensor, by name, the axis of each of its dimensions; None is never cut."""

UnitSelector = Callable[[str, int, int, int], Tensor]
"""Selects units: (axis, number of its units, how many to keep, group) -> the units that are kept.

Clients of one group and one capacity hold the same units.
"""


def count_units(axes: Axes, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the units of every axis, and check that the axes fit the tensors.

    Args:
        axes: The axes of the tensors. Tensors without an entry are never cut.
        tensors: x and y together.

    Returns:
        The number of units of every axis: the size of its smallest dimension.

    Raises:
        TypeError: `axes` is not a dict of tuples.
        ValueError: `axes` names an unknown tensor, has too few or too many entries for a tensor, or
            a dimension is not a multiple of the smallest one of its axis.

    Examples:
        >>> axes = {"conv": ("channel", None), "fc": (None, "channel")}
        >>> count_units(axes, {"conv": torch.ones(16, 9), "fc": torch.ones(10, 400)})
        {'channel': 16}
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes is {axes!r}; it must be a dict that names the dimensions of tensors")
    for name, axis_names in axes.items():
        if not isinstance(axis_names, (tuple, list)):
            raise TypeError(
                f"axes[{name!r}] is {axis_names!r}; "
                "it must be a tuple, a name or None for each dimension"
            )
        if name not in tensors:
            raise ValueError(
                f"axes names {name!r}, which is neither in x nor in y; "
                f"there are {', '.join(tensors)}"
            )
        shape = tuple(tensors[name].shape)
        if len(axis_names) != len(shape):
            raise ValueError(
                f"axes[{name!r}] is {axis_names}; "
                f"it must have an entry for each dimension of {shape}"
            )
        for axis, size in zip(axis_names, shape, strict=True):
            if axis is not None:
                sizes[axis].append(size)
    counts = {axis: min(dimensions) for axis, dimensions in sizes.items()}
    for axis, dimensions in sizes.items():
        if any(size % counts[axis] for size in dimensions):
            raise ValueError(
                f"axis {axis!r} names dimensions of {sorted(set(dimensions))} entries; "
                "each must be a multiple of the least"
            )
    return counts


@dataclass(frozen=True, eq=False)
class Submodel:
    """The part of a model that a client holds: some units of every axis.

    Args:
        axes: The axes of the model's tensors.
        total: The number of units of every axis in the whole model (see `count_units`).
        kept: The indices of the units that the client holds, per axis, in ascending order.

    Examples:
        >>> axes = {"w": ("hidden", None)}
        >>> part = Submodel(axes, total={"hidden": 3}, kept={"hidden": torch.tensor([0, 2])})
        >>> model = Tree(w=torch.tensor([[1.0], [2.0], [3.0]]))
        >>> part.spread(part.cut(model), model)
        {'w': tensor([[1.],
                [0.],
                [3.]])}
    """

    axes: Axes
    total: Mapping[str, int]
    kept: Mapping[str, Tensor]

    def cut(self, tree: Tree) -> Tree:
        """Cut tensors of the whole model to this submodel.

        Args:
            tree: Tensors of the whole model. Those that `axes` does not name stay whole.

        Returns:
            The submodel's tensors.
        """
        small = {}
        for name, value in tree.items():
            for dim, index in self._indices(name, value.shape):
                value = value.index_select(dim, index.to(value.device))
            small[name] = value
        return Tree(small)

    def spread(self, tree: Tree, like: Mapping[str, Tensor]) -> Tree:
        """Put tensors of this submodel back at their positions in the whole model.

        Args:
            tree: Tensors of the submodel.
            like: Tensors of the whole model, for the shapes.

        Returns:
            Tensors shaped like the whole model, 0 outside of the submodel.
        """
        whole = {}
        for name, value in tree.items():
            for dim, index in self._indices(name, like[name].shape):
                shape = (*value.shape[:dim], like[name].shape[dim], *value.shape[dim + 1 :])
                value = value.new_zeros(shape).index_copy(dim, index.to(value.device), value)
            whole[name] = value
        return Tree(whole)

    def shapes(self, like: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `cut` returns, without cutting.

        Args:
            like: Tensors of the whole model.

        Returns:
            The shapes by name.
        """
        shapes = {}
        for name, value in like.items():
            shape = list(value.shape)
            for dim, index in self._indices(name, value.shape):
                shape[dim] = len(index)
            shapes[name] = tuple(shape)
        return shapes

    def _indices(self, name: str, shape: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The dimensions of a tensor that are cut, each with the indices of the entries to keep."""
        indices = []
        for dim, axis in enumerate(self.axes.get(name, ())):
            if axis is not None and len(self.kept[axis]) < self.total[axis]:
                block = shape[dim] // self.total[axis]
                entries = self.kept[axis][:, None] * block + torch.arange(block)
                indices.append((dim, entries.reshape(-1)))
        return indices


def static(axis: str, total: int, count: int, group: int) -> Tensor:
    """Select the first units, the same for all clients of one capacity (HeteroFL).

    Args:
        axis: The axis.
        total: The number of its units.
        count: How many to keep.
        group: Not used.

    Returns:
        The units 0, ..., count - 1.

    Examples:
        >>> static("hidden", 10, 3, 0)
        tensor([0, 1, 2])
    """
    return torch.arange(count)


def segments(axis: str, total: int, count: int, group: int) -> Tensor:
    """Select the segment with the number of the group, so that the user decides who holds what.

    Args:
        axis: The axis.
        total: The number of its units.
        count: How many to keep: the length of a segment.
        group: The number of the segment.

    Returns:
        The units group * count, ..., group * count + count - 1, modulo `total`.

    Examples:
        >>> segments("hidden", 10, 3, 1)
        tensor([3, 4, 5])
    """
    return (group * count + torch.arange(count)) % total


def rolling(t: int) -> UnitSelector:
    """Make a selector of a window that moves by one unit per iteration in every axis (FedRolex).

    Args:
        t: The iteration.

    Returns:
        A selector of the units t, ..., t + count - 1, modulo the number of units.

    Examples:
        >>> rolling(8)("hidden", 10, 3, 0)
        tensor([8, 9, 0])
    """

    def select(axis: str, total: int, count: int, group: int) -> Tensor:
        return (t + torch.arange(count)) % total

    return select


def importance(axes: Axes, tensors: Mapping[str, Tensor]) -> UnitSelector:
    """Make a selector of the most important units.

    The importance of a unit is the norm of all its weights, over all tensors of the axis.

    Args:
        axes: The axes of the tensors.
        tensors: x and y together.

    Returns:
        A selector of the units with the largest norms.

    Examples:
        >>> axes = {"w": ("hidden", None), "v": ("hidden",)}
        >>> tensors = {"w": torch.tensor([[3.0], [1.0], [0.0]]), "v": torch.tensor([0.0, 0.0, 9.0])}
        >>> importance(axes, tensors)("hidden", 3, 2, 0)
        tensor([2, 0])
    """
    order = {}
    for axis, count in count_units(axes, tensors).items():
        squares = torch.zeros(count, dtype=torch.float64)
        for name, dimensions in axes.items():
            for dim, other in enumerate(dimensions):
                if other == axis:
                    blocks = tensors[name].double().square().movedim(dim, 0).reshape(count, -1)
                    squares += blocks.sum(1).cpu()
        order[axis] = squares.argsort(descending=True, stable=True)

    def select(axis: str, total: int, count: int, group: int) -> Tensor:
        return order[axis][:count]

    return select


def choose_submodels(
    axes: Axes,
    x: Tree,
    y: Tree,
    select: UnitSelector,
    ratios: Sequence[tuple[float, float]],
    groups: Sequence[int] | None = None,
) -> list[Submodel | None]:
    """Choose a submodel for every client, by its capacity.

    A client of capacity r holds ceil(r K) of the K units of every axis.

    Args:
        axes: The axes of the tensors.
        x: The upper variable.
        y: The lower variable.
        select: Which units a submodel keeps: `static`, `segments`, `rolling(t)` or
            `importance(axes, tensors)`.
        ratios: The capacities of every client, in (0, 1]: the first for axes that occur in x, the
            second for axes that occur in y alone.
        groups: The group of every client, for `select`; None is one group.

    Returns:
        A submodel per client, None for the whole model. Clients with the same group and capacities
        share one object.

    Raises:
        TypeError: `axes` is not a dict of tuples.
        ValueError: `axes` does not fit the tensors.

    Examples:
        >>> x = Tree(w=torch.ones(10, 2))
        >>> y = Tree(v=torch.ones(3))
        >>> axes = {"w": ("hidden", None)}
        >>> whole, quarter = choose_submodels(axes, x, y, static, [(1.0, 1.0), (0.25, 0.25)])
        >>> print(whole, quarter.kept["hidden"])
        None tensor([0, 1, 2])
    """
    total = count_units(axes, {**x, **y})
    groups = groups or [0] * len(ratios)
    in_x = {axis for name in x for axis in axes.get(name, ())}
    submodels: dict[tuple[int, tuple[float, float]], Submodel | None] = {}
    for group, ratio in dict.fromkeys(zip(groups, ratios, strict=True)):
        counts = {axis: _kept_units(ratio[axis not in in_x], n) for axis, n in total.items()}
        # A selector may have state (OAP's does): it is called for whole models, too.
        kept = {
            axis: select(axis, n, counts[axis], group).sort().values for axis, n in total.items()
        }
        submodels[group, ratio] = None
        if counts != total:
            submodels[group, ratio] = Submodel(axes, total, kept)
    return [submodels[key] for key in zip(groups, ratios, strict=True)]


def _kept_units(ratio: float, total: int) -> int:
    # The tolerance is for rounding: 0.28 * 25 is 7.000000000000001.
    return max(1, math.ceil(ratio * total - 1e-6))
