"""The operations of a trace: what it computes once, in place, or not at all.

Results are the same without these rewrites, so only the operations show that they are done.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from fedbilevel.core.rng import fold_in, normal, root, uniform
from fedbilevel.execution.stacked._trace import FlatFunction, compile_trace, trace


def draw(*shape: int, tag: str = "trace") -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


def nodes(traced: Any) -> list[Any]:
    return [node for node in traced.__self__.graph.nodes if node.op == "call_function"]


def operations(traced: FlatFunction) -> list[str]:
    """The names of the operations, without those of their overloads."""
    return [node.target.__name__.split(".")[0] for node in nodes(traced)]


def check_traced(traced: FlatFunction, fn: FlatFunction, *args: Tensor, atol: float = 0) -> None:
    torch.testing.assert_close(traced(*args), fn(*args), rtol=0, atol=atol)


def test_gradients_of_a_shared_weight_are_accumulated_in_one_product() -> None:
    def loss(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(F.linear(a, w)).sum() + torch.sin(F.linear(b, w)).sum()

    def step(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [w - 0.3 * vmap(grad(loss))(w, a, b)]

    args = draw(2, 4, 3), draw(2, 5, 3, tag="a"), draw(2, 5, 3, tag="b")
    traced = trace(step, args)
    check_traced(traced, step, *args, atol=1e-14)
    check_traced(traced, step, *(-2 * a for a in args), atol=1e-14)
    names = operations(traced)
    # Two forward products and one of the two gradients; the other one is accumulated.
    assert names.count("bmm") == 3
    assert names.count("baddbmm_") == 1
    scaled = [node.kwargs for node in nodes(traced) if node.target is torch.sub]
    assert scaled == [{"alpha": 0.3}]


def test_constants_are_computed_once_and_handed_out_as_copies() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        # As autograd begins: only the shape of the sum matters.
        slope = torch.ones_like(a.exp().sum()) * 0.5
        zeros = torch.zeros_like(a)
        return [a * slope, zeros, a + zeros, (a * 2).sin() + (a * 2).cos(), zeros[:1]]

    args = (draw(3, 4),)
    traced = trace(fn, args)
    for _ in range(2):
        results = traced(*args)
        torch.testing.assert_close(results, fn(*args), rtol=0, atol=0)
        for constant in (results[1], results[4]):
            constant.add_(1.0)
    names = operations(traced)
    assert "exp" not in names
    assert names.count("mul") == 2, "one by the slope, and one by 2"


def test_nothing_is_added_to_zeros_of_the_same_shape() -> None:
    def fn(a: Tensor) -> list[Tensor]:
        return [
            torch.zeros(3, 4, dtype=a.dtype) + a * a,
            a.exp() + torch.zeros_like(a),
            torch.zeros(2, 3, 4).to(a) + a,
        ]

    args = (draw(3, 4),)
    traced = trace(fn, args)
    check_traced(traced, fn, *args)
    sums = [name for name in operations(traced) if name.startswith("add")]
    assert len(sums) == 1, "zeros that broadcast the other operand stay"


def test_the_constants_of_random_draws_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's compiler counts them in 32 bits on a GPU, and lets them overflow on a CPU."""

    def fn(keys: Tensor) -> list[Tensor]:
        return [uniform(keys, (7, 3)), fold_in(keys, torch.arange(2).unsqueeze(-1))]

    args = (torch.tensor([5, -(7**20), 2**62 + 11, -1]),)
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _: module.forward)
    for traced in (trace(fn, args), compile_trace(fn, args)):
        check_traced(traced, fn, *args)
        assert not any("arange" in name for name in operations(traced))


def test_a_sum_overwrites_an_operand_that_nothing_uses_later() -> None:
    def fn(x: Tensor, q: Tensor, a: Tensor) -> list[Tensor]:
        d = a.exp()
        e = a.sin()
        f = a.cos()
        kept = e.view(-1)
        return [x - 0.5 * d, q + d, x + e, kept, f + a, f, a.tan() + a[:1]]

    args = draw(3, 4), draw(3, 4, tag="q"), draw(3, 4, tag="a")
    before = [arg.clone() for arg in args]
    traced = trace(fn, args)
    check_traced(traced, fn, *args, atol=1e-15)
    torch.testing.assert_close(list(args), before, rtol=0, atol=0)
    in_place = operations(traced).count("add_")
    assert in_place == 2, "d and the tangent are overwritten; e and f are results"


def test_a_bias_is_added_by_the_matrix_product() -> None:
    args = draw(2, 3, 4), draw(2, 4, 5, tag="a"), draw(2, 5, tag="b")

    def layer(a: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [b.unsqueeze(1) + torch.bmm(a, w)]

    def sum_plus_product(a: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        total = torch.bmm(a, w).sum((1, 2), keepdim=True)
        return [*layer(a, w, b), total + torch.bmm(a, w)]

    check_traced(trace(sum_plus_product, args), sum_plus_product, *args, atol=1e-14)
    assert operations(trace(layer, args)).count("baddbmm") == 1
