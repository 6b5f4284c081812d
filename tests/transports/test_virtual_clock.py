"""The virtual clock: causality, determinism, deadlines, availability, and restarts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms import Phase
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Pareto, Stragglers
from fedbilevel.runs.run import Run
from fedbilevel.transports import virtual_clock
from tests.support.asynchronous import Async
from tests.support.conformance import build, iterate, tensors
from tests.support.probe import PROBE, VISITS, ask, federation, post, snapshot_from_file
from tests.support.processes import assert_same_run, evaluations_written, wait_until
from tests.support.tool import invoke_ok, start_forked, write

ALL_FAULTS = Faults(drop=0.2, duplicate=0.3, corrupt=0.2, leave=0.2, away_s=3.0)


def conditions(**changes: Any) -> dict[str, Any]:
    """Delays, stragglers, all faults and mini-batches."""
    return {
        "delay": LogNormal(),
        "stragglers": Stragglers(2),
        "faults": ALL_FAULTS,
        "batch_size": 2,
        **changes,
    }


def idle_clients(fed: Federation) -> list[int]:
    return [client for client in range(len(fed)) if client not in fed.in_flight]


def run_posting(fed: Federation, iterations: Iterable[int], phase: Phase = PROBE) -> list[Any]:
    """Run an asynchronous server, and return what it saw.

    In each iteration every idle client is sent the number of the iteration, and two arrivals are
    awaited.
    """
    seen: list[Any] = []
    for t in iterations:
        fed.iteration = t
        post(fed, idle_clients(fed), float(t), phase)
        replies = fed.collect(2)
        values = [(*reply[:5], reply.values) for reply in replies]
        seen.append((fed.now, replies.idle, replies.refused, values))
    return seen


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare nested values; tensors to within a tolerance, everything else exactly."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_close(found[key], expected[key], tolerance)
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    else:
        assert found == expected


# Causality and determinism


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 7),
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
    delay=st.sampled_from([None, Constant(2.0), LogNormal(1.0, 1.5), Pareto(1.0, 1.2)]),
    faults=st.builds(
        Faults,
        drop=st.sampled_from([0.0, 0.3]),
        duplicate=st.sampled_from([0.0, 0.5]),
        corrupt=st.sampled_from([0.0, 0.3]),
        leave=st.just(0.0),
    ),
)
def test_no_reply_arrives_early_or_knows_the_future(
    n: int, count: int, seed: int, delay: Any, faults: Faults
) -> None:
    fed = federation([3] * n, environment={"delay": delay, "faults": faults}, seed=seed)
    sent: dict[int, int] = {}
    due: dict[int, tuple[float, int]] = {}
    now = 0.0
    last = (0.0, -1)
    for t in range(6):
        fed.iteration = t
        idle = idle_clients(fed)
        post(fed, idle, float(t))
        sent |= dict.fromkeys(idle, t)
        for outcome in fed.transport.scheduled:
            if outcome.client in idle:
                due[outcome.client] = (outcome.due, outcome.number)
        assert all(due[i][0] >= now for i in idle)
        replies = fed.collect(count)
        order = [due[i] for i in replies.idle]
        assert [last, *order] == sorted([last, *order]), "in order of time, then of number"
        assert fed.now == max(now, order[-1][0]), "time passes only until the last arrival"
        now = fed.now
        last = order[-1]
        assert len(replies) == count or not fed.in_flight
        assert all(when[0] >= last[0] for i, when in due.items() if i in fed.in_flight)
        replied = [reply.client for reply in replies]
        assert replied == [i for i in replies.idle if i in replied]
        for reply in replies:
            assert float(reply.values["own"]) == sent[reply.client], "not what was sent later"
            assert reply.staleness == t - sent[reply.client]


@pytest.mark.parametrize(
    "changes", [{}, {"faults": None}, {"delay": Pareto(), "local_steps": (1, 4)}]
)
def test_stack_loop_and_any_number_computed_ahead_agree(
    changes: dict[str, Any], monkeypatch: Any
) -> None:
    default = virtual_clock.COMPUTE_AHEAD

    def run(ahead: int = default, seed: int = 3, **options: Any) -> Any:
        monkeypatch.setattr(virtual_clock, "COMPUTE_AHEAD", ahead)
        fed = federation(
            [4, 4, 5, 4, 4, 5], environment=conditions(**changes), seed=seed, **options
        )
        return [*run_posting(fed, range(10)), fed.records()], fed.ledger

    expected, ledger = run()
    assert_close(run()[0], expected, 0.0)
    for other in (run(ahead=1), run(ahead=2), run(ahead=1000), run(mode="loop"), run(memory=1)):
        assert_close(other[0], expected, 1e-12)
        assert other[1] == ledger, "what is computed ahead is not counted ahead"
    assert run(seed=4)[0] != expected


def test_times_and_staleness_by_hand() -> None:
    """Two clients take 2 s, one takes 10 s; one arrival per iteration, then a new task at once."""
    fed = federation(environment={"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0)})
    (slow,) = fed.transport.outcomes.slow_clients
    a, b = (i for i in range(3) if i != slow)
    post(fed, [a, b, slow], 0.0)
    seen = []
    for t in range(9):
        fed.iteration = t
        replies = fed.collect(1)
        (reply,) = replies
        seen.append((fed.now, reply.client, reply.staleness))
        post(fed, replies.idle, float(t))
    assert seen == [
        *[(2.0, a, 0), (2.0, b, 1), (4.0, a, 2), (4.0, b, 2)],
        *[(6.0, a, 2), (6.0, b, 2), (8.0, a, 2), (8.0, b, 2)],
        (10.0, slow, 8),
    ]
    assert fed.records() == {
        "staleness": (0 + 1 + 6 * 2 + 8) / 9,
        "max_staleness": 8,
        "participants": 3,
    }
    assert fed.records() == {}
    cost = fed.ledger.phases["probe"]
    assert (cost.rounds, cost.samples, cost.gradients, cost.bytes_up) == (9, 9 * 4, 9, 9 * 3 * 8)


def test_posted_messages_of_unequal_shapes_and_dtypes_are_collected_together() -> None:
    fed = federation()
    fed.post(PROBE, [0], scale=2.0, each=[{"own": 1.0}], more=torch.zeros(2))
    # These clients reply with whole numbers.
    fed.post(PROBE, [1, 2], scale=3, each=[{"own": 1}] * 2)
    assert [float(reply.values["own"]) for reply in fed.collect(3)] == [2, 3, 3]


# Asking on the clock


@pytest.mark.parametrize(
    ("method", "outer", "inner"),
    [
        ("simfbo", 1, 0),
        ("prometheus", 2, 0),  # its first iteration begins with a task without an exchange
        ("fednest", 2, 8),  # the hypergradient, x; two on y, grad_y f_i, and five products
        ("aggitd", 2, 3),  # the hypergradient, x; two on y, and grad_y f_i
    ],
)
def test_inner_loops_have_delays_of_their_own(method: str, outer: int, inner: int) -> None:
    delays = {"delay": Constant(100.0), "inner_delay": Constant(1.0)}
    algorithm = algorithms.get(method)()
    run = iterate(fb.tasks.load("quadratic", clients=3), algorithm, 1, environment=delays)
    assert run.fed.now == 100 * outer + inner


def test_an_ask_takes_as_long_as_its_slowest_client() -> None:
    fed = federation(environment={"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0)})
    (slow,) = fed.transport.outcomes.slow_clients
    quick = (slow + 1) % 3
    for clients, now in (([quick], 2.0), ([0, 1, 2], 12.0), ([quick, quick], 16.0)):
        ask(fed, clients, 1.0)
        assert fed.now == now
    assert "participants" not in fed.records()


def test_an_asked_client_finishes_its_posted_task_first_and_that_reply_is_kept() -> None:
    fed = federation(environment={"delay": Constant(2.0)})
    post(fed, [0, 1], 5.0)
    (asked,) = ask(fed, [0], 6.0)
    assert (fed.now, float(asked.values["own"])) == (4.0, 6.0)
    collected = [(reply.client, float(reply.values["own"])) for reply in fed.collect(2)]
    assert collected == [(0, 5.0), (1, 5.0)]
    assert fed.now == 4.0


def test_a_deadline_ends_an_ask_and_only_an_ask() -> None:
    environment = {"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0), "deadline": 3.0}
    fed = federation(environment=environment)
    (slow,) = fed.transport.outcomes.slow_clients
    replies = ask(fed, range(3), 1.0)
    assert (fed.now, len(replies), fed.ledger.lost_tasks) == (3.0, 2, 1)
    assert slow not in [reply.client for reply in replies]
    assert all(slow not in fed.sample() for _ in range(20)), "it is still busy"
    assert fed.ledger.phases["probe"].samples == 2 * 4, "a lost task is not computed"
    post(fed, [slow], 2.0)
    assert len(fed.collect(1)) == 1
    assert (fed.now, fed.ledger.lost_tasks) == (20.0, 1)
    strict = federation(environment={**environment, "min_replies": 3})
    with pytest.raises(
        QuorumError, match="phase 'probe', round 1: 2 of 3 replies were accepted, at least 3 needed"
    ):
        ask(strict, range(3), 1.0)


@dataclass(frozen=True)
class RecordedLogNormal(LogNormal):
    """Keeps what it drew: for each call, the clients and their durations."""

    drawn: ClassVar[list[list[tuple[int, float]]]] = []

    def seconds(self, keys: torch.Tensor, clients: Sequence[int]) -> list[float]:
        seconds = super().seconds(keys, clients)
        self.drawn.append(list(zip(clients, seconds, strict=True)))
        return seconds


@pytest.mark.parametrize(
    "name", ["simfbo", "la-asfbo", "fednest", "fedmbo", "fedbioacc", "localbsgvr"]
)
def test_delays_change_nothing_but_the_time_for_methods_with_a_barrier(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=5, samples=4, noise=1.0)
    environment = {"participation": 3, "local_steps": (1, 3), "batch_size": 2}
    RecordedLogNormal.drawn.clear()
    timeless = iterate(task, build(name), 3, environment=environment)
    timed = iterate(task, build(name), 3, environment={**environment, "delay": RecordedLogNormal()})
    assert all(map(torch.equal, tensors(timeless.state), tensors(timed.state)))
    assert timeless.fed.ledger.phases == timed.fed.ledger.phases
    assert len(RecordedLogNormal.drawn) == timed.fed.ledger.rounds
    by_hand = 0.0
    for drawn in RecordedLogNormal.drawn:
        totals = dict.fromkeys((client for client, _ in drawn), 0.0)
        for client, seconds in drawn:
            totals[client] += seconds
        by_hand += max(totals.values())
    assert timeless.fed.now == 0.0
    assert timed.fed.now == pytest.approx(by_hand, rel=1e-12)


def test_clients_that_are_busy_or_away_are_not_sampled() -> None:
    environment = {"participation": 2, "min_replies": 2, "delay": Constant(4.0)}
    fed = federation([2] * 8, environment=environment)
    post(fed, [0, 2, 5], 1.0)
    cohorts = [fed.sample() for _ in range(1000)]
    assert all(len(set(cohort)) == 2 for cohort in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=8).double()
    assert counts[[0, 2, 5]].sum() == 0
    free = counts[[1, 3, 4, 6, 7]]
    chi_square = float(((free - 400) ** 2 / 400).sum())
    assert chi_square < 18.5  # 4 degrees of freedom, p = .001


def test_time_passes_until_enough_clients_can_be_sampled() -> None:
    environment = {"participation": 2, "min_replies": 2, "delay": Constant(4.0)}
    fed = federation([2] * 8, environment=environment)
    fed.transport.free_at = {client: 10.0 + client for client in range(7)}
    assert sorted(fed.sample()) == [0, 7]
    assert fed.now == 10.0
    sampled = []
    for _ in range(200):  # everyone returns at the same moment
        fed.transport.free_at = dict.fromkeys(range(8), fed.now + 1)
        sampled += fed.sample()
    counts = torch.bincount(torch.tensor(sampled), minlength=8).double()
    assert fed.now == 210.0
    chi_square = float(((counts - 50) ** 2 / 50).sum())
    assert chi_square < 24.4  # 7 degrees of freedom, p = .001


# Restarts


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    stop=st.integers(1, 9),
    phase=st.sampled_from([PROBE, VISITS]),
    ahead=st.sampled_from([1, 2, 1000]),
    in_flight=st.booleans(),
)
def test_a_restart_at_any_moment_changes_no_bit(
    seed: int,
    stop: int,
    phase: Phase,
    ahead: int,
    in_flight: bool,
) -> None:
    """A restart between iterations, or after the tasks of an iteration were posted."""

    def fresh() -> Federation:
        environment = conditions(delay=Pareto(1.0, 1.2))
        return federation([4, 4, 5, 4, 4, 5], environment=environment, seed=seed)

    uninterrupted = fresh()
    stopped = fresh()
    resumed = fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_clock, "COMPUTE_AHEAD", ahead)
        expected = run_posting(uninterrupted, range(10), phase)[stop:]
        run_posting(stopped, range(stop), phase)
        if in_flight:
            stopped.iteration = stop
            post(stopped, idle_clients(stopped), float(stop), phase)
        resumed.restore(snapshot_from_file(stopped))
        for other in (stopped, resumed):
            assert_close(run_posting(other, range(stop, 10), phase), expected, 0.0)
            assert_close(other.snapshot(), uninterrupted.snapshot(), 0.0)
            assert other.ledger == uninterrupted.ledger
        assert stopped.records() == resumed.records() == uninterrupted.records()


@pytest.mark.parametrize("lr_x", [0.05, lambda t: 0.05 / (1 + t)], ids=["constant", "schedule"])
def test_a_run_without_a_barrier_resumes_with_the_same_bits(lr_x: Any, tmp_path: Path) -> None:
    task = fb.tasks.load("quadratic", clients=8, samples=4, noise=1.0)
    faults = Faults(duplicate=0.3, drop=0.2)
    environment = fb.Environment(**conditions(local_steps=(1, 3), faults=faults))

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        return fb.solve(
            task.problem,
            task.clients,
            Async(lr_x=lr_x),
            rounds=rounds,
            environment=environment,
            out=tmp_path / folder,
            resume=resume,
        )

    solve(3, "stopped")
    solve(4, "stopped", resume=True)
    resumed = solve(9, "stopped", resume=True)
    expected = solve(9, "uninterrupted")
    pairs = zip(tensors((resumed.x, resumed.y)), tensors((expected.x, expected.y)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    times = [metrics["virtual_s"] for metrics in resumed.history]
    assert times == [metrics["virtual_s"] for metrics in expected.history]
    assert expected.history[-1]["staleness"] >= 1


def test_an_interrupted_iteration_leaves_no_trace() -> None:
    task = fb.tasks.load("quadratic", clients=6, samples=4, noise=1.0)

    def run() -> Run:
        environment = fb.Environment(**conditions(faults=Faults(duplicate=0.4, leave=0.3)))
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(Async(), fed, {"rounds": 7})

    uninterrupted = run()
    list(uninterrupted)
    stopped = run()
    original_post = stopped.fed.post
    calls = iter(range(100))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        original_post(*args, **kwargs)
        if next(calls) in (4, 9):
            raise KeyboardInterrupt

    stopped.fed.post = interrupt  # type: ignore[method-assign]
    for _ in range(3):
        list(stopped)
        stopped.status = "completed"
    assert all(map(torch.equal, tensors(stopped.state), tensors(uninterrupted.state)))
    ledger = {**vars(stopped.fed.ledger), "wall_s": 0}
    assert ledger == {**vars(uninterrupted.fed.ledger), "wall_s": 0}
    assert stopped.fed.now == uninterrupted.fed.now
    assert stopped.fed.iteration == uninterrupted.fed.iteration


USER_MODULE = """
from fedbilevel import algorithms, tasks
from tests.support.asynchronous import Async

