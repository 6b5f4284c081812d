"""Replies that are many times longer than the others are refused, on every transport."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.core.tree import flatten, norm
from fedbilevel.federation import Federation
from fedbilevel.federation.screening import RunningMedian, Screen, Strikes, stack_norms
from fedbilevel.runs.run import Run
from tests.support.cases import CASES
from tests.support.conformance import NAMES
from tests.support.lies import let_lie, scaled

SHARED = [
    name
    for name in NAMES
    if "shared" in algorithms.get(name).lower_levels and algorithms.get(name).has_server
]


def quadratic() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=5, samples=4, noise=0.3)


def run_of(name: str, task: fb.tasks.Task, **environment: Any) -> Run:
    conditions = fb.Environment(batch_size=2, **environment)
    fed = fb.simulated_federation(task.problem, task.clients, conditions)
    return Run(algorithms.get(name)(**CASES[name].settings), fed, {"rounds": 40})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_fewer_than_half_of_the_clients_cannot_raise_the_bound_above_the_honest_numbers(
    data: st.DataObject,
) -> None:
    median = RunningMedian()
    honest_so_far: list[float] = []
    for _ in range(data.draw(st.integers(1, 6), "rounds")):
        honest = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=6), "honest")
        lies = data.draw(st.lists(st.floats(1e-300, 1e300), max_size=len(honest) - 1), "lies")
        together = data.draw(st.permutations(honest + lies), "order")
        honest_so_far += honest
        bound = median.bound(together, factor=10.0)
        assert bound <= 10.0 * max(honest_so_far)
        median.enter([number for number in together if number <= bound])


def test_the_bound_follows_what_grows_and_does_not_fall() -> None:
    median = RunningMedian()
    median.enter([1.0, 1.0, 2.0])
    assert median.bound([1000.0], factor=10.0) == 10.0
    assert median.bound([1000.0, 1500.0, 2000.0], factor=10.0) == 15000.0
    median.enter([0.1] * 200)
    assert median.bound([], factor=10.0) == 10.0


def test_zeros_and_what_is_not_finite_do_not_count() -> None:
    median = RunningMedian()
    median.enter([0.0, 0.0, float("nan"), float("inf"), 1.0, 2.0])
    assert median.recent == [1.0, 2.0]
    assert median.bound([0.0, 0.0, 0.0, 5.0], factor=10.0) == float("inf")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e300, 1e300), min_size=3, max_size=3), min_size=1, max_size=4))
def test_norms_are_those_of_each_client_without_overflow(rows: list[list[float]]) -> None:
    stack = torch.tensor(rows, dtype=torch.float64)
    tree = fb.Tree(a=stack[:, :1], b=stack[:, 1:].reshape(-1, 2, 1))
    for row, found in zip(rows, stack_norms(tree), strict=True):
        largest = max(abs(entry) for entry in row)
        assume(largest < 1e300)
        expected = 0.0
        if largest:
            expected = largest * sum((entry / largest) ** 2 for entry in row) ** 0.5
        assert found == pytest.approx(expected, rel=1e-12)
    assert stack_norms(torch.tensor([1, 2])) == []


def test_a_reply_is_judged_by_each_of_its_values() -> None:
    screen = Screen(factor=10.0)
    screen.judge("descend", {"dx": [1.0, 2.0, 3.0], "dy": [10.0, 20.0, 30.0]})
    reasons = screen.judge("descend", {"dx": [1.0, 20.1, 20.0], "dy": [20.0, 1.0, 200.1]})
    assert reasons[:2] == [None, None]  # two of three have grown
    assert reasons[2] == "dy has norm 200, more than 10 times the median of 20"
    reasons = screen.judge("descend", {"dx": [300.0], "dy": [1.0]})
    assert reasons == ["dx has norm 300, more than 10 times the median of 2"]
    copy = Screen(factor=10.0)
    copy.restore(screen.plain())
    assert copy.plain() == screen.plain()


@pytest.mark.parametrize("name", SHARED)
def test_honest_clients_are_never_refused(name: str) -> None:
    task = quadratic()
    screened = run_of(name, task, local_steps=(1, 3), norm_factor=10.0, strikes=3)
    free = run_of(name, task, local_steps=(1, 3))
    for run in (screened, free):
        for _ in range(5):
            run.advance()
        run.fed.check_pending()
    assert screened.fed.ledger.refused_replies == 0
    assert torch.allclose(flatten(screened.state.x), flatten(free.state.x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [1e6, -1e12, 1e300])
@pytest.mark.parametrize("name", ["simfbo", "fednest", "afbo", "adbo", "fedbioacc"])
def test_a_client_whose_replies_are_too_long_is_put_aside_in_a_simulation(
    name: str, factor: float
) -> None:
    task = quadratic()
    run = run_of(name, task, norm_factor=100.0, strikes=3)
    honest = run_of(name, task)
    let_lie(run.fed, 2, scaled(factor))
    for each in (run, honest):
        list(each)
    assert run.status == "completed"
    assert list(run.fed.transport.excluded) == [2]
    assert run.fed.ledger.refused_replies == 3
    assert 2 not in set(run.fed.sample())
    # The four others solve a problem of their own, which is not far from that of all.
    away = float(norm(run.state.x - honest.state.x))
    assert away < 1.0
    unscreened = run_of(name, task)
    let_lie(unscreened.fed, 2, scaled(factor))
    list(unscreened)
    assert unscreened.status == "diverged" or norm(unscreened.state.x - honest.state.x) > 100


def test_the_first_replies_without_a_barrier_are_compared_with_each_other() -> None:
    """Otherwise the first reply, which is compared with nothing, could be anything."""
    task = quadratic()
    lengths = []
    for client in range(5):
        delay = fb.delays.LogNormal(1.0, 0.5)
        run = run_of("afbo", task, participation=1, delay=delay, norm_factor=100.0, strikes=1)
        let_lie(run.fed, client, scaled(1e9))
        list(run)
        assert list(run.fed.transport.excluded) == [client]
        lengths.append(float(norm(run.state.x)))
    assert max(lengths) < 10 * statistics.median(lengths)


def test_a_screened_run_that_is_killed_resumes_with_the_same_refusals(tmp_path: Any) -> None:
    task = quadratic()

    def lying_federation() -> Federation:
        conditions = fb.Environment(norm_factor=10.0, strikes=6)
        fed = fb.simulated_federation(task.problem, task.clients, conditions)
        return let_lie(fed, 1, scaled(30.0))

    whole = fb.solve(task.problem, [], "simfbo", rounds=8, federation=lying_federation())
    first = lying_federation()
    fb.solve(task.problem, [], "simfbo", rounds=4, federation=first, out=tmp_path / "run")
    assert first.ledger.refused_replies == 4
    second = lying_federation()
    resumed = fb.solve(
        task.problem, [], "simfbo", rounds=8, federation=second, out=tmp_path / "run", resume=True
    )
    assert torch.equal(resumed.x["x"], whole.x["x"])
    assert list(second.transport.excluded) == [1]
    assert second.ledger.refused_replies == 6


def test_too_few_clients_are_left() -> None:
    strikes = Strikes(limit=None)
    assert strikes.count([1] * 100) == []
    task = quadratic()
    run = run_of("simfbo", task, norm_factor=10.0, strikes=1, min_replies=5)
    let_lie(run.fed, 1, scaled(1e6))
    list(run)
    assert run.status == "diverged"
    assert "4 of 5 replies were accepted, at least 5 needed" in run.reason
    run = run_of("simfbo", task, norm_factor=10.0, strikes=1, participation=4, min_replies=4)
    run.fed.transport.notify_refused([1, 3])
    list(run)
    assert run.reason == "clients [1, 3] were excluded, 4 are needed"
