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

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.core.devices import constant
from fedbilevel.core.tree import Tree, flatten, unflatten

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


class _Layout(NamedTuple):
    """Where the entries of a submodel lie in the whole model, whichever units it keeps.

    Both are flattened, tensor after tensor. Entry j of the submodel is the entry

        offset[j] + sum over k of kept[slot_k[j]] * stride_k[j]

    of the whole model, where `kept` has the units that are kept, axis after axis. The k-th term is
    for the k-th dimension of a tensor that is cut.

    Attributes:
        shapes: The shapes of the submodel's tensors.
        offset: The part of the sum that depends on no unit.
        terms: A slot and a stride per entry of the submodel, for each term.
    """

    shapes: dict[str, tuple[int, ...]]
    offset: Tensor
    terms: list[tuple[Tensor, Tensor]]


class _CutAxis(NamedTuple):
    """An axis of which a submodel keeps some units: its units, those kept, and the first slot."""

    total: int
    kept: int
    first_slot: int


@functools.lru_cache(maxsize=64)
def _layout(
    tensors: tuple[tuple[str, tuple[int, ...], tuple[str | None, ...]], ...],
    counts: tuple[tuple[str, int, int], ...],
    device: torch.device,
) -> _Layout:
    """Return the layout of submodels of one size.

    Args:
        tensors: For each tensor of the whole model its name, its shape, and its axes, if any.
        counts: For every axis its name, the units it has, and the units that are kept.
        device: Where the layout is used.
    """
    cut_axes: dict[str | None, _CutAxis] = {}
    first_slot = 0
    for axis, total, kept in counts:
        if kept < total:
            cut_axes[axis] = _CutAxis(total, kept, first_slot)
        first_slot += kept
    shapes = {}
    offsets = []
    terms = []
    first_entry = 0
    for name, shape, axes in tensors:
        cut = [cut_axes.get(axis) for axis in axes or [None] * len(shape)]
        offset, tensor_terms = _tensor_layout(shape, cut)
        shapes[name] = tuple(offset.shape)
        offsets.append(first_entry + offset.reshape(-1))
        terms.append(tensor_terms)
        first_entry += math.prod(shape)
    return _Layout(shapes, torch.cat(offsets).to(device), _join_terms(offsets, terms, device))


