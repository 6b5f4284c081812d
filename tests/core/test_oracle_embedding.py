"""The oracle embeds a training and a validation batch together where that pays."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import fedbilevel as fb
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import root
from tests.support.embedding import digits


@pytest.mark.parametrize("directions", ["directions", "penalty_directions"])
@pytest.mark.parametrize(
    ("most_samples", "backbone_calls"),
    [(5, [10]), (60, [30, 10])],
    ids=["smaller than x", "larger than x"],
)
def test_both_batches_go_through_the_backbone_together_if_they_are_smaller_than_x(
    most_samples: int, backbone_calls: list[int], directions: str
) -> None:
    problem, plain, clients, calls = digits(0.0)
    x, y = problem.start
    z = y.map(torch.ones_like)
    method = getattr(Oracle, directions)
    train, val = (
        tuple(tensor[:most_samples] for tensor in side)
        for side in (clients[0].train, clients[0].val)
    )
    batch = fb.Batch(train, val, rng=root(0, "test"))
    calls.clear()
    embedded = method(Oracle(problem), x, y, z, batch, 0.3)
    assert calls == backbone_calls
    expected = method(Oracle(plain), x, y, z, batch, 0.3)
    torch.testing.assert_close(
        pytree.tree_leaves(embedded), pytree.tree_leaves(expected), rtol=0, atol=1e-13
    )
