"""FedNest and LFedNest: the estimate against closed forms, the published code, local epochs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import FedNest
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.rng import uniform
from fedbilevel.core.tree import Tree, norm
from tests.support.cases import neumann
from tests.support.conformance import iterate
from tests.support.estimators import (
    Y_STAYS,
    first_direction,
    load_quadratic,
    pooled_matrices,
)


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_fednest_is_the_dense_hypergradient_truncated_at_n(steps: int, lr: float) -> None:
    task = load_quadratic()
    A, B, _, e, t, _ = pooled_matrices(task)
    method = FedNest(**Y_STAYS, neumann_lr=lr, neumann_steps=steps)
    expected = -t + B.T @ neumann(A, -e, lr, steps)
    torch.testing.assert_close(first_direction(task, method), expected, rtol=0, atol=1e-9)


def test_fednest_random_truncation_has_the_expectation_of_the_sum() -> None:
    """Over all N' in {0 .. N-1}, exactly: the mean of lambda N prod is lambda sum_{k < N}."""
    task = load_quadratic()
    N = 5
    random = FedNest(**Y_STAYS, neumann_lr=0.7, neumann_steps=N, truncation="random")
    mean = torch.stack([first_direction(task, random, [length]) for length in range(N)]).mean(0)
    deterministic = FedNest(**Y_STAYS, neumann_lr=0.7, neumann_steps=N - 1)
    torch.testing.assert_close(mean, first_direction(task, deterministic), rtol=0, atol=1e-9)


def test_fednest_is_unbiased_over_all_its_cohorts() -> None:
    """One client per cohort, N = 1: over every choice for h, for v and for the factor."""
    task = load_quadratic(clients=3)
    lam = 0.6
    A, B, _, e, t, _ = pooled_matrices(task)
    method = FedNest(**Y_STAYS, neumann_lr=lam, neumann_steps=1)
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(participation=1))
    start = method.init(task.problem)
    directions = []
    for choice in itertools.product(range(3), repeat=3):
        cohorts = iter([[0], *([client] for client in choice)])
        fed.sample = lambda cohorts=cohorts: next(cohorts)  # type: ignore[method-assign, misc]
        directions.append((start.x["x"] - method.iterate(start, fed).x["x"]) / 0.1)
    expected = -t + B.T @ neumann(A, -e, lam, 1)
    torch.testing.assert_close(torch.stack(directions).mean(0), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heterogeneity", [0.0, 1.0])
def test_fednest_reference_is_the_published_codes_formula(heterogeneity: float) -> None:
    """p = lr (v + sum_k (1/k) mean_i (I - lr H_i)^k v): no Neumann sum, even on equal clients."""
    task = load_quadratic(heterogeneity=heterogeneity)
    lr = 0.3
    N = 5
    _, B, _, e, t, _ = pooled_matrices(task)
    factors = torch.stack([torch.eye(4) - lr * client.train[0][0] for client in task.clients])
    p = -e
    for k in range(1, N + 1):
        p = p + torch.linalg.matrix_power(factors, k).mean(0) @ -e / k
    settings = {**Y_STAYS, "neumann_lr": lr, "neumann_steps": N}
    coded = first_direction(task, FedNest(**settings, compat="reference"))
    torch.testing.assert_close(coded, -t + B.T @ (lr * p), rtol=0, atol=1e-9)
    assert (coded - first_direction(task, FedNest(**settings))).norm() > 0.05


def lower_displacement(task: fb.tasks.Task, method: FedNest) -> tuple[Tree, Tree]:
    """The displacement of y in one lower round, and the q that corrects it."""
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(batch_size=16))
    x, y = task.problem.start
    q = fed.ask(LowerGradient(full=method.as_coded), [0, 1], x=x, y=y).mean("q")
    return fed.ask(method.lower_round(), [0, 1], x=x, y=y, q=q).mean("dy"), q


def test_the_published_code_draws_two_dropout_masks() -> None:
    """Where y hardly moves, a step is along q plus the difference of the gradients' masks.

    With one mask for both gradients that difference is nothing, with two it is noise.
    """
    task = fb.tasks.load("hyper-representation", data="digits", clients=2, hidden=16, dropout=0.5)
    settings = {"lr_y": 1e-3, "lower_steps": 4, "upper_steps": 1}
    ours, q = lower_displacement(task, FedNest(**settings))
    coded, q_coded = lower_displacement(task, FedNest(**settings, compat="reference"))
    assert 20 * norm(ours + 4e-3 * q) < norm(coded + 4e-3 * q_coded)


def noisy_lower(x: Tree, y: Tree, batch: Any, rng: Tensor) -> Tensor:
    """A lower level whose curvature 1 + u is drawn, u uniform on [0, 1)."""
    return 0.5 * (1 + uniform(rng, (), torch.float64)) * (y["y"] - x["x"]).square().sum()


def test_the_published_code_has_one_mask_for_all_factors() -> None:
    """With one curvature h_i per client, p = lr (v + sum_k (1/k) mean_i (1 - lr h_i)^k v)."""
    one = torch.ones(1, dtype=torch.float64)
    problem = fb.Problem(
        upper=lambda x, y, batch: y["y"].sum(), lower=noisy_lower, x={"x": one}, y={"y": one}
    )
    data = fb.ClientData((one,), (one,))
    x, y = problem.start
    lr = 0.4

    def estimate(steps: int, clients: list[int]) -> float:
        fed = fb.simulated_federation(problem, [data, data])
        method = FedNest(neumann_lr=lr, neumann_steps=steps, compat="reference")
        return float(method.reference_ihgp(x, y, Tree(y=one), clients, fed)["y"])

    def factor(clients: list[int]) -> float:
        return estimate(1, clients) / lr - 1

    first = factor([0])
    second = 2 * factor([0, 1]) - first
    assert 0.2 < min(first, second) < max(first, second) <= 0.6
    assert abs(first - second) > 1e-3, "two clients draw two masks"
    expected = lr * (1 + sum((first**k + second**k) / 2 / k for k in range(1, 5)))
    assert estimate(4, [0, 1]) == pytest.approx(expected, rel=1e-12)


def test_local_epochs_pass_over_the_data_once_each() -> None:
    task = load_quadratic(clients=2, samples=10, noise=1.0)
    method = FedNest(lower_steps="3 epochs", lower="sgd", upper_steps=1)
    run = iterate(task, method, 1, environment={"batch_size": 4})
    cost = run.fed.ledger.phases["lower_round"]
    assert cost.samples == 2 * 3 * 10
    assert cost.gradients == 2 * 3 * 3  # batches of 4, 4 and 2 samples
