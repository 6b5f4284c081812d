"""Hyper-representation: its losses, the splits of the papers, and methods that learn it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core import rng
from fedbilevel.core.oracle import Oracle
from tests.support.stored_data import needs


def test_the_norm_penalty_of_fednests_code_adds_half_the_norms_of_the_head() -> None:
    options: dict[str, Any] = {"data": "digits", "clients": 2, "hidden": 8, "ridge": 0.0}
    plain = fb.tasks.load("hyper-representation", **options)
    penalised = fb.tasks.load("hyper-representation", norm_penalty=0.1, **options)
    x, y = plain.problem.start
    batch = fb.Batch(train=plain.clients[0].train, rng=rng.root(1, "dropout"))
    without = Oracle(plain.problem).lower(x, y, batch)
    penalty = Oracle(penalised.problem).lower(x, y, batch) - without
    torch.testing.assert_close(penalty, 0.05 * (y["head.weight"].norm() + y["head.bias"].norm()))


def test_dropout_is_keyed_and_off_in_the_evaluation() -> None:
    options: dict[str, Any] = {"data": "digits", "clients": 2, "hidden": 8, "ridge": 0.0}
    plain = fb.tasks.load("hyper-representation", **options)
    dropped = fb.tasks.load("hyper-representation", dropout=0.5, **options)
    x, y = plain.problem.start
    first = fb.Batch(train=plain.clients[0].train, rng=rng.root(1, "dropout"))
    second = fb.Batch(train=plain.clients[0].train, rng=rng.root(2, "dropout"))
    oracle = Oracle(dropped.problem)
    assert oracle.lower(x, y, first) == oracle.lower(x, y, first)
    assert oracle.lower(x, y, first) != oracle.lower(x, y, second)
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
        (
            {"model": "mpl"},
            r"model is 'mpl' \(did you mean 'mlp'\?\); it must be one of 'mlp', 'cnn', 'resnet18'",
        ),
        ({"data": "breast-cancer", "model": "cnn"}, "model is 'cnn', which needs images"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"data": "digits", "clients": 2, **options}
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("hyper-representation", **arguments)


def test_each_client_is_split_into_training_and_validation_samples() -> None:
    task = fb.tasks.load("hyper-representation", data="digits", clients=10, validation=0.25)
    sizes = {(client.size("train"), client.size("val")) for client in task.clients}
    assert sizes <= {(107, 36), (108, 36)}


@needs("mnist")
@pytest.mark.parametrize(
    ("partition", "validation", "sizes"),
    [("iid", 0.25, (450, 150)), ("iid", 0.5, (300, 300)), ("shards", 0.2, (480, 120))],
)
def test_the_papers_mnist_splits(partition: str, validation: float, sizes: tuple[int, int]) -> None:
    task = fb.tasks.load(
        "hyper-representation", data="mnist", partition=partition, validation=validation
    )
    assert {(client.size("train"), client.size("val")) for client in task.clients} == {sizes}
    x, y = task.problem.start
    assert (x.numel, y.numel) == (157_000, 2_010)


def test_shrofbo_learns_digits_on_label_shards() -> None:
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
    first = result.history[0]
    last = result.history[-1]
    assert first["test_accuracy"] < 0.3
    assert last["test_accuracy"] > 0.8
    assert last["upper_loss"] < first["upper_loss"]


@needs("mnist")
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


def test_heads_that_belong_to_the_clients() -> None:
    options = {"clients": 4, "hidden": 8, "samples": 200, "partition": "shards"}
    task = fb.tasks.load("hyper-representation", **options, owner="client")
    same_split = fb.tasks.load("hyper-representation", **options, held_out=0.2)
    assert task.problem.client_names == {"head.weight", "head.bias"}
    assert not same_split.problem.client_names
    for ours, theirs in zip(task.clients, same_split.clients, strict=True):
        assert torch.equal(ours.train[0], theirs.train[0])
        assert ours.size("train") + ours.size("val") == 40
    result = fb.solve(
        task.problem, task.clients, "simfbo", rounds=3, evaluate_client=task.evaluate_client
    )
    accuracies = [
        task.evaluate_client(*result.personal(client), client)["test_accuracy"]
        for client in range(4)
    ]
    assert result.history[-1]["test_accuracy_worst"] == min(accuracies)
    heads = [result.personal(client)[1]["head.weight"] for client in range(4)]
    assert not torch.equal(heads[0], heads[1])
    with pytest.raises(ValueError, match="held_out must be above 0"):
        fb.tasks.load("hyper-representation", **options, owner="client", held_out=0.0)
