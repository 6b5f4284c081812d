"""Regularization: its lower loss by hand, and coefficients that lower the validation loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.hypergradient import phi
from tests.support.convex_tasks import (
    KEY,
    check_hypergradient,
    check_strong_convexity,
    load_in_double,
)


def test_the_lower_loss_by_hand() -> None:
    problem, clients = load_in_double("regularization", ridge=0.1)
    x, y = problem.start
    batch: Any = clients[0].train
    inputs, labels = batch
    probabilities = (inputs @ y["weight"] + y["bias"]).softmax(1)
    loss = -probabilities[torch.arange(len(labels)), labels].log().mean()
    coefficients = (1 + x["coefficients"].exp()).log() + 0.1
    penalty = (coefficients[:, None] * y["weight"] ** 2).sum() + 0.1 * (y["bias"] ** 2).sum()
    torch.testing.assert_close(problem.lower(x, y, batch, KEY), loss + penalty / 2)


def test_the_lower_level_is_strongly_convex_whatever_x() -> None:
    check_strong_convexity("regularization")


def test_the_hypergradient_is_the_gradient_of_the_objective() -> None:
    check_hypergradient("regularization")


@pytest.mark.parametrize(
    ("ridge", "message"),
    [(-1.0, "ridge is -1.0; it must"), (0, "ridge is 0; it must be above 0")],
)
def test_a_ridge_that_is_not_positive_is_refused(ridge: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("regularization", data="breast-cancer", ridge=ridge)


def test_simfbo_learns_coefficients_that_lower_the_validation_loss() -> None:
    """Observed: Phi falls from .24 to .11, the test loss from .24 to .10."""
    task: Any = fb.tasks.load("regularization", clients=6)
    method = fb.algorithms.SimFBO(server_lr_x=10.0, server_lr_y=0.2, server_lr_z=0.1)
    result = fb.solve(
        task.problem, task.clients, method, rounds=200, evaluate=task.evaluate, every=200
    )
    x_start, _ = task.problem.start
    before = float(phi(task.problem, task.clients, x_start))
    after = float(phi(task.problem, task.clients, result.x))
    assert after < 0.6 * before
    assert result.history[-1]["test_accuracy"] > 0.93
    y_start = fb.solve_lower(task.problem, task.clients, x_start)
    test_loss = task.evaluate(x_start, y_start)["test_loss"]
    assert result.history[-1]["test_loss"] < 0.6 * test_loss
