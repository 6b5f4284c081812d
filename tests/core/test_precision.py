"""Precision: what is rounded, by how much, and what the process is told."""

from __future__ import annotations

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.client_data import Batch
from fedbilevel.core.embedding import FeatureBatch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.precision import PRECISIONS, Precision, products_in
from fedbilevel.core.rng import normal, root
from fedbilevel.core.tree import Tree, flatten, norm
from fedbilevel.runs.run import Run
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import quadratic
from tests.support.ridge import rounding_errors


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


def test_bfloat16_of_everything_rounds_the_losses_too() -> None:
    task = hyper_representation(clients=2, hidden=16, samples=80)
    exact = task.problem
    rounded = exact.with_precision("bf16-all")
    assert exact.embed is not None
    assert rounded.embed is not None
    client = task.clients[0]
    x, y = exact.start
    z = y.map(lambda t: normal(root(0, "z"), t.shape))
    features = exact.embed(x, client.train, ())
    rounded_features = rounded.embed(x, client.train, ())
    in_bf16 = exact.with_precision("bf16").embed
    assert in_bf16 is not None
    assert torch.equal(rounded_features[0], in_bf16(x, client.train, ())[0])

    on_features = FeatureBatch(features, features, torch.tensor(0))
    results = {}
    for precision in PRECISIONS:
        oracle = Oracle(exact.with_precision(precision))
        results[precision] = (
            oracle.hessian_product(x, y, z, on_features),
            oracle.upper_gradient_y(x, y, on_features),
        )
    for j, expected in enumerate(results["fp32"]):
        assert torch.equal(flatten(results["bf16"][j]), flatten(expected))
        assert torch.equal(flatten(results["tf32"][j]), flatten(expected))
        rounding = norm(results["bf16-all"][j] - expected)
        assert 1e-4 < float(rounding / norm(expected)) < 5e-2
    assert rounded.lower(x, y, features, ()).dtype == torch.float32


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_hypergradients_are_as_exact_as_the_precision(mode: str) -> None:
    """Ridge regression has no `embed`, so that only its losses can be rounded."""
    in_float32 = rounding_errors("fp32", mode=mode)
    assert max(in_float32) < 2e-6
    in_bfloat16 = rounding_errors("bf16-all", mode=mode)
    assert 5e-4 < in_bfloat16.product < 1e-2
    assert 5e-4 < in_bfloat16.hypergradient < 2e-2


def test_a_loss_with_random_numbers_keeps_them_in_bfloat16() -> None:
    """The rounded losses take `rng` if, and only if, the losses do."""

    def draws(x: Tree, y: Tree, batch: object, rng: torch.Tensor) -> torch.Tensor:
        return (x["x"] + y["y"]).sum() * rng

    def plain(x: Tree, y: Tree, batch: object) -> torch.Tensor:
        return (x["x"] * y["y"]).sum()

    one = torch.ones(1)
    problem = fb.Problem(upper=draws, lower=plain, x={"x": one}, y={"y": 2 * one})
    rounded = problem.with_precision("bf16-all")
    assert rounded.upper(*problem.start, (), torch.tensor(5.0)) == 15.0
    assert rounded.lower(*problem.start, (), torch.tensor(5.0)) == 2.0


def test_a_problem_without_a_backbone_cannot_round_it() -> None:
    sentence = (
        "^precision is 'bf16', but this problem has no embed to round; "
        "it must be 'fp32', 'tf32' or 'bf16-all'$"
    )
    with pytest.raises(ValueError, match=sentence):
        quadratic(clients=2).problem.with_precision("bf16")


def test_a_cpu_has_no_tf32() -> None:
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match=r"^precision is 'tf32', but device is 'cpu'[^.]*$"):
        fb.simulated_federation(task.problem, task.clients, precision="tf32")


def allowed() -> tuple[bool, bool]:
    """Whether matrix products and convolutions on a GPU may use TF32."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [(False, True), (True, False)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_settings_of_the_process_are_changed_for_a_gpu_and_restored(
    precision: Precision, before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", before[0])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before[1])
    with products_in(precision, "cpu"):
        assert allowed() == before
    with products_in(precision, "cuda"):
        assert allowed() == (precision == "tf32", precision == "tf32")
        with products_in("tf32", "cuda:0"):
            assert allowed() == (True, True)
        assert allowed() == (precision == "tf32", precision == "tf32")
    assert allowed() == before
    with pytest.raises(KeyError), products_in(precision, "cuda"):
        raise KeyError
    assert allowed() == before
