"""Derivatives on embedded batches, and hypergradients by differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedbilevel.core.client_data import Batch
from fedbilevel.core.embedding import EmbeddedBatch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.tree import Tree, norm
from tests.support.embedded_net import embedded_net

FIRST_ORDER = [
    "lower_gradient_y",
    "upper_gradient_y",
    "upper_gradient_x",
    "upper_gradients",
    "lower_gradients",
]
SECOND_ORDER = [
    "hessian_product",
    "cross_product",
    "products",
    "hypergradient",
    "lower_gradient_and_product",
]


def ramp(tree: Tree) -> Tree:
    """A direction with another entry in every coordinate of a tensor."""
    return tree.map(lambda t: torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape))


@pytest.mark.parametrize("stacked", [False, True])
def test_derivatives_on_embedded_batches_are_those_on_the_batches(stacked: bool) -> None:
    problem, batch = embedded_net()
    plain, _ = embedded_net(embed=False)
    x, y = problem.start
    v = ramp(y)

    def derivatives(oracle: Oracle, batch: Any) -> list[Any]:
        first = [getattr(oracle, name)(x, y, batch) for name in FIRST_ORDER]
        second = [getattr(oracle, name)(x, y, v, batch) for name in SECOND_ORDER]
        return [first, second, oracle.difference_hypergradient(x, y, v, batch, 1e-3)]

    def on_embedded(batch: Batch) -> list[Any]:
        oracle = Oracle(problem)
        embedded = oracle.embed(x, batch)
        assert isinstance(embedded, EmbeddedBatch)
        return derivatives(oracle, embedded)

    if stacked:
        twice = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), batch)
        both = torch.func.vmap(on_embedded)(twice)
        ours = torch.utils._pytree.tree_map(lambda t: t[1], both)
    else:
        ours = on_embedded(batch)
    theirs = derivatives(Oracle(plain), batch)
    leaves = map(torch.utils._pytree.tree_leaves, (ours, theirs))
    for our, their in zip(*leaves, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


def test_a_problem_without_embed_leaves_batches_as_they_are() -> None:
    plain, batch = embedded_net(embed=False)
    assert Oracle(plain).embed(plain.start[0], batch) is batch


def test_the_error_of_a_difference_does_not_depend_on_the_length_of_its_direction() -> None:
    problem, batch = embedded_net()
    oracle = Oracle(problem)
    x, y = problem.start
    v = ramp(y)
    f_x = oracle.upper_gradient_x(x, y, batch)
    short = oracle.difference_hypergradient(x, y, v, batch, 0.1) - f_x
    long = oracle.difference_hypergradient(x, y, 1000.0 * v, batch, 0.1) - f_x
    assert float(norm(long - 1000.0 * short)) < 1e-9 * float(norm(long))
