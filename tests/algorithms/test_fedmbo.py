"""FedMBO: its chains are unbiased, and cost as many rounds as the longest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms import FedMBO
from fedbilevel.core.tree import flatten
from fedbilevel.federation import Federation
from fedbilevel.federation.task import Task
from fedbilevel.federation.transport import Arrived, Rejected, Report
from fedbilevel.runs.run import Run
from tests.support.cases import neumann
from tests.support.episodes import run as run_once
from tests.support.estimators import load_quadratic


@pytest.mark.parametrize("weights", ["uniform", [0.2, 0.8]])
def test_fedmbo_is_unbiased_over_all_its_draws(weights: Any) -> None:
    """One chain, N = 3, two clients: every length, and every choice of a client per factor."""
    task = load_quadratic(clients=2)
    lam = 0.6
    N = 3
    A, B, _, e, t, _ = task._means(weights)
    method = FedMBO(lr_x=0.1, lr_y=1e-12, neumann_lr=lam, neumann_steps=N)
    environment = fb.Environment(participation=1)
    fed = fb.simulated_federation(task.problem, task.clients, environment, weights=weights)
    start = method.init(task.problem)
    mean = torch.zeros(5, dtype=torch.float64)
    for length in range(N):
        # A client for v, one for each factor, and one for the last product.
        choices = list(itertools.product(range(2), repeat=length + 2))
        for clients in choices:
            draws = iter([length, *clients])
            fed.draw = lambda count, draws=draws: next(draws)  # type: ignore[method-assign, misc]
            direction = (start.x["x"] - method.iterate(start, fed).x["x"]) / 0.1
            mean += direction / (N * len(choices))
    expected = -t + B.T @ neumann(A, -e, lam, N - 1)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-9)


def test_fedmbo_is_unbiased_with_weights_that_are_not_uniform() -> None:
    """The mean of 250 draws of 4 chains is within 4.5 standard errors in each coordinate."""
    task = load_quadratic()
    lam = 0.6
    N = 4
    weights = [0.1, 0.2, 0.3, 0.4]
    A, B, _, e, t, _ = task._means(weights)
    indirect = B.T @ neumann(A, -e, lam, N - 1)
    method = FedMBO(lr_x=0.1, lr_y=1e-12, neumann_lr=lam, neumann_steps=N)
    fed = fb.simulated_federation(task.problem, task.clients, weights=weights)
    start = method.init(task.problem)
    directions = []
    for _ in range(250):
        directions.append((start.x["x"] - method.iterate(start, fed).x["x"]) / 0.1)
    sample = torch.stack(directions)
    error = sample.std(0) / 250**0.5
    assert ((sample.mean(0) - (-t + indirect)).abs() < 4.5 * error).all()
    assert (error < 0.2 * indirect.norm()).all(), "the test would accept anything"


def test_fedmbo_costs_its_longest_chain() -> None:
    task = load_quadratic()
    for seed in range(5):
        method = FedMBO(neumann_steps=4, inner_rounds=2)
        fed = fb.simulated_federation(task.problem, task.clients, seed=seed)
        twin = fb.simulated_federation(task.problem, task.clients, seed=seed)
        longest = max(twin.draw(4) for _ in range(4))
        Run(method, fed, {}).advance()
        assert fed.ledger.rounds == 2 + 1 + longest + 1


def test_a_product_that_is_lost_is_asked_of_another_client() -> None:
    """The estimate is that of a run without losses, in which the same clients have replied."""
    task = load_quadratic(clients=3)
    method = FedMBO(neumann_steps=3)
    start = method.init(task.problem)
    ends = []
    # The length of the chain, a client for its start, and one for each attempt at its two factors.
    for draws, lost in (([2, 0, 1, 2, 0, 1], (2, 4)), ([2, 0, 2, 1], ())):
        fed = fb.simulated_federation(task.problem, task.clients)
        drawn = iter(draws)
        fed.draw = lambda count, drawn=drawn: next(drawn)  # type: ignore[method-assign, misc]
        lose_rounds(fed, lost)
        ends.append(method.run_chains(*start, 1, fed))
        assert fed.ledger.rounds == 3 + len(lost)
        assert fed.ledger.refused_replies == len(lost)
        assert next(drawn, None) is None
    torch.testing.assert_close(flatten(ends[0][0]), flatten(ends[1][0]), rtol=0, atol=0)


def test_a_product_that_everybody_loses_ends_the_run() -> None:
    task = load_quadratic(clients=3)
    fed = fb.simulated_federation(task.problem, task.clients)
    lose_rounds(fed, range(3, 100))
    run = Run(FedMBO(neumann_steps=5), fed, {"rounds": 100})
    list(run)
    assert run.status == "diverged"
    assert run.reason == "a product of a chain was lost 20 times"


def lose_rounds(fed: Federation, rounds: Container[int]) -> None:
    """Let every reply of these rounds be refused."""
    receive = fed.transport.receive

    def lose(tasks: Sequence[Task] | None, limit: int) -> Iterator[Report]:
        for report in receive(tasks, limit):
            if isinstance(report, Arrived) and fed.ledger.rounds in rounds:
                for task in report.results.tasks:
                    yield Rejected(task.client, "it is a lie", task)
            else:
                yield report

    fed.transport.receive = lose  # type: ignore[method-assign]


def test_fedmbo_on_episodes_is_one_of_its_chains() -> None:
    """T = 2 steps on y from the shared start, then a chain of 0, 1 or 2 factors, equally likely."""
    task = fb.tasks.load("quadratic", clients=1, condition=3.0, seed=2)
    problem = dataclasses.replace(task.problem, lower_level="private")
    A, B, c, e, t, D = (part[0] for part in (*task.clients[0].train, *task.clients[0].val))
    y = torch.zeros_like(c)
    for _ in range(2):
        y = y - 0.4 * (A @ y - c)
    ends = []
    r = 0.5 * 3 * (y - e)
    for _ in range(3):
        ends.append(-0.1 * (-t + D.T @ y + B.T @ r))
        r = r - 0.5 * A @ r
    method = FedMBO(lr_x=0.1, lr_y=0.4, neumann_lr=0.5, neumann_steps=3, inner_rounds=2)
    lengths = set()
    for seed in range(12):
        after = run_once(problem, task.clients, method, seed=seed)
        torch.testing.assert_close(after.state.y["y"], y, rtol=0, atol=1e-12)
        distances = torch.stack([(after.state.x["x"] - end).norm() for end in ends])
        assert float(distances.min()) < 1e-12
        lengths.add(int(distances.argmin()))
        totals = after.fed.ledger.totals()
        assert totals["rounds"] == 1
        assert totals["gradients"] == 2 + 1 + 2 * 2 + 1 + 2
    assert lengths == {0, 1, 2}
