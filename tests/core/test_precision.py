"""`Problem.with_precision` rounds the backbone and nothing else."""

from __future__ import annotations

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.oracle import FeatureBatch, Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.tree import Tree, flatten, norm
from fedbilevel.runs.run import Run
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import quadratic


def test_bfloat16_rounds_the_backbone_and_nothing_else() -> None:
    """The head sees rounded features; what it computes of them, such as its Hessian, is exact."""
    task = hyper_representation(clients=2, hidden=16, samples=80)
    exact = task.problem
    rounded = task.problem.with_precision("bf16")
    assert exact.embed is not None
    assert rounded.embed is not None
    client = task.clients[0]
    batch = Batch(client.train, client.val, torch.tensor(0))
    x, y = exact.start
    z = Tree(exact.y).map(torch.ones_like)

    features = rounded.embed(x, client.train, ())
    exact_features = exact.embed(x, client.train, ())
    assert features[0].dtype == torch.float32
    error = float((features[0] - exact_features[0]).norm() / features[0].norm())
    assert 1e-4 < error < 1e-2

    product = Oracle(rounded).hessian_product(x, y, z, batch)
    on_features = FeatureBatch(features, (), batch.rng)
    expected = Oracle(exact).hessian_product(x, y, z, on_features)
    assert torch.equal(flatten(product), flatten(expected))

    directions = Oracle(rounded).directions(x, y, z, batch)
    exact_directions = Oracle(exact).directions(x, y, z, batch)
    for actual, tree in zip(directions, exact_directions, strict=True):
        assert 1e-6 < float(norm(actual - tree) / norm(tree)) < 2e-2


def test_a_run_in_bfloat16_moves_almost_as_in_float32() -> None:
    task = hyper_representation(clients=2, hidden=16, samples=80)
    fed = fb.simulated_federation(task.problem, task.clients, precision="bf16")
    rounded = Run(fb.algorithms.SimFBO(), fed, {"rounds": 2})
    rounded.advance()
    exact_fed = fb.simulated_federation(task.problem, task.clients)
    exact = Run(fb.algorithms.SimFBO(), exact_fed, {"rounds": 2})
    exact.advance()
    moved = flatten(exact.state.x) - flatten(fb.Tree(task.problem.x))
    error = flatten(rounded.state.x) - flatten(exact.state.x)
    assert 1e-6 < float(error.norm() / moved.norm()) < 5e-2


def test_a_problem_without_a_backbone_cannot_be_rounded() -> None:
    with pytest.raises(ValueError, match="has no embed"):
        quadratic(clients=2).problem.with_precision("bf16")