def quadratic(seed: int = 0):
    return tasks.load("quadratic", clients=5, samples=3, noise=0.3, seed=seed)

algorithms.register("async")(type("Async", (Async,), {}))
"""
EXPERIMENT = """
task = "asynchronous_experiment:quadratic"
algorithm = "async"
rounds = 60
every = 2
checkpoint_every = 3
runtime.threads = 1
[environment]
batch_size = 2
delay = { model = "lognormal", sigma = 1.0 }
stragglers = { clients = 2 }
faults = { drop = 0.1, duplicate = 0.2, corrupt = 0.1, leave = 0.1 }
"""


def test_an_asynchronous_run_killed_twice_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = algorithms.registry
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "asynchronous_experiment.py", USER_MODULE)
    experiment = write(tmp_path / "a.toml", EXPERIMENT)
    killed = tmp_path / "killed"
    uninterrupted = tmp_path / "uninterrupted"
    invoke_ok("run", experiment, "--out", uninterrupted)
    command = ("run", experiment, "--out", killed, "--resume")
    for wanted in (5, 16):
        process = start_forked(*command, "--quiet", cwd=tmp_path)
        wait_until(lambda wanted=wanted: evaluations_written(killed) >= wanted, 60, "no progress")
        time.sleep(0.001 * wanted)
        process.kill()
        process.join()
        assert not (killed / "summary.json").exists()
    invoke_ok(*command)
    assert_same_run(killed, uninterrupted)
