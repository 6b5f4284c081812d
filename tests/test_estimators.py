"""Randomised estimators of the hypergradient against dense linear algebra: exactly, over everything they may draw.

Elsewhere: FedNest's random truncation, AggITD's Q and FedMBO by sampling in test_nested.py; the bias of the methods
that average local hypergradients, and that like clients take it away, in conformance.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import shared as rounds
from fedbilevel.runs.run import Run

from .test_nested import SMALL, means, step_on_x, task


def neumann(A: Tensor, v: Tensor, lr: float, terms: int) -> Tensor:
    return lr * sum(torch.linalg.matrix_power(torch.eye(4) - lr * A, k) @ v for k in range(terms))  # type: ignore[no-any-return]


@pytest.mark.parametrize("weights", ["uniform", [0.2, 0.8]])
def test_fedmbo_is_unbiased_over_all_its_draws(weights: Any) -> None:
    """One chain, N = 3, two clients: every length, and every choice of a client for every factor."""
    of, lam, N = task(clients=2), 0.6, 3
    A, B, _, e, t, _ = of._means(weights)
    method = fb.algorithms.FedMBO(lr_x=0.1, lr_y=1e-12, neumann_lr=lam, neumann_steps=N)
    fed = fb.simulated_federation(
        of.problem, of.clients, fb.Environment(participation=1), weights=weights
    )
    start, expected = method.init(of.problem), torch.zeros(5, dtype=torch.float64)
    for length in range(N):
        choices = list(
            itertools.product(range(2), repeat=length + 2)
        )  # v, the factors, the last product
        for clients in choices:
            draws = [length, *clients]
            fed.draw = lambda count, draws=draws: draws.pop(0)  # type: ignore[method-assign, misc]
            expected += (start.x["x"] - method.iterate(start, fed).x["x"]) / (
                0.1 * N * len(choices)
            )
    torch.testing.assert_close(expected, -t + B.T @ neumann(A, -e, lam, N), rtol=0, atol=1e-9)


def test_fednest_is_unbiased_over_all_its_cohorts() -> None:
    """One client a cohort, N = 1: every choice for h, for v and for the factor."""
    of, lam = task(clients=3), 0.6
    A, B, _, e, t, _ = means(of)
    method = fb.algorithms.FedNest(**SMALL, neumann_lr=lam, neumann_steps=1)
    fed = fb.simulated_federation(of.problem, of.clients, fb.Environment(participation=1))
    start, steps = method.init(of.problem), []
    for chosen in itertools.product(range(3), repeat=3):
        cohorts = [[0], *([client] for client in chosen)]
        fed.sample = lambda cohorts=cohorts: cohorts.pop(0)  # type: ignore[method-assign, misc]
        steps.append((start.x["x"] - method.iterate(start, fed).x["x"]) / 0.1)
    torch.testing.assert_close(
        torch.stack(steps).mean(0), -t + B.T @ neumann(A, -e, lam, 2), rtol=0, atol=1e-9
    )


def test_aggitd_is_biased_on_one_cohort_and_not_on_everyone() -> None:
    """Over all cohorts of two and all Q: one cohort serves all factors, but a mean of products is not their product."""
    of, N, lam = task(seed=1), 2, 0.6
    A, B, _, e, t, _ = means(of)
    method = fb.algorithms.AggITD(**SMALL, neumann_lr=lam, inner_rounds=N)

    def mean(cohorts: list[tuple[int, ...]]) -> Tensor:
        return torch.stack(
            [step_on_x(of, method, [q], list(c)) for c in cohorts for q in range(N + 1)]
        ).mean(0)

    indirect = B.T @ neumann(A, -e, lam, N + 1)
    torch.testing.assert_close(mean([(0, 1, 2, 3)]), -t + indirect, rtol=0, atol=1e-8)
    assert (mean(list(itertools.combinations(range(4), 2))) + t - indirect).norm() > indirect.norm()


LOCAL = {
    "lr_x": 1e-12,
    "lr_y": 1e-12,
    "neumann_lr": 0.8,
    "neumann_steps": 4,
    "truncation": "random",
}


@pytest.mark.parametrize("name", ["localbsgm", "localbsgvr", "adafbio"])
def test_local_truncation_is_unbiased_over_all_lengths(name: str, monkeypatch: Any) -> None:
    """On one client: its own Hessian is the global one."""
    of = task(clients=1)
    A, B, _, e, t, _ = means(of)
    method = fb.algorithms.get(name)(**LOCAL)
    fed = fb.simulated_federation(of.problem, of.clients)
    x, y = of.problem.start
    found = []
    for length in range(4):
        monkeypatch.setattr(
            rounds, "integers", lambda key, low, high, length=length: torch.tensor(length)
        )
        found.append(fed.ask(method.begin(), [0], x=x, y=y).mean("u")["x"])
    torch.testing.assert_close(
        torch.stack(found).mean(0), -t + B.T @ neumann(A, -e, 0.8, 4), rtol=0, atol=1e-12
    )
    assert (found[0] - found[3]).norm() > 0.1


@pytest.mark.parametrize("name", ["localbsgvr", "adafbio"])
def test_variance_reduction_shares_the_truncation(name: str) -> None:
    """Where x and y stay and the old momentum has all the weight, d(new) - d(old) is nothing: both have one length."""
    of = task()
    method = fb.algorithms.get(name)(**LOCAL, momentum_weight=1e-9)
    fed = fb.simulated_federation(of.problem, of.clients, fb.Environment(local_steps=5))
    run = Run(method, fed, {})
    run.advance()
    first = run.state.u["x"]
    run.advance()
    torch.testing.assert_close(run.state.u["x"], first, rtol=0, atol=1e-7)
