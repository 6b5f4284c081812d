"""FBO-AggITD: the estimate against closed forms, its errata, its rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import AggITD, FedNest, LFedNest, Phase
from fedbilevel.algorithms.aggitd import GradientAndProduct
from fedbilevel.core.oracle import Oracle
from fedbilevel.runs.run import Run
from tests.support.cases import client_means, hypergradient, neumann, start_xy, upper_gradient_y
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


TAU = [1, 3, 5, 2]
LR_X = 0.1
LR_Y = 0.3
LAMBDA = 0.5


def algorithms_1_to_4(
    task: Any, Q: int, N: int, svrg: bool, per_client: bool, iterations: int = 3
) -> tuple[Tensor, Tensor]:
    """x and y after iterations of Algorithms 1 to 4 with everyone, lambda in line 6, z^N in 15.

    The steps are LR_X and LR_Y, or these divided by tau_i.
    """
    parts = client_means(task)
    scales = [1 / tau if per_client else 1.0 for tau in TAU]
    x, y = start_xy(parts[0])
    H = torch.stack([m[0] for m in parts]).mean(0)
    for _ in range(iterations):
        z = torch.zeros_like(y)
        for t in range(N + 1):
            slopes = [m[0] @ y - m[1] @ x - m[2] for m in parts]
            q = torch.stack(slopes).mean(0)
            if t == Q:
                z = torch.stack([upper_gradient_y(m, x, y) for m in parts]).mean(0)
            elif t > Q:
                z = z - LAMBDA * H @ z
            if t == N:
                break
            ends = []
            for m, slope, tau, scale in zip(parts, slopes, TAU, scales, strict=True):
                y_i = y
                for _ in range(tau):
                    d = m[0] @ y_i - m[1] @ x - m[2]
                    y_i = y_i - scale * LR_Y * (d - slope + q if svrg else d)
                ends.append(y_i)
            y = torch.stack(ends).mean(0)
        p = LAMBDA * (N + 1) * z
        h = torch.stack([hypergradient(m, x, y, p) for m in parts]).mean(0)
        ends = []
        for tau, scale in zip(TAU, scales, strict=True):
            x_i = x
            for _ in range(tau):
                x_i = x_i - scale * LR_X * (h + x_i - x)  # grad_x f_i has the slope 1 in x
            ends.append(x_i)
        x = torch.stack(ends).mean(0)
    return x, y


def run_with(task: Any, Q: int, iterations: int = 3, **settings: Any) -> Run:
    """A run with unequal local steps in both rounds, in which Q is always drawn."""
    method = AggITD(lr_x=LR_X, lr_y=LR_Y, neumann_lr=LAMBDA, lower_steps=None, **settings)
    environment = fb.Environment(local_steps=TAU)
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    fed.draw = lambda count: Q  # type: ignore[method-assign]
    run = Run(method, fed, {})
    for _ in range(iterations):
        run.advance()
    return run


@pytest.mark.parametrize("lower", ["svrg", "sgd"])
@pytest.mark.parametrize("scale", ["same", "per-client"])
@pytest.mark.parametrize(("N", "Q"), [(1, 0), (1, 1), (3, 1)])
def test_aggitd_is_algorithms_1_to_4_also_with_steps_divided_by_tau(
    N: int, Q: int, scale: str, lower: str
) -> None:
    task = load_quadratic()
    state = run_with(task, Q, inner_rounds=N, lower=lower, step_scale=scale).state
    per_client = scale == "per-client"
    x, y = algorithms_1_to_4(task, Q, N, lower == "svrg", per_client)
    torch.testing.assert_close(state.x["x"], x, rtol=0, atol=1e-13)
    torch.testing.assert_close(state.y["y"], y, rtol=0, atol=1e-13)
    other_x, other_y = algorithms_1_to_4(task, Q, N, lower == "svrg", not per_client)
    assert (other_x - x).norm() > 1e-2
    assert (other_y - y).norm() > 1e-2


def test_the_sgd_type_asks_for_no_gradient_that_nobody_uses() -> None:
    """2N + 3 - Q rounds: at N = 1 they are 5 and 4, 4.5 on average over Q."""
    task = load_quadratic()

    def phases(lower: str, N: int, Q: int) -> dict[str, int]:
        ledger = run_with(task, Q, iterations=1, inner_rounds=N, lower=lower).fed.ledger
        counts = {name: costs.rounds for name, costs in ledger.phases.items()}
        assert ledger.rounds == sum(counts.values())
        return counts

    for N in (1, 3):
        for Q in range(N + 1):
            sgd = phases("sgd", N, Q)
            assert sum(sgd.values()) == 2 * N + 3 - Q
            assert set(sgd) <= {"start", "product", "lower_round", "hypergradient", "upper_round"}
            assert sum(phases("svrg", N, Q).values()) == 2 * N + 3
    assert sum(sum(phases("sgd", 1, Q).values()) for Q in (0, 1)) / 2 == 4.5


def test_q_and_the_product_have_batches_of_their_own_on_request() -> None:
    """Over all pairs of samples q and H v are uncorrelated; on one batch they are not."""
    task = load_quadratic(clients=5)  # their data are the samples
    x, y = task.problem.start
    y = y + fb.Tree(y=torch.ones_like(y["y"]))
    v = fb.Tree(y=torch.arange(4, dtype=torch.float64))
    batches = [fb.Batch(train=client.train) for client in task.clients]

    def product_of_mean(phase: GradientAndProduct, draws: list[Any]) -> tuple[Tensor, Tensor]:
        """The mean of q (H v)' over the draws, and the product of the means."""
        replies = [phase.step({"x": x, "y": y, "v": v}, Oracle(task.problem), b) for b in draws]
        q = torch.stack([reply["q"]["y"] for reply in replies])
        hv = torch.stack([reply["hv"]["y"] for reply in replies])
        return q.T @ hv / len(draws), torch.outer(q.mean(0), hv.mean(0))

    apart = GradientAndProduct(independent_batches=True)
    assert (apart.draws, GradientAndProduct().draws) == (2, 1)
    mean, product = product_of_mean(apart, list(itertools.product(batches, batches)))
    torch.testing.assert_close(mean, product, rtol=0, atol=1e-13)
    mean, product = product_of_mean(GradientAndProduct(), batches)
    assert (mean - product).norm() > 0.1

    (A, B, c), (A2, _, _) = ([part.mean(0) for part in b.train] for b in batches[:2])
    message = {"x": x, "y": y, "v": v}
    reply = apart.step(message, Oracle(task.problem), (batches[0], batches[1]))
    torch.testing.assert_close(reply["q"]["y"], A @ y["y"] - B @ x["x"] - c)
    torch.testing.assert_close(reply["hv"]["y"], A2 @ v["y"])


