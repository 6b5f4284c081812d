"""FBO-AggITD: the estimate against closed forms, its errata, its rounds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import AggITD, FedNest, LFedNest, Phase
from fedbilevel.runs.run import Run
from tests.support.cases import neumann
from tests.support.conformance import iterate
from tests.support.estimators import (
    Y_STAYS,
    first_direction,
    load_quadratic,
    pooled_matrices,
)


def expected_direction(task: Any, method: AggITD) -> Tensor:
    """The mean of the first direction on x over all Q in {0 .. N}."""
    draws = range(method.inner_rounds + 1)
    return torch.stack([first_direction(task, method, [Q]) for Q in draws]).mean(0)


@pytest.mark.parametrize("N", [1, 2, 5])
def test_aggitd_has_the_expectation_of_the_truncated_sum(N: int) -> None:
    """Exactly: the mean of lambda (N+1) prod is lambda sum_{k <= N} (I - lambda H)^k v."""
    task = load_quadratic()
    A, B, _, e, t, _ = pooled_matrices(task)
    method = AggITD(**Y_STAYS, neumann_lr=0.6, inner_rounds=N)
    expected = -t + B.T @ neumann(A, -e, 0.6, N)
    torch.testing.assert_close(expected_direction(task, method), expected, rtol=0, atol=1e-8)


def test_aggitd_is_biased_on_one_cohort_and_not_on_everyone() -> None:
    """Over all cohorts of two and all Q: a mean of products is not the product of means."""
    task = load_quadratic(seed=1)
    N = 2
    lam = 0.6
    A, B, _, e, t, _ = pooled_matrices(task)
    method = AggITD(**Y_STAYS, neumann_lr=lam, inner_rounds=N)

    def mean_direction(cohorts: list[tuple[int, ...]]) -> Tensor:
        directions = []
        for cohort in cohorts:
            for Q in range(N + 1):
                directions.append(first_direction(task, method, [Q], list(cohort)))
        return torch.stack(directions).mean(0)

    indirect = B.T @ neumann(A, -e, lam, N)
    torch.testing.assert_close(mean_direction([(0, 1, 2, 3)]), -t + indirect, rtol=0, atol=1e-8)
    pairs = list(itertools.combinations(range(4), 2))
    assert (mean_direction(pairs) + t - indirect).norm() > indirect.norm()


def test_aggitd_as_printed_estimates_another_vector() -> None:
    """Without lambda in line 6 and with z^{N-1} in line 15 the expectation of p is

    lambda (I + sum_{k < N} (I - H)^k) v, which tends to lambda (I + H^-1) v and not to H^-1 v.
    """
    task = load_quadratic(condition=5.0)
    N = 12
    lam = 0.25
    A, B, _, e, t, _ = pooled_matrices(task)

    def indirect(printed: bool) -> Tensor:
        method = AggITD(**Y_STAYS, neumann_lr=lam, inner_rounds=N, printed=printed)
        return expected_direction(task, method) + t

    as_printed = lam * (-e + neumann(A, -e, 1.0, N - 1))
    true = B.T @ torch.linalg.solve(A, -e)
    torch.testing.assert_close(indirect(printed=True), B.T @ as_printed, rtol=0, atol=1e-8)
    assert (indirect(printed=True) - true).norm() > 0.5 * true.norm()
    assert (indirect(printed=False) - true).norm() < 0.2 * true.norm()


def test_aggitd_as_printed_diverges_where_the_curvature_exceeds_two() -> None:
    task = load_quadratic()
    steep = [fb.ClientData(train=(4 * c.train[0], *c.train[1:]), val=c.val) for c in task.clients]

    def size_of_p(printed: bool) -> float:
        steps = {"lr_x": 1e-9, "lr_y": 1e-9, "lower_steps": 1}
        method = AggITD(**steps, neumann_lr=0.2, inner_rounds=30, printed=printed)
        fed = fb.simulated_federation(task.problem, steep)
        sizes = []
        ask = fed.ask

        def spy(phase: Phase, clients: Any, **message: Any) -> Any:
            if "p" in message:
                sizes.append(float(message["p"]["y"].norm()))
            return ask(phase, clients, **message)

        fed.ask = spy  # type: ignore[method-assign]
        fed.draw = lambda count: 0  # type: ignore[method-assign]
        Run(method, fed, {}).advance()
        return sizes[0]

    assert size_of_p(printed=False) < 10
    assert size_of_p(printed=True) > 1e6


def test_aggitd_indirect_term_at_the_settings_of_table_2() -> None:
    """At lambda = .01 and N = 1 it is about 2% of the true one, in expectation at curvature 1."""
    task = load_quadratic(condition=1.0)
    A, B, _, e, t, _ = pooled_matrices(task)
    torch.testing.assert_close(A, torch.eye(4, dtype=torch.float64))
    method = AggITD(**Y_STAYS, neumann_lr=0.01, inner_rounds=1)
    indirect = expected_direction(task, method) + t
    share = indirect.norm() / (B.T @ -e).norm()
    assert float(share) == pytest.approx(0.0199, abs=1e-4)


@pytest.mark.parametrize("N", [1, 3])
def test_aggitd_costs_2n_plus_3_rounds_and_fednest_2t_plus_n_plus_3(N: int) -> None:
    task = load_quadratic()
    for seed in range(3):  # whatever Q is drawn
        aggitd = iterate(task, AggITD(inner_rounds=N, lower_steps=2), 4, seed=seed)
        assert aggitd.fed.ledger.rounds == 4 * (2 * N + 3)
    fednest = iterate(task, FedNest(inner_rounds=2, neumann_steps=N, lower_steps=2), 4)
    assert fednest.fed.ledger.rounds == 4 * (2 * 2 + N + 3)
    lfednest = iterate(task, LFedNest(inner_rounds=2, lower_steps=2), 4)
    assert lfednest.fed.ledger.rounds == 4 * (2 + 1)


@pytest.mark.parametrize("wrong", ["five epochs", "0 epochs", "5", "", 0, 1.5])
def test_wrong_local_steps_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="lower_steps is"):
        AggITD(lower_steps=wrong)
