"""FedNest and FBO-AggITD: their estimators against closed forms, their errata, their counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm, Phase
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.tree import norm
from fedbilevel.runs.run import Run


def task(**options: Any) -> Any:
    return fb.tasks.load("quadratic", **{"clients": 4, "condition": 3.0, "seed": 6} | options)


def run(of: Any, algorithm: Algorithm, iterations: int = 1, **environment: Any) -> Run:
    fed = fb.simulated_federation(of.problem, of.clients, fb.Environment(**environment))
    here = Run(algorithm, fed, {})
    for _ in range(iterations):
        here.advance()
    return here


def means(of: Any) -> list[Tensor]:
    return of._means("uniform")  # type: ignore[no-any-return]


def step_on_x(
    of: Any, algorithm: Algorithm, draws: list[int] | None = None, cohort: list[int] | None = None
) -> Tensor:
    """The direction of the first step on x, from a start where y does not move (lr_y is tiny)."""
    fed = fb.simulated_federation(of.problem, of.clients)
    if draws is not None:
        fed.draw = lambda count: draws.pop(0)  # type: ignore[method-assign]
    if cohort is not None:
        fed.sample = lambda: cohort  # type: ignore[method-assign]
    here = Run(algorithm, fed, {})
    here.advance()
    return (of.problem.x["x"] - here.state.x["x"]) / algorithm.lr_x  # type: ignore[attr-defined, no-any-return]


SMALL = {"lr_x": 0.1, "lr_y": 1e-12, "lower_steps": 1, "upper_steps": 1}


def test_the_published_code_draws_two_dropout_masks() -> None:
    """Where y hardly moves the correction is q plus the difference of two masks: nothing with one, noise with two."""
    of = fb.tasks.load("hyper-representation", data="digits", clients=2, hidden=16, dropout=0.5)
    moved = {}
    for compat in (None, "reference"):
        method = fb.algorithms.FedNest(lr_y=1e-3, lower_steps=4, upper_steps=1, compat=compat)  # type: ignore[arg-type]
        fed = fb.simulated_federation(of.problem, of.clients, fb.Environment(batch_size=16))
        x, y = of.problem.start
        q = fed.ask(LowerGradient(full=method.as_coded), [0, 1], x=x, y=y).mean("q")
        moved[compat] = fed.ask(method.lower_round(), [0, 1], x=x, y=y, q=q).mean("dy") + 4e-3 * q
    assert 20 * norm(moved[None]) < norm(moved["reference"])


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("lr", [0.3, 1.0])
def test_fednest_is_the_dense_hypergradient_truncated_at_n(steps: int, lr: float) -> None:
    of = task()
    A, B, _, e, t, _ = means(of)
    p = lr * sum(torch.linalg.matrix_power(torch.eye(4) - lr * A, k) @ -e for k in range(steps + 1))
    found = step_on_x(of, fb.algorithms.FedNest(**SMALL, neumann_lr=lr, neumann_steps=steps))
    torch.testing.assert_close(found, -t + B.T @ p, rtol=0, atol=1e-9)


def test_fednest_random_truncation_has_the_expectation_of_the_sum() -> None:
    """Over all N' in {0 .. N-1}, exactly: lambda N prod has the mean lambda sum_{k < N}."""
    of, N = task(), 5
    method = fb.algorithms.FedNest(**SMALL, neumann_lr=0.7, neumann_steps=N, truncation="random")
    mean = torch.stack([step_on_x(of, method, [n]) for n in range(N)]).mean(0)
    deterministic = step_on_x(
        of, fb.algorithms.FedNest(**SMALL, neumann_lr=0.7, neumann_steps=N - 1)
    )
    torch.testing.assert_close(mean, deterministic, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heterogeneity", [0.0, 1.0])
def test_fednest_reference_is_the_published_codes_formula(heterogeneity: float) -> None:
    """p = lr (v + sum_k (1/k) mean_i (I - lr H_i)^k v): not the Neumann sum even where all clients are alike."""
    of, lr, N = task(heterogeneity=heterogeneity), 0.3, 5
    _, B, _, e, t, _ = means(of)
    local = [client.train[0][0] for client in of.clients]
    powers = [
        torch.stack([torch.linalg.matrix_power(torch.eye(4) - lr * A, k) for A in local]).mean(0)
        for k in range(N + 1)
    ]
    p = lr * (-e + sum(powers[k] @ -e / k for k in range(1, N + 1)))
    options = {**SMALL, "neumann_lr": lr, "neumann_steps": N}
    found = step_on_x(of, fb.algorithms.FedNest(**options, compat="reference"))
    torch.testing.assert_close(found, -t + B.T @ p, rtol=0, atol=1e-9)
    assert (found - step_on_x(of, fb.algorithms.FedNest(**options))).norm() > 0.05


@pytest.mark.parametrize("N", [1, 2, 5])
def test_aggitd_has_the_expectation_of_the_truncated_sum(N: int) -> None:
    """Over all Q in {0 .. N}, exactly: the mean of lambda (N+1) prod is lambda sum_{k <= N} (I - lambda H)^k v."""
    of = task()
    A, B, _, e, t, _ = means(of)
    method = fb.algorithms.AggITD(**SMALL, neumann_lr=0.6, inner_rounds=N)
    mean = torch.stack([step_on_x(of, method, [q]) for q in range(N + 1)]).mean(0)
    p = 0.6 * sum(torch.linalg.matrix_power(torch.eye(4) - 0.6 * A, k) @ -e for k in range(N + 1))
    torch.testing.assert_close(mean, -t + B.T @ p, rtol=0, atol=1e-8)


def test_aggitd_as_printed_estimates_another_vector() -> None:
    """Errata 1 and 2: without lambda in line 6 and with z^{N-1} in line 15 the expectation is
    lambda (I + sum_{k < N} (I - H)^k) v, which tends to lambda (I + H^-1) v and not to H^-1 v."""
    of, N, lam = task(condition=5.0), 12, 0.25
    A, B, _, e, t, _ = means(of)

    def indirect(**options: Any) -> Tensor:
        method = fb.algorithms.AggITD(**SMALL, neumann_lr=lam, inner_rounds=N, **options)
        return torch.stack([step_on_x(of, method, [q]) for q in range(N + 1)]).mean(0) + t

    eye, true = torch.eye(4, dtype=torch.float64), B.T @ torch.linalg.solve(A, -e)
    as_printed = lam * (eye + sum(torch.linalg.matrix_power(eye - A, k) for k in range(N))) @ -e
    printed = indirect(printed=True)
    torch.testing.assert_close(printed, B.T @ as_printed, rtol=0, atol=1e-8)
    assert (printed - true).norm() > 0.5 * true.norm()
    assert (indirect() - true).norm() < 0.2 * true.norm()


def test_aggitd_as_printed_diverges_where_the_curvature_exceeds_two() -> None:
    of = task()
    steep = [fb.ClientData(train=(4 * c.train[0], *c.train[1:]), val=c.val) for c in of.clients]

    def size_of_p(printed: bool) -> float:
        steps = {"lr_x": 1e-9, "lr_y": 1e-9, "lower_steps": 1}
        method = fb.algorithms.AggITD(**steps, neumann_lr=0.2, inner_rounds=30, printed=printed)
        fed = fb.simulated_federation(of.problem, steep)
        sent, ask = [], fed.ask

        def spy(phase: Phase, clients: Any, **message: Any) -> Any:
            sent.extend([message["p"]["y"].norm()] if "p" in message else [])
            return ask(phase, clients, **message)

        fed.ask, fed.draw = spy, lambda count: 0  # type: ignore[method-assign]
        Run(method, fed, {}).advance()
        return float(sent[0])

    assert size_of_p(printed=False) < 10
    assert size_of_p(printed=True) > 1e6


@pytest.mark.parametrize("N", [1, 3])
def test_aggitd_costs_2n_plus_3_rounds_and_fednest_2t_plus_n_plus_3(N: int) -> None:
    of = task()
    for _ in range(3):
        here = run(of, fb.algorithms.AggITD(inner_rounds=N, lower_steps=2), iterations=4)
        assert here.fed.ledger.rounds == 4 * (2 * N + 3)
    here = run(
        of, fb.algorithms.FedNest(inner_rounds=2, neumann_steps=N, lower_steps=2), iterations=4
    )
    assert here.fed.ledger.rounds == 4 * (2 * 2 + N + 3)
    here = run(of, fb.algorithms.LFedNest(inner_rounds=2, lower_steps=2), iterations=4)
    assert here.fed.ledger.rounds == 4 * (2 + 1)


def test_aggitd_indirect_term_at_the_settings_of_table_2() -> None:
    """At lambda = .01 and N = 1 the expected indirect term is about 2% of the true one at curvature 1."""
    of = task(condition=1.0)
    A, B, _, e, t, _ = means(of)
    torch.testing.assert_close(A, torch.eye(4, dtype=torch.float64))
    method = fb.algorithms.AggITD(**SMALL, neumann_lr=0.01, inner_rounds=1)
    indirect = torch.stack([step_on_x(of, method, [q]) for q in (0, 1)]).mean(0) + t
    share = indirect.norm() / (B.T @ -e).norm()
    assert float(share) == pytest.approx(0.0199, abs=1e-4)


def test_local_epochs_pass_over_the_data_once_each() -> None:
    of = task(clients=2, samples=10, noise=1.0)
    here = run(
        of, fb.algorithms.FedNest(lower_steps="3 epochs", lower="sgd", upper_steps=1), batch_size=4
    )
    cost = here.fed.ledger.phases["lower_round"]
    assert cost.samples == 2 * 3 * 10
    assert cost.gradients == 2 * 3 * 3  # batches of 4, 4 and 2


@pytest.mark.parametrize("wrong", ["five epochs", "0 epochs", "5", "", 0, 1.5])
def test_wrong_local_steps_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="lower_steps is"):
        fb.algorithms.AggITD(lower_steps=wrong)


