"""`apply_vmap`: what all clients share is passed once, and the results are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedbilevel.core.derivatives import grad
from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree
from fedbilevel.execution.vectorize import apply_vmap, vectorized

aten = torch.ops.aten


def draw(tag: str, *shape: int) -> Tensor:
    return normal(root(0, tag), shape, torch.float64)


class Calls(TorchDispatchMode):
    """Notes the shapes of the results of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[Any, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.shapes.setdefault(func, []).append(tuple(result.shape))
        return result


def step(w: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tree, Tensor]:
    """A product, a gradient, and a result of w alone."""

    def loss(w: Tensor) -> Tensor:
        return ((a @ w).tanh() ** 2).sum() * s

    return a @ w.sin(), Tree(g=grad(loss)(w)), w.cos()


@given(
    clients=st.integers(1, 4),
    shared=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=30, deadline=None)
def test_repeated_tensors_give_the_results_of_copies(
    clients: int, shared: tuple[bool, bool, bool]
) -> None:
    shapes = {"w": (3,), "a": (5, 3), "s": ()}
    stacks = []
    for (name, shape), is_shared in zip(shapes.items(), shared, strict=True):
        stack = draw(name, clients, *shape)
        if is_shared:
            stack = stack[0].expand(clients, *shape)
        stacks.append(stack)
    results = pytree.tree_leaves(apply_vmap(step, stacks))
    for client in range(clients):
        alone = pytree.tree_leaves(step(*(stack[client].clone() for stack in stacks)))
        for result, expected in zip(results, alone, strict=True):
            assert len(result) == clients
            torch.testing.assert_close(result[client], expected, rtol=1e-12, atol=1e-12)


def test_what_depends_on_repeated_tensors_alone_is_computed_once() -> None:
    w = draw("w", 3)
    a = draw("a", 4, 5, 3)
    for stack, shape in ((w.expand(4, 3), (3,)), (w.repeat(4, 1), (4, 3))):
        with Calls() as calls:
            apply_vmap(lambda w, a: a @ w.sin(), [stack, a])
        assert calls.shapes[aten.sin.default] == [shape]


def test_the_product_with_a_repeated_weight_is_one_product() -> None:
    weight = draw("weight", 3, 2)
    samples = draw("samples", 4, 5, 3)
    with Calls() as calls:
        outputs = apply_vmap(torch.matmul, [samples, weight.expand(4, 3, 2)])
    assert calls.shapes[aten.mm.default] == [(4 * 5, 2)]
    assert aten.bmm.default not in calls.shapes
    torch.testing.assert_close(outputs, samples @ weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clients", [1, 3])
def test_nested_values_may_all_be_repeated(clients: int) -> None:
    tree = Tree(u=draw("u", 2).expand(clients, 2), s=draw("s").expand(clients))
    scaled = vectorized(lambda tree, factor: tree * factor)(tree, draw("f").expand(clients))
    assert {name: tuple(tensor.shape) for name, tensor in scaled.items()} == {
        "u": (clients, 2),
        "s": (clients,),
    }
    for name, tensor in scaled.items():
        torch.testing.assert_close(tensor, tree[name] * draw("f"), rtol=0, atol=0)


def test_entries_of_an_expanded_stack_are_differentiated_one_by_one() -> None:
    """Each client's derivative is its own, even where all clients start from one tensor."""
    point = torch.tensor([1.0, 2.0], dtype=torch.float64)
    scales = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)

    def losses(points: Tensor) -> Tensor:
        return apply_vmap(lambda y, scale: scale * (y**2).sum(), [points, scales])

    _, pullback = torch.func.vjp(losses, point.expand(3, 2))
    (gradients,) = pullback(torch.ones(3, dtype=torch.float64))
    assert torch.equal(gradients, 2 * scales.unsqueeze(1) * point)