def test_independent_batches_cost_one_gradient_more_per_product_and_agree_on_full_batches() -> None:
    task = load_quadratic()
    together, apart = (
        run_with(task, Q=0, iterations=1, inner_rounds=3, independent_batches=independent)
        for independent in (False, True)
    )
    torch.testing.assert_close(together.state.x, apart.state.x, rtol=0, atol=1e-13)
    torch.testing.assert_close(together.state.y, apart.state.y, rtol=0, atol=1e-13)
    more = apart.fed.ledger.totals()["gradients"] - together.fed.ledger.totals()["gradients"]
    assert more == 2 * len(TAU)  # t = 1 and 2; at t = N the product is alone


@pytest.mark.parametrize(
    ("upper_steps", "batch_size", "steps"),
    [("1 epochs", 4, 2), ("2 epochs", 4, 4), ("1 epoch", None, 1), (3, 4, 3)],
)
def test_the_upper_round_may_be_counted_in_epochs(
    upper_steps: Any, batch_size: int | None, steps: int
) -> None:
    """Six validation samples and ten for training: an epoch on x in batches of 4 is two steps."""
    task = load_quadratic(samples=10, noise=0.1)
    clients = [
        fb.ClientData(train=client.train, val=tuple(tensor[:6] for tensor in client.val))
        for client in task.clients
    ]
    task = replace(task, clients=clients)
    method = AggITD(lower_steps=1, upper_steps=upper_steps)
    ledger = iterate(task, method, 1, environment={"batch_size": batch_size}).fed.ledger
    assert ledger.phases["upper_round"].gradients == 4 * 2 * (steps - 1)


@pytest.mark.parametrize("wrong", ["five epochs", "0 epochs", "5", "", 0, 1.5])
def test_wrong_local_steps_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="lower_steps is"):
        AggITD(lower_steps=wrong)
