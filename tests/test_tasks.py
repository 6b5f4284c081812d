"""The ready-made tasks: closed forms that agree with themselves, splits as in the papers, learning that happens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core import rng
from fedbilevel.core.oracle import Oracle


def test_quadratic_closed_forms_agree() -> None:
    task: Any = fb.tasks.load("quadratic", clients=3, condition=20.0, samples=4, noise=0.5, seed=1)
    weights = [0.2, 0.5, 0.3]
    assert task.gradient(task.x_star(weights), weights)["x"].norm() < 1e-10
    x = fb.Tree(x=torch.linspace(-1, 1, 5, dtype=torch.float64)).map(lambda t: t.requires_grad_())
    (slope,) = torch.autograd.grad(task.phi(x, weights), x["x"])
    torch.testing.assert_close(task.gradient(x, weights)["x"], slope)
    eigenvalues = torch.stack([torch.linalg.eigvalsh(c.train[0][0]) for c in task.clients])
    assert float(eigenvalues.min()) == pytest.approx(1 / 20)
    assert float(eigenvalues.max()) == pytest.approx(1.0)


def test_quadratic_heterogeneity_is_none_to_all() -> None:
    alike: Any = fb.tasks.load("quadratic", clients=3, heterogeneity=0.0)
    assert all(torch.equal(alike.clients[0].train[0], c.train[0]) for c in alike.clients)
    apart: Any = fb.tasks.load("quadratic", clients=3, heterogeneity=1.0)
    assert not torch.allclose(apart.clients[0].train[0], apart.clients[1].train[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heterogeneity": 1.5}, "heterogeneity is 1.5; it must be in"),
        ({"condition": 0.5}, "condition is 0.5; it must be at least 1"),
        ({"clients": 0}, "clients is 0; it must be at least 1"),
        ({"noise": -1.0}, "noise is -1.0; it must not be negative"),
    ],
)
def test_quadratic_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("quadratic", **options)


def test_unknown_tasks_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'quadratic'"):
        fb.tasks.load("quadratics")


def test_hyper_representation_on_digits_learns() -> None:
    task = fb.tasks.load(
        "hyper-representation", data="digits", partition="shards", clients=20, hidden=32
    )
    environment = fb.Environment(participation=5, local_steps=5, batch_size=32)
    result = fb.solve(
        task.problem,
        task.clients,
        "shrofbo",
        rounds=40,
        environment=environment,
        evaluate=task.evaluate,
        every=40,
    )
    first, last = result.history[0], result.history[-1]
    assert first["test_accuracy"] < 0.3
    assert last["test_accuracy"] > 0.8
    assert last["upper_loss"] < first["upper_loss"]


def test_hyper_representation_with_dropout_and_the_penalty_of_fednests_code() -> None:
    options: dict[str, Any] = {"data": "digits", "clients": 2, "hidden": 8}
    plain = fb.tasks.load("hyper-representation", ridge=0.0, **options)
    other = fb.tasks.load("hyper-representation", ridge=0.0, norm_penalty=0.1, **options)
    dropped = fb.tasks.load("hyper-representation", ridge=0.0, dropout=0.5, **options)
    x, y = plain.problem.start
    first, second = (
        fb.Batch(train=plain.clients[0].train, rng=rng.root(seed, "dropout")) for seed in (1, 2)
    )
    penalty = Oracle(other.problem).lower(x, y, first) - Oracle(plain.problem).lower(x, y, first)
    torch.testing.assert_close(penalty, 0.05 * (y["head.weight"].norm() + y["head.bias"].norm()))
    dropout = Oracle(dropped.problem)
    assert dropout.lower(x, y, first) == dropout.lower(x, y, first)
    assert dropout.lower(x, y, first) != dropout.lower(x, y, second)
    assert dropped.evaluate is not None
    assert plain.evaluate is not None
    assert dropped.evaluate(x, y) == plain.evaluate(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mlp", "head_layers": 2}, "head_layers is 2; with model 'mlp' it must be 1"),
        ({"model": "cnn", "dropout": 0.5}, "dropout is 0.5; it is for model 'mlp'"),
        ({"dropout": 1.0}, "p is 1.0; it must be at least 0 and below 1"),
        ({"norm_penalty": -1.0}, "norm_penalty"),
    ],
)
def test_hyper_representation_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("hyper-representation", data="digits", clients=2, **options)


def test_hyper_representation_splits_each_client() -> None:
    task = fb.tasks.load("hyper-representation", data="digits", clients=10, validation=0.25)
    sizes = {(c.size("train"), c.size("val")) for c in task.clients}
    assert sizes <= {(107, 36), (108, 36)}
    with pytest.raises(
        ValueError,
        match="model is 'mpl'; it must be one of 'mlp', 'cnn', 'resnet18'; did you mean 'mlp'",
    ):
        fb.tasks.load("hyper-representation", model="mpl")


MNIST = Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist")


@pytest.mark.skipif(not MNIST.is_dir(), reason="needs MNIST in $FEDBILEVEL_DATA")
@pytest.mark.parametrize(
    ("partition", "validation", "sizes"),
    [("iid", 0.25, (450, 150)), ("iid", 0.5, (300, 300)), ("shards", 0.2, (480, 120))],
)
def test_the_papers_mnist_splits(partition: str, validation: float, sizes: tuple[int, int]) -> None:
    task = fb.tasks.load(
        "hyper-representation", data="mnist", partition=partition, validation=validation
    )
    assert {(c.size("train"), c.size("val")) for c in task.clients} == {sizes}
    assert (task.problem.start[0].numel, task.problem.start[1].numel) == (157_000, 2_010)


@pytest.mark.skipif(not MNIST.is_dir(), reason="needs MNIST in $FEDBILEVEL_DATA")
def test_simfbo_reaches_90_percent_on_iid_mnist_within_80_rounds() -> None:
    task = fb.tasks.load("hyper-representation", data="mnist", partition="iid")
    environment = fb.Environment(participation=10, batch_size=64)
    result = fb.solve(
        task.problem,
        task.clients,
        "simfbo",
        rounds=80,
        environment=environment,
        evaluate=task.evaluate,
        every=5,
    )
    assert max(metrics["test_accuracy"] for metrics in result.history) >= 0.9