def _tensor_layout(
    shape: Sequence[int], axes: Sequence[_CutAxis | None]
) -> tuple[Tensor, list[tuple[Tensor, int]]]:
    """Return the offsets of one tensor's entries, and a slot per entry and a stride per term."""
    offset = torch.zeros((), dtype=torch.int64)
    slots = []
    for dim, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        index = torch.arange(size)
        if axis is not None:
            block = size // axis.total
            index = torch.arange(axis.kept * block)
            slots.append((dim, axis.first_slot + index // block, block * stride))
            index = index % block
        offset = offset.unsqueeze(-1) + index * stride
    terms = []
    for dim, slot, stride in slots:
        trailing = [1] * (len(shape) - dim - 1)
        terms.append((slot.view(-1, *trailing).expand(offset.shape).reshape(-1), stride))
    return offset, terms


def _join_terms(
    offsets: Sequence[Tensor],
    terms: Sequence[Sequence[tuple[Tensor, int]]],
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Join the terms of all tensors; a tensor with fewer terms than others gets strides of 0."""
    joined = []
    for k in range(max(map(len, terms))):
        slots = []
        strides = []
        for offset, tensor_terms in zip(offsets, terms, strict=True):
            slot, stride = torch.zeros_like(offset), 0
            if k < len(tensor_terms):
                slot, stride = tensor_terms[k]
            slots.append(slot)
            strides.append(torch.full_like(slot, stride))
        # 32 bits suffice for slots and strides; positions are sums in 64 bits.
        joined.append((torch.cat(slots).int().to(device), torch.cat(strides).int().to(device)))
    return joined


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
    # The layout and the positions of the tensors of these names: those of x, or those of y.
    _located: dict[tuple[str, ...], tuple[_Layout, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def cut(self, tree: Tree) -> Tree:
        """Cut tensors of the whole model to this submodel.

        Args:
            tree: Tensors of the whole model. Those that `axes` does not name stay whole.

        Returns:
            The submodel's tensors.
        """
        if not tree:
            return Tree()
        part = flatten(tree).index_select(0, self.positions(tree))
        # A tree of several dtypes is flattened to one.
        return _split(part, self.shapes(tree)).map(lambda t, w: t.to(w.dtype), tree)

    def spread(self, tree: Tree, like: Tree) -> Tree:
        """Put tensors of this submodel back at their positions in the whole model.

        Args:
            tree: Tensors of the submodel.
            like: Tensors of the whole model, for the shapes.

        Returns:
            Tensors shaped like the whole model, 0 outside of the submodel.
        """
        part = flatten(tree)
        whole = part.new_zeros(like.numel).index_copy_(0, self.positions(like), part)
        return unflatten(whole, like)

    def shapes(self, like: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `cut` returns, without cutting.

        Args:
            like: Tensors of the whole model.

        Returns:
            The shapes by name.
        """
        layout, _ = self._locate(like)
        return layout.shapes

    def positions(self, like: Mapping[str, Tensor]) -> Tensor:
        """Return where the entries of this submodel lie in the whole model, both flattened.

        Args:
            like: Tensors of the whole model.

        Returns:
            An index into `flatten(like)` for each entry of the submodel, in ascending order.

        Examples:
            >>> axes = {"w": ("hidden", None)}
            >>> part = Submodel(axes, total={"hidden": 3}, kept={"hidden": torch.tensor([0, 2])})
            >>> part.positions(Tree(w=torch.ones(3, 2)))
            tensor([0, 1, 4, 5])
        """
        _, positions = self._locate(like)
        return positions

    def _locate(self, like: Mapping[str, Tensor]) -> tuple[_Layout, Tensor]:
        key = tuple(like)
        if key not in self._located:
            counts = tuple((axis, n, len(self.kept[axis])) for axis, n in self.total.items())
            tensors = tuple(
                (name, tuple(value.shape), tuple(self.axes.get(name, ())))
                for name, value in like.items()
            )
            layout = _layout(tensors, counts, next(iter(like.values())).device)
            positions = layout.offset
            kept = torch.cat([self.kept[axis] for axis in self.total])
            kept = kept.to(positions.device, non_blocking=True)
            for slot, stride in layout.terms:
                positions = positions + kept.index_select(0, slot) * stride
            self._located[key] = layout, positions
        return self._located[key]


def _split(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    """Return consecutive parts of a vector as tensors of these shapes."""
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return Tree({name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)})


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
    counts = count_units(axes, tensors)
    norms: dict[str, list[Tensor]] = defaultdict(list)
    for name, dimensions in axes.items():
        for dim, axis in enumerate(dimensions):
            if axis is not None:
                norms[axis].append(_unit_norms(tensors[name], dim, counts[axis]))
    order = {}
    for axis in counts:
        sizes: Tensor = torch.linalg.vector_norm(torch.stack(norms[axis]), dim=0)
        order[axis] = sizes.argsort(descending=True, stable=True)

    def select(axis: str, total: int, count: int, group: int) -> Tensor:
        return order[axis][:count]

    return select


def _unit_norms(tensor: Tensor, dim: int, units: int) -> Tensor:
    """Return the norm of the entries of each unit along a dimension, in float64."""
    blocks = tensor.unflatten(dim, (units, -1))
    others = [other for other in range(blocks.ndim) if other != dim]
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=others, dtype=torch.float64)
    return norms


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
        kept = {axis: select(axis, n, counts[axis], group) for axis, n in total.items()}
        submodels[group, ratio] = None
        if counts != total:
            submodels[group, ratio] = Submodel(axes, total, _in_ascending_order(kept, total))
    return [submodels[key] for key in zip(groups, ratios, strict=True)]


def _in_ascending_order(kept: Mapping[str, Tensor], total: Mapping[str, int]) -> dict[str, Tensor]:
    """Sort the units of every axis.

    All axes are sorted together, because every operation on a GPU takes time to launch.
    """
    sizes = [len(units) for units in kept.values()]
    # The axes follow one another if the units of each are numbered on from those of the last.
    first_units = itertools.accumulate(total.values(), initial=0)
    first_of_each: list[int] = []
    for first_unit, size in zip(first_units, sizes, strict=False):
        first_of_each += [first_unit] * size
    units = torch.cat(list(kept.values()))
    first = constant(tuple(first_of_each), units.device, units.dtype)
    ordered = (units + first).sort().values - first
    return dict(zip(kept, ordered.split(sizes), strict=True))


def _kept_units(ratio: float, total: int) -> int:
    # The tolerance is for rounding: 0.28 * 25 is 7.000000000000001.
    return max(1, math.ceil(ratio * total - 1e-6))
