"""The meter's operations and memory against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from fedbilevel.execution._meter import Meter

B, K, H, C = 8, 7, 5, 3  # samples, inputs, hidden units, classes
INPUTS = torch.randn(B, K, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(B) % C
IMAGES = torch.randn(B, 4, 9, 9, generator=torch.Generator().manual_seed(1))

# A result of 6 channels of 7 x 7 numbers, each a sum over 4 channels and a 3 x 3 kernel.
CONVOLUTION = 2 * B * (6 * 7 * 7) * (4 * 3 * 3)


def measure(fn: Callable[..., object], *args: Tensor) -> Meter:
    with Meter() as meter:
        fn(*args)
    return meter


def mlp(w: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(F.linear(INPUTS, w).relu(), v), LABELS)


def convolution(kernel: Tensor, groups: int = 1) -> Tensor:
    return F.conv2d(IMAGES, kernel, groups=groups).pow(2).sum()


def grouped_convolution(kernel: Tensor) -> Tensor:
    return convolution(kernel, groups=2)


def hessian_times_ones(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    product: Tensor = grad(lambda u: grad(loss)(u).sum())(at)
    return product


def mlp_product(w: Tensor, v: Tensor) -> Tensor:
    return hessian_times_ones(lambda head: mlp(w, head), v)


def convolution_product(kernel: Tensor) -> Tensor:
    return hessian_times_ones(convolution, kernel)


def elementwise(v: Tensor) -> Tensor:
    return (v.exp() * v).sum() + v.norm()


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    # Forward, to the weights and to the inputs; the first layer needs no gradient of its inputs.
    "mlp": (
        grad(mlp, argnums=(0, 1)),
        [(H, K), (C, H)],
        6 * B * (H * K + C * H) - 2 * B * H * K,
    ),
    # The hidden layer once; the head forward, to its weight, and both of these differentiated.
    "product": (mlp_product, [(H, K), (C, H)], 2 * B * H * K + 4 * 2 * B * C * H),
    "vectors": (lambda v: (INPUTS @ v) @ torch.ones(B), [(K,)], 2 * B * K + 2 * B),
    "addmv": (lambda v: torch.addmv(torch.ones(B), INPUTS, v), [(K,)], 2 * B * K),
    "convolution": (grad(convolution), [(6, 4, 3, 3)], 2 * CONVOLUTION),
    # `vmap` turns three convolutions into one of three groups.
    "stacked": (vmap(grad(convolution)), [(3, 6, 4, 3, 3)], 3 * 2 * CONVOLUTION),
    "grouped": (grad(grouped_convolution), [(6, 2, 3, 3)], CONVOLUTION),
    # A product takes four, and autograd one more: the gradient of the images, which nobody needs.
    "convolution-product": (convolution_product, [(6, 4, 3, 3)], 5 * CONVOLUTION),
    "none": (elementwise, [(K,)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_of_the_closed_form(case: str) -> None:
    fn, shapes, flops = CASES[case]
    assert measure(fn, *(torch.ones(shape) for shape in shapes)).flops == flops


def test_the_largest_convolution_is_noted() -> None:
    def two_convolutions(kernel: Tensor) -> Tensor:
        return convolution(kernel) + F.conv2d(IMAGES[:2], kernel).sum()

    assert measure(two_convolutions, torch.ones(6, 4, 3, 3)).largest_convolution == CONVOLUTION


@pytest.mark.parametrize(
    ("fn", "kilobytes"),
    [
        (lambda a: a * 2, 4),
        (lambda a: ((a * 2 + 1) * 3).exp(), 8),
        (lambda a: [a * k for k in range(5)], 20),
        (lambda a: (a * 2).view(10, 100).t().reshape(10, 100)[:2], 8),
        (lambda a: torch.zeros(1000).add_(a).mul_(2), 4),
        (lambda a: a.view(10, 100)[1:], 0),
        (grad(lambda a: a.exp().sin().sum()), 12),
    ],
    ids=[
        "one result",
        "a chain, each freed when the next is there",
        "five results",
        "a product and one copy of it",
        "in place",
        "views",
        "gradient: exp, its cosine, their product",
    ],
)
def test_peak_memory_is_what_is_alive_at_once(fn: Callable[[Tensor], Any], kilobytes: int) -> None:
    peak = measure(fn, torch.ones(1000)).peak_bytes
    scalars = 16
    assert 1000 * kilobytes <= peak <= 1000 * kilobytes + scalars
