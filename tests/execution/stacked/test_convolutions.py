"""Convolutions of stacks: every way of computing one gives the numbers of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fedbilevel.core.derivatives import grad
from fedbilevel.core.rng import normal, root
from fedbilevel.execution.stacked import _convolutions
from fedbilevel.execution.stacked._convolutions import (
    FORWARD,
    TO_INPUTS,
    TO_WEIGHTS,
    Convolutions,
    Geometry,
)

ON_A_CPU = ["grouped", "channels last", "unfolded"]  # "separate" needs the streams of a GPU


class Case(NamedTuple):
    """A convolution with a group per client, and its two gradients by autograd."""

    inputs: Tensor
    weights: Tensor
    geometry: Geometry
    outputs: Tensor
    gradient: Tensor  # of the outputs
    by_inputs: Tensor
    by_weights: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A convolution of random geometry, different along the two axes of an image."""
    groups = draw(st.integers(1, 3))
    images = draw(st.integers(1, 3))
    channels, filters = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pairs = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list)
    kernel, stride, dilation = draw(st.tuples(pairs, pairs, pairs))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)).map(list))
    extra = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    sizes = [d * (k - 1) + 1 + e for d, k, e in zip(dilation, kernel, extra, strict=True)]
    key = root(draw(st.integers(0, 1000)), "inputs")
    inputs = normal(key, (images, groups * channels, *sizes), torch.float64)
    weights = normal(root(groups, "weights"), (groups * filters, channels, *kernel), torch.float64)
    inputs.requires_grad_()
    weights.requires_grad_()
    outputs = F.conv2d(inputs, weights, None, stride, padding, dilation, groups)
    gradient = normal(root(images, "gradient"), tuple(outputs.shape), torch.float64)
    by_inputs, by_weights = torch.autograd.grad(outputs, (inputs, weights), gradient)
    geometry = Geometry(stride, padding, dilation, False, [0, 0], groups)
    return Case(
        inputs.detach(),
        weights.detach(),
        geometry,
        outputs.detach(),
        gradient,
        by_inputs,
        by_weights,
    )


def check_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ON_A_CPU)
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_outputs_are_those_of_the_grouped_convolution(way: str, case: Case) -> None:
    check_close(FORWARD[way](case.inputs, case.weights, case.geometry), case.outputs)


@pytest.mark.parametrize("way", [way for way in ON_A_CPU if way in TO_INPUTS])
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_gradients_of_inputs_are_those_of_the_grouped_convolution(way: str, case: Case) -> None:
    args = (case.gradient, case.inputs, case.weights, case.geometry)
    check_close(TO_INPUTS[way](*args), case.by_inputs)


@pytest.mark.parametrize("way", ON_A_CPU)
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_gradients_of_weights_are_those_of_the_grouped_convolution(way: str, case: Case) -> None:
    args = (case.gradient, case.inputs, case.weights, case.geometry)
    check_close(TO_WEIGHTS[way](*args), case.by_weights)


class Weights(NamedTuple):
    """Two layers of three clients, each with weights of its own."""

    first: Tensor
    bias: Tensor
    second: Tensor


def energy(weights: Weights, images: Tensor) -> Tensor:
    """The squared norm of the outputs of two convolutions."""
    hidden = F.conv2d(images, weights.first, weights.bias, stride=2, padding=1).tanh()
    return F.conv2d(hidden, weights.second, dilation=2).square().sum()


def like_a_gpu(monkeypatch: pytest.MonkeyPatch, way: str, capturing: bool = False) -> list[object]:
    """Let a CPU stand in for a GPU on which one way is the fastest; return what is measured."""
    measured: list[object] = []

    def choose(ways: dict[str, object], args: object) -> str:
        measured.append(args)
        return way if way in ways else "grouped"

    def one_after_another(fn: Callable[..., Tensor], *columns: Sequence[Tensor]) -> list[Tensor]:
        return [fn(*args) for args in zip(*columns, strict=True)]

    monkeypatch.setattr(_convolutions, "_is_stack", lambda _, geometry: not geometry.transposed)
    monkeypatch.setattr(_convolutions, "_fastest", choose)
    monkeypatch.setattr(_convolutions, "_side_by_side", one_after_another)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return measured


@pytest.mark.parametrize("way", FORWARD)
def test_derivatives_of_a_stack_are_the_same_in_every_way(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way is chosen once for each shape."""

    def draw(tag: str, *shape: int) -> Tensor:
        return normal(root(0, tag), shape, torch.float64)

    stack = Weights(draw("1", 3, 2, 1, 3, 3), draw("b", 3, 2), draw("2", 3, 2, 2, 2, 2))
    images = draw("images", 3, 4, 1, 9, 9)

    def slope(weights: Weights, images: Tensor) -> Tensor:
        gradient = grad(energy)(weights, images)
        return sum((tensor**2).sum() for tensor in gradient)  # type: ignore[return-value]

    derivatives = vmap(grad(slope, argnums=(0, 1)))
    expected = derivatives(stack, images)
    measured = like_a_gpu(monkeypatch, way)
    convolutions = Convolutions()
    for _ in range(2):
        with convolutions:
            actual = derivatives(stack, images)
        assert len(measured) == len(convolutions.choices) > 4
        leaves = map(pytree.tree_leaves, (actual, expected))
        for our, their in zip(*leaves, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-10)
    assert way in convolutions.choices.values()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_bias_is_added_and_nothing_is_measured_while_a_graph_is_captured(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = normal(root(0, "inputs"), (2, 6, 5, 4), torch.float64).requires_grad_()
    weights = normal(root(0, "weights"), (9, 2, 3, 2), torch.float64).requires_grad_()
    bias = normal(root(0, "bias"), (9,), torch.float64).requires_grad_()

    def outputs_and_gradients() -> list[Tensor]:
        outputs = F.conv2d(inputs, weights, bias, groups=3)
        return [outputs, *torch.autograd.grad(outputs.sin().sum(), (inputs, weights, bias))]

    expected = outputs_and_gradients()
    measured = like_a_gpu(monkeypatch, "unfolded", capturing)
    with Convolutions() as convolutions:
        actual = outputs_and_gradients()
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(measured) == len(convolutions.choices) == (0 if capturing else 3)


@given(case=cases())
@settings(max_examples=20, deadline=None)
def test_on_a_cpu_convolutions_run_as_they_are(case: Case) -> None:
    inputs = case.inputs.clone().requires_grad_()
    g = case.geometry
    with Convolutions() as convolutions:
        outputs = F.conv2d(inputs, case.weights, None, g.stride, g.padding, g.dilation, g.groups)
        (by_inputs,) = torch.autograd.grad(outputs, inputs, case.gradient)
    assert torch.equal(outputs, case.outputs)
    assert torch.equal(by_inputs, case.by_inputs)
    assert convolutions.choices == {}
