"""Hyper-cleaning: its wrong labels, its gradients by hand, and a method that finds the labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.tree import dot
from fedbilevel.tasks.hyper_cleaning import corrupt
from tests.support.convex_tasks import (
    KEY,
    check_hypergradient,
    check_strong_convexity,
    load_in_double,
)
from tests.support.stored_data import needs


def test_labels_change_to_any_other_class_with_the_given_probability() -> None:
    labels = torch.arange(100_000) % 10
    noisy, corrupted = corrupt(labels, 10, 0.4, seed=3)
    assert torch.equal(noisy != labels, corrupted)
    assert float(corrupted.double().mean()) == pytest.approx(0.4, abs=4 * (0.24 / 100_000) ** 0.5)
    shifts = ((noisy - labels) % 10)[corrupted].bincount(minlength=10)
    assert shifts[0] == 0
    assert float((shifts[1:] / corrupted.sum() - 1 / 9).abs().max()) < 0.01
    assert torch.equal(corrupt(labels, 10, 0.4, seed=3)[0], noisy)
    assert not torch.equal(corrupt(labels, 10, 0.4, seed=4)[0], noisy)


@pytest.mark.parametrize(
    "options", [{}, {"partition": "shards"}, {"partition": "dirichlet", "alpha": 0.3}]
)
def test_every_training_sample_has_its_own_weight_and_validation_is_clean(
    options: dict[str, Any],
) -> None:
    noisy: Any = fb.tasks.load("hyper-cleaning", noise=0.4, **options)
    clean: Any = fb.tasks.load("hyper-cleaning", noise=0.0, **options)
    assert len(noisy.clients) == 18
    positions = torch.cat([client.train[2] for client in noisy.clients])
    assert torch.equal(positions, torch.arange(len(noisy.problem.x["weights"])))
    for noisy_client, clean_client in zip(noisy.clients, clean.clients, strict=True):
        assert all(map(torch.equal, noisy_client.val, clean_client.val))
        inputs, labels, position = noisy_client.train
        true_inputs, true_labels, _ = clean_client.train
        assert torch.equal(inputs, true_inputs)
        assert torch.equal(labels != true_labels, noisy.corrupted[position])
    assert not clean.corrupted.any()
    assert set(clean.evaluate(*clean.problem.start)) == {"train_accuracy", "test_accuracy"}


def test_gradients_of_the_lower_loss_by_hand() -> None:
    problem, clients = load_in_double("hyper-cleaning", ridge=0.1)
    x, y = problem.start
    batch: Any = clients[1].train
    inputs, labels, position = batch
    weights = x["weights"][position].sigmoid()
    one_hot = F.one_hot(labels, 2)
    probabilities = (inputs @ y["classifier"]).softmax(1)
    losses = -(probabilities * one_hot).sum(1).log()
    by_x, by_y = grad(problem.lower, argnums=(0, 1))(x, y, batch, KEY)
    expected = torch.zeros_like(x["weights"])  # 0 for the samples of other clients
    expected[position] = weights * (1 - weights) * losses / len(labels)
    torch.testing.assert_close(by_x["weights"], expected)
    errors = weights[:, None] * (probabilities - one_hot)
    expected = inputs.T @ errors / len(labels) + 0.1 * y["classifier"]
    torch.testing.assert_close(by_y["classifier"], expected)


def test_the_lower_level_is_strongly_convex_whatever_x() -> None:
    check_strong_convexity("hyper-cleaning")


def test_the_hypergradient_is_the_gradient_of_the_objective() -> None:
    check_hypergradient("hyper-cleaning")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": 1.0}, r"noise is 1\.0; it must be at least 0 and below 1"),
        ({"ridge": -1.0}, "ridge is -1.0; it must"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("hyper-cleaning", data="breast-cancer", **options)


def pooled_accuracy(task: Any, weights: Tensor, ridge: float) -> float:
    """Return the test accuracy of the classifier that solves the lower level of all clients at x.

    `weights` is x. L-BFGS solves for A with W = P A, where P is the inverse square root of the
    inputs' second moments plus a constant, because that is better conditioned. By strong convexity,
    a gradient g leaves at most ||g||^2 / (2 ridge) above the minimum.
    """
    columns = zip(*(client.train for client in task.clients), strict=True)
    inputs, labels, positions = (torch.cat(column) for column in columns)
    inputs = inputs.flatten(1).double()
    batch = (inputs, labels, positions)
    x = {"weights": weights.double()}
    eigenvalues, basis = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    P = basis / (eigenvalues + 1000 * ridge).sqrt()
    A = torch.zeros(len(P), 10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [A], max_iter=400, tolerance_grad=1e-6, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.problem.lower(x, {"classifier": P @ A}, batch, KEY)
        loss.backward()
        return loss

    optimizer.step(closure)
    y = fb.Tree(classifier=(P @ A).detach())
    gradient = grad(task.problem.lower, argnums=1)(x, y, batch, KEY)
    assert float(dot(gradient, gradient)) / (2 * ridge) < 1e-4
    return float(task.evaluate(fb.Tree(weights=weights), y.map(Tensor.float))["test_accuracy"])


@pytest.mark.parametrize(
    ("options", "batch_size", "server_lrs", "least_auc", "least_recovered"),
    [
        ({"data": "digits"}, None, (300.0, 0.5, 0.2), 0.98, 0.8),
        pytest.param(
            {"data": "mnist", "samples": 3000},
            32,
            (3000.0, 0.05, 0.02),
            0.95,
            0.5,
            marks=needs("mnist"),
        ),
    ],
    ids=["digits", "mnist"],
)
def test_simfbo_finds_wrong_labels_and_recovers_accuracy(
    options: dict[str, Any],
    batch_size: int | None,
    server_lrs: tuple[float, float, float],
    least_auc: float,
    least_recovered: float,
) -> None:
    """40% of the labels are wrong.

    Observed: AUC .995 on digits and .972 on MNIST; 92% and 87% of the lost accuracy recovered.
    """
    rounds = 100
    task: Any = fb.tasks.load("hyper-cleaning", noise=0.4, ridge=1e-4, **options)
    lr_x, lr_y, lr_z = server_lrs
    method = fb.algorithms.SimFBO(server_lr_x=lr_x, server_lr_y=lr_y, server_lr_z=lr_z)
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=rounds,
        environment=fb.Environment(batch_size=batch_size),
        evaluate=task.evaluate,
        every=rounds,
    )
    assert result.history[0]["auc"] == 0.5
    assert result.history[-1]["auc"] >= least_auc
    assert result.history[-1]["f1"] >= 0.9
    noisy = pooled_accuracy(task, torch.full((len(task.corrupted),), 40.0), 1e-4)
    clean = pooled_accuracy(task, torch.where(task.corrupted, -40.0, 40.0), 1e-4)
    learnt = pooled_accuracy(task, result.x["weights"], 1e-4)
    assert clean - noisy > 0.1
    assert learnt - noisy >= least_recovered * (clean - noisy)


def test_weights_that_belong_to_the_clients_are_those_of_the_shared_vector() -> None:
    """One full-batch SimFBO step per round: x_i moves n times as fast, for its 1/n share."""
    options = {"clients": 3, "samples": 90, "noise": 0.4}
    shared = fb.tasks.load("hyper-cleaning", **options)
    owned = fb.tasks.load("hyper-cleaning", **options, owner="client")
    steps = {"lr_y": 0.5, "lr_z": 0.2, "server_lr_y": 0.5, "server_lr_z": 0.2}
    together = fb.algorithms.SimFBO(**steps, server_lr_x=30.0)
    apart = fb.algorithms.SimFBO(**steps, lr_x=10.0)
    expected = fb.solve(shared.problem, shared.clients, together, rounds=20)
    result = fb.solve(owned.problem, owned.clients, apart, rounds=20)
    torch.testing.assert_close(result.y["classifier"], expected.y["classifier"])
    vectors = expected.x["weights"].split(owned.sizes)
    for client, (vector, size) in enumerate(zip(vectors, owned.sizes, strict=True)):
        own = result.personal(client)[0]["weights"]
        torch.testing.assert_close(own[:size], vector)
        assert own[:size].abs().max() > 0.01
        metrics = owned.evaluate_client(*result.personal(client), client)
        assert metrics["auc"] > 0.5
    assert torch.equal(shared.corrupted, owned.corrupted)
    assert expected.history[-1]["bytes_up"] - result.history[-1]["bytes_up"] == 20 * 3 * 4 * 45


def test_bytes_do_not_depend_on_how_many_samples_clients_weigh() -> None:
    sent = []
    for samples in (60, 600):
        options = {"clients": 3, "samples": samples, "owner": "client"}
        task = fb.tasks.load("hyper-cleaning", **options)
        last = fb.solve(task.problem, task.clients, "simfbo", rounds=2).history[-1]
        sent.append((last["bytes_up"], last["bytes_down"]))
    assert sent[0] == sent[1]