def test_fedmbo_is_unbiased_with_weights_that_are_not_uniform() -> None:
    """Mean of 250 draws of 4 chains against the dense truncated sum, within 4.5 standard errors in each coordinate."""
    of, lam, N, weights = task(), 0.6, 4, [0.1, 0.2, 0.3, 0.4]
    A, B, _, e, t, _ = of._means(weights)
    p = lam * sum(torch.linalg.matrix_power(torch.eye(4) - lam * A, k) @ -e for k in range(N))
    method = fb.algorithms.FedMBO(lr_x=0.1, lr_y=1e-12, neumann_lr=lam, neumann_steps=N)
    fed = fb.simulated_federation(of.problem, of.clients, weights=weights)
    start = method.init(of.problem)
    found = torch.stack(
        [(start.x["x"] - method.iterate(start, fed).x["x"]) / 0.1 for _ in range(250)]
    )
    error = found.std(0) / 250**0.5
    assert ((found.mean(0) - (-t + B.T @ p)).abs() < 4.5 * error).all()
    assert (error < 0.2 * (B.T @ p).norm()).all(), "the test would accept anything"


def test_fedmbo_costs_its_longest_chain() -> None:
    of = task()
    for seed in range(5):
        method = fb.algorithms.FedMBO(neumann_steps=4, inner_rounds=2)
        fed = fb.simulated_federation(of.problem, of.clients, seed=seed)
        twin = fb.simulated_federation(of.problem, of.clients, seed=seed)
        longest = max(twin.draw(4) for _ in range(4))
        Run(method, fed, {}).advance()
        assert fed.ledger.rounds == 2 + 1 + longest + 1


def test_local_random_truncation_has_the_expectation_of_the_sum() -> None:
    """LocalBSGM's momentum over 50 like clients, 25 times, within 4.5 standard errors of that with the sum."""
    of = task(clients=50, heterogeneity=0.0)
    options = {
        "lr_x": 1e-9,
        "lr_y": 1e-9,
        "neumann_lr": 0.8,
        "neumann_steps": 4,
        "momentum_weight": 1.0,
    }
    exact = run(of, fb.algorithms.LocalBSGM(**options, truncation="sum")).state.u["x"]
    method = fb.algorithms.LocalBSGM(**options)
    fed = fb.simulated_federation(of.problem, of.clients)
    start = method.init(of.problem)
    found = torch.stack([method.iterate(start, fed).u["x"] for _ in range(25)])
    error = found.std(0) / 25**0.5
    assert ((found.mean(0) - exact).abs() < 4.5 * error + 1e-7).all()
    assert (error > 1e-6).all()
    assert (error < 0.1 * exact.norm()).all()
