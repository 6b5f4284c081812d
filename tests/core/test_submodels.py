"""Submodels: axes and units, cutting and putting back, and the choice of units."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.core.submodels import (
    Submodel,
    choose_submodels,
    count_units,
    importance,
    rolling,
    segments,
    static,
)
from fedbilevel.core.tree import Tree, dot, flatten, unflatten

AXES = {"a": ("u", None), "b": ("u",), "c": (None, "u"), "d": ("v", "u")}
TENSORS = Tree(
    a=torch.rand(4, 3), b=torch.rand(8), c=torch.rand(2, 12), d=torch.rand(3, 4), e=torch.rand(5)
)


def test_an_axis_has_as_many_units_as_its_smallest_dimension() -> None:
    assert count_units(AXES, TENSORS) == {"u": 4, "v": 3}


class Cut(NamedTuple):
    """A model with random axes, a submodel of it, and the entries that it keeps, listed."""

    model: Tree
    submodel: Submodel
    kept: dict[str, list[list[int]]]  # for each dimension of each tensor

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The entries of a whole tensor that the submodel keeps, one dimension after another."""
        for dim, entries in enumerate(self.kept[name]):
            tensor = tensor.index_select(dim, torch.tensor(entries))
        return tensor


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Tensors of up to three dimensions, each cut in units or in blocks of them, or not at all."""
    total = draw(st.dictionaries(st.sampled_from("uvw"), st.integers(1, 4), min_size=1))
    kept = {}
    for axis, units in total.items():
        kept[axis] = sorted(draw(st.sets(st.integers(0, units - 1), min_size=1)))
    dimension = st.tuples(st.sampled_from([None, *total]), st.integers(1, 3))
    axes = {}
    model = Tree()
    listed = {}
    for name in ["a", "b", "c", "d"][: draw(st.integers(1, 4))]:
        dimensions = draw(st.lists(dimension, max_size=3))
        shape = []
        listed[name] = []
        for axis, block in dimensions:
            units = range(block) if axis is None else kept[axis]
            entries = list(units)
            if axis is not None:
                entries = [unit * block + entry for unit in units for entry in range(block)]
            shape.append(block * total.get(axis or "", 1))
            listed[name].append(entries)
        if any(axis for axis, _ in dimensions) or draw(st.booleans()):
            axes[name] = tuple(axis for axis, _ in dimensions)
        model[name] = normal(root(len(model), "cut"), tuple(shape), torch.float64)
    indices = {axis: torch.tensor(units) for axis, units in kept.items()}
    return Cut(model, Submodel(axes, total, indices), listed)


@given(cuts())
@settings(max_examples=200, deadline=None)
def test_a_submodel_has_the_entries_of_its_units_and_spreads_them_where_they_were(cut: Cut) -> None:
    model, submodel, _ = cut
    expected = Tree({name: cut.of(name, tensor) for name, tensor in model.items()})
    small = submodel.cut(model)
    assert submodel.shapes(model) == {name: tuple(t.shape) for name, t in expected.items()}
    numbers = unflatten(torch.arange(model.numel), model)
    positions = flatten(Tree({name: cut.of(name, tensor) for name, tensor in numbers.items()}))
    assert torch.equal(submodel.positions(model), positions)
    whole = submodel.spread(small, model)
    for name, tensor in model.items():
        assert torch.equal(small[name], expected[name])
        held = torch.isin(numbers[name], positions)
        assert torch.equal(whole[name], tensor.where(held, 0.0))


def test_the_order_in_which_kept_names_the_axes_does_not_matter() -> None:
    kept = {"v": torch.tensor([0, 2]), "u": torch.tensor([1, 2])}
    submodel = Submodel(AXES, {"u": 4, "v": 3}, kept)
    assert torch.equal(submodel.cut(TENSORS)["d"], TENSORS["d"][[0, 2], 1:3])


def test_x_and_y_of_one_submodel_are_cut_apart() -> None:
    submodel = Submodel(AXES, {"u": 4, "v": 3}, {"u": torch.tensor([1]), "v": torch.tensor([0, 2])})
    for names in (("d", "b"), ("a",), ("b", "d")):
        part = Tree({name: TENSORS[name] for name in names})
        expected = {"a": part.get("a", TENSORS["a"])[1:2], "b": TENSORS["b"][2:4]}
        expected["d"] = TENSORS["d"][[0, 2], 1:2]
        for name, tensor in submodel.cut(part).items():
            assert torch.equal(tensor, expected[name])


WRONG = {
    "unknown tensor": (
        {"q": ("u",)},
        "axes names 'q', which is neither in x nor in y; there are x, y",
    ),
    "nothing": (None, "axes is None; it must be a dict that names the dimensions of tensors"),
    "a number": (
        {"x": 1},
        r"axes\['x'\] is 1; it must be a tuple, a name or None for each dimension",
    ),
    "dimensions": (
        {"x": ("u", None)},
        r"axes\['x'\] is \('u', None\); it must have an entry for each dimension of",
    ),
    "multiples": (
        {"x": ("u",), "y": ("u",)},
        r"axis 'u' names dimensions of \[4, 6\] entries; each must be",
    ),
}


@pytest.mark.parametrize(("axes", "sentence"), WRONG.values(), ids=WRONG)
def test_axes_that_do_not_fit_are_refused(axes: Any, sentence: str) -> None:
    def loss(x: Tree, y: Tree, batch: Any) -> Tensor:
        return dot(x, x)

    with pytest.raises((ValueError, TypeError), match=sentence):
        fb.Problem(
            upper=loss, lower=loss, x={"x": torch.zeros(6)}, y={"y": torch.zeros(4)}, axes=axes
        )


def test_static_rolling_and_segments_select_units_by_their_index() -> None:
    assert static("u", 10, 3, 0).tolist() == [0, 1, 2]
    assert rolling(8)("u", 10, 3, 0).tolist() == [8, 9, 0]
    selected = [segments("u", 10, 3, group).tolist() for group in (0, 1, 3)]
    assert selected == [[0, 1, 2], [3, 4, 5], [9, 0, 1]]


def test_importance_selects_units_by_the_norm_over_all_their_tensors() -> None:
    w = torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    v = torch.tensor([0.0, 0.0, 9.0])
    select = importance({"w": ("u", None), "v": ("u",)}, {"w": w, "v": v})
    assert select("u", 3, 3, 0).tolist() == [2, 0, 1]  # squares 81, 9, 2


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_importance_of_a_unit_is_the_norm_of_all_its_entries(seed: int) -> None:
    """Written out, entry by entry; a unit owns a block of entries of "b", "c" and "e"."""
    axes = {**AXES, "e": ("v", "v")}
    tensors = {name: normal(root(seed, name), t.shape) for name, t in TENSORS.items()}
    tensors["e"] = normal(root(seed, "e"), (3, 6))
    squares = {"u": [0.0] * 4, "v": [0.0] * 3}
    for name, names in axes.items():
        for dim, axis in enumerate(names):
            if axis is None:
                continue
            size = tensors[name].shape[dim]
            for entry in range(size):
                block = tensors[name].select(dim, entry)
                unit = entry * len(squares[axis]) // size
                squares[axis][unit] += sum(value**2 for value in block.flatten().tolist())
    for axis, of_units in squares.items():
        order = sorted(range(len(of_units)), key=lambda unit: -of_units[unit])
        for count in range(1, len(of_units) + 1):
            selected = importance(axes, tensors)(axis, len(of_units), count, 0)
            assert selected.tolist() == order[:count]


@given(st.integers(0, 20), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
@settings(max_examples=50, deadline=None)
def test_the_units_of_a_submodel_are_those_selected_in_ascending_order(
    t: int, ratio_x: float, ratio_y: float
) -> None:
    axes = {"w": ("u", "s"), "v": ("h", "u"), "b": ("h",)}
    x = Tree(w=normal(root(t, "w"), (7, 4)))
    y = Tree(v=normal(root(t, "v"), (10, 7)), b=normal(root(t, "b"), (10,)))
    for select in (rolling(t), segments, importance(axes, {**x, **y})):
        ratios = [(ratio_x, ratio_y)] * 2
        for group, part in enumerate(choose_submodels(axes, x, y, select, ratios, [0, 1])):
            if part is None:
                continue
            for axis, units in part.kept.items():
                count = math.ceil((ratio_y if axis == "h" else ratio_x) * part.total[axis] - 1e-6)
                selected = select(axis, part.total[axis], count, group)
                assert units.tolist() == sorted(selected.tolist())


def test_axes_of_x_follow_the_first_ratio_and_those_of_y_alone_the_second() -> None:
    axes = {"w": ("u", None), "v": ("h", "u"), "b": ("h",)}
    x = Tree(w=torch.rand(10, 3))
    y = Tree(v=torch.rand(7, 10), b=torch.rand(7))
    ratios = [(1.0, 1.0), (0.5, 0.25), (0.25, 1.0)]
    full, half, quarter = choose_submodels(axes, x, y, static, ratios)
    assert full is None
    assert isinstance(half, Submodel)
    assert half.shapes(y) == {"v": (2, 5), "b": (2,)}
    assert isinstance(quarter, Submodel)
    assert quarter.shapes(y) == {"v": (7, 3), "b": (7,)}  # ceil(2.5)


def test_the_number_of_units_is_not_rounded_up_because_of_floating_point() -> None:
    """0.28 * 25 is a little more than 7 in floating point."""
    w = torch.rand(25)
    (part,) = choose_submodels({"w": ("u",)}, Tree(w=w), Tree(), static, [(0.28, 0.28)])
    assert isinstance(part, Submodel)
    assert part.shapes({"w": w}) == {"w": (7,)}


def test_clients_with_the_same_capacities_share_one_submodel() -> None:
    ratios = [(0.5, 0.25), (1.0, 1.0), (0.5, 0.25)]
    submodels = choose_submodels({"w": ("u",)}, Tree(w=torch.rand(8)), Tree(), static, ratios)
    assert submodels[0] is submodels[2]
