"""Submodels: axes and units, cutting and putting back, and the choice of units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.submodels import (
    Submodel,
    choose_submodels,
    count_units,
    importance,
    rolling,
    segments,
    static,
)
from fedbilevel.core.tree import Tree, dot, flatten

AXES = {"a": ("u", None), "b": ("u",), "c": (None, "u"), "d": ("v", "u")}
TENSORS = Tree(
    a=torch.rand(4, 3), b=torch.rand(8), c=torch.rand(2, 12), d=torch.rand(3, 4), e=torch.rand(5)
)


def test_an_axis_has_as_many_units_as_its_smallest_dimension() -> None:
    assert count_units(AXES, TENSORS) == {"u": 4, "v": 3}


@given(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 2), min_size=1))
@settings(max_examples=40, deadline=None)
def test_spread_undoes_cut_and_is_zero_elsewhere(u: set[int], v: set[int]) -> None:
    kept = {"u": torch.tensor(sorted(u)), "v": torch.tensor(sorted(v))}
    part = Submodel(AXES, count_units(AXES, TENSORS), kept)
    small = part.cut(TENSORS)
    assert {name: tuple(t.shape) for name, t in small.items()} == part.shapes(TENSORS)
    assert tuple(small["c"].shape) == (2, 3 * len(u))
    assert tuple(small["e"].shape) == (5,)
    whole = part.spread(small, TENSORS)
    assert torch.equal(flatten(part.cut(whole)), flatten(small))
    for name, value in TENSORS.items():
        mask = torch.ones_like(value)
        for dim, axis in enumerate(AXES.get(name, ())):
            if axis is None:
                continue
            units, number = {"u": (u, 4), "v": (v, 3)}[axis]
            block = value.shape[dim] // number
            held = torch.tensor([entry // block in units for entry in range(value.shape[dim])])
            mask = mask * held.reshape([-1, *[1] * (value.ndim - dim - 1)])
        assert torch.equal(whole[name], value * mask)


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
