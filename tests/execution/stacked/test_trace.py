"""A trace computes what the traced function computes, and changes none of its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core.rng import normal, root
from fedbilevel.execution.stacked._trace import FlatFunction, trace


def draw(*shape: int, tag: str = "trace") -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


def check_traced(traced: FlatFunction, fn: FlatFunction, *args: Tensor, atol: float = 0) -> None:
    torch.testing.assert_close(traced(*args), fn(*args), rtol=0, atol=atol)


def test_results_are_not_views_of_constants() -> None:
    """A caller may change a result; the next replay must not see that."""

    def fn(a: Tensor) -> list[Tensor]:
        zeros = torch.zeros_like(a)
        return [zeros, zeros[:1], a + zeros]

    args = (draw(3, 4),)
    traced = trace(fn, args)
    for _ in range(2):
        results = traced(*args)
        torch.testing.assert_close(results, fn(*args), rtol=0, atol=0)
        results[0].add_(1.0)
        results[1].add_(1.0)


def test_arguments_are_not_overwritten() -> None:
    def fn(x: Tensor, q: Tensor, a: Tensor) -> list[Tensor]:
        d = a.exp()
        return [x - 0.5 * d, q + d, x + q]

    args = draw(3, 4), draw(3, 4, tag="q"), draw(3, 4, tag="a")
    before = [arg.clone() for arg in args]
    check_traced(trace(fn, args), fn, *args, atol=1e-15)
    torch.testing.assert_close(list(args), before, rtol=0, atol=0)


def test_means_of_one_entry_and_products_with_ones_cost_nothing() -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        total = a.mean((0, 2)) + b * torch.ones_like(b)
        grown = torch.ones_like(a) * b  # of another shape than b
        kept = a.mean(1, keepdim=True).mean(-1, keepdim=True)
        return [total, a.mean(1), grown, kept + 0.0]

    for args in (
        (draw(1, 3, 1), draw(3, tag="b")),
        (draw(1, 3, 2), draw(1, tag="b")),
        (draw(3, 1, 1).transpose(0, 1), draw(3, tag="b")),
        (draw(2, 3, 2), draw(2, tag="b")[:1]),
    ):
        check_traced(trace(fn, args), fn, *args, atol=1e-16)
    counted = trace(fn, (draw(1, 3, 1), draw(3, tag="b")))
    code: str = counted.__self__.code  # type: ignore[attr-defined]
    assert code.count("torch.mean(") == 2  # those over three entries
    assert code.count("torch.mul(") == 1


def test_a_product_used_twice_is_not_overwritten() -> None:
    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        first = torch.bmm(a, b)
        second = torch.bmm(b, a)
        return [first + second, first, second + second, first + 0.5 * second]

    args = draw(2, 3, 3), draw(2, 3, 3, tag="b")
    check_traced(trace(fn, args), fn, *args, atol=1e-14)


def test_views_that_change_the_shape_stay() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [
            a.transpose(0, 1).transpose(1, 2),
            a.view(6, 2).expand(6, 2) * 1,
            a.view(2, 3, 2),
            a[:1].expand(4, 3, 2),
        ]

    args = (draw(2, 3, 2),)
    for traced, expected in zip(trace(fn, args)(*args), fn(*args), strict=True):
        assert torch.equal(traced, expected)


def in_place_activation(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = torch.bmm(a, w)
    skip = 0.5 * h
    h = F.leaky_relu(h, 0.1, inplace=True)
    return [h + skip, h]


def overwritten_operand(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    c = b.clone()
    first = torch.bmm(a, w)
    second = torch.bmm(c, w)
    c.zero_()
    return [first + second, c]


def broadcast_product(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [
        torch.bmm(a, w) + torch.bmm(b[:, :1], w),
        torch.bmm(b[:, :1], w) + 2.0 * torch.bmm(a, w),
    ]


def integers(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    n = (10 * a).long()
    return [n * 1.0, n + 2 * n, a.float() + 0.5 * n, n.double() + 0.5 * n]


def two_views_of_one_copy(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    transposed = a.transpose(1, 2)  # reshaping copies it, once for all views
    early = transposed.reshape(5, 6)
    return [
        transposed.reshape(30) + b.reshape(30),
        early * 2,
        transposed.reshape(10, 3).sin(),
    ]


@pytest.mark.parametrize(
    "fn",
    [
        in_place_activation,
        overwritten_operand,
        broadcast_product,
        integers,
        two_views_of_one_copy,
    ],
)
def test_rewrites_do_not_change_results(fn: Callable[..., list[Tensor]]) -> None:
    args = draw(2, 3, 4), draw(2, 5, 3, tag="a"), draw(2, 5, 3, tag="b")
    expected = fn(*(arg.clone() for arg in args))
    results = trace(fn, args)(*(arg.clone() for arg in args))
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-14)
