"""The virtual clock: causality, determinism, delays, stragglers, faults, and going on where a run stopped."""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms import Phase
from fedbilevel.core.rng import fold_in, root
from fedbilevel.experiments import config as configs
from fedbilevel.federation import Federation, QuorumError
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Pareto, Stragglers, Trace
from fedbilevel.runs import checkpoint
from fedbilevel.runs.run import Run
from fedbilevel.transports import virtual_clock as virtual
from fedbilevel.transports.virtual_clock import packed
from tests.conformance.test_conformance import build, iterate, tensors
from tests.support.asynchronous import Async
from tests.support.tool import done, fork, write
from tests.test_federation import PROBE, VISITS, Probe, federation
from tests.test_kill import lines, same, wait

KEYS = fold_in(root(1, "test"), torch.arange(20_000))
EVERYTHING = Faults(drop=0.2, duplicate=0.3, corrupt=0.2, leave=0.2, away_s=3.0)


def message(clients: Sequence[int], own: float, phase: Phase) -> dict[str, Any]:
    """`own`, to everyone or to each: a probe replies with the product of the two."""
    if isinstance(phase, Probe):
        return {"each": [{"own": 1.0}] * len(clients), "scale": own}
    return {"each": [{"own": own}] * len(clients)}


def post(fed: Federation, clients: Sequence[int], own: float, phase: Phase = PROBE) -> None:
    fed.post(phase, clients, **message(clients, own, phase))


def ask(fed: Federation, clients: Sequence[int], own: float, phase: Phase = PROBE) -> Any:
    return fed.ask(phase, clients, **message(clients, own, phase))


def play(
    fed: Federation,
    iterations: Iterable[int],
    count: int = 2,
    phase: Phase = PROBE,
) -> list[Any]:
    """Everyone idle is sent the number of the iteration, then `count` arrivals are awaited: what the server saw."""
    seen: list[Any] = []
    for t in iterations:
        fed.iteration = t
        post(fed, [i for i in range(len(fed)) if i not in fed.in_flight], float(t), phase)
        r = fed.collect(count)
        seen.append((fed.now, r.idle, r.refused, [(*reply[:5], reply.values) for reply in r]))
    return seen


def conditions(**changes: Any) -> dict[str, Any]:
    return {
        "delay": LogNormal(),
        "stragglers": Stragglers(2),
        "faults": EVERYTHING,
        "batch_size": 2,
        **changes,
    }


def close(a: Any, b: Any, tolerance: float) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key], tolerance)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            close(one, other, tolerance)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    else:
        assert a == b


# Causality and determinism

delays = st.sampled_from([None, Constant(2.0), LogNormal(1.0, 1.5), Pareto(1.0, 1.2)])
faults = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.3]),
    duplicate=st.sampled_from([0.0, 0.5]),
    corrupt=st.sampled_from([0.0, 0.3]),
    leave=st.just(0.0),
)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 7),
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
    delay=delays,
    faults=faults,
)
def test_nothing_comes_early_or_from_the_future(
    n: int, count: int, seed: int, delay: Any, faults: Faults
) -> None:
    fed = federation([3] * n, environment={"delay": delay, "faults": faults}, seed=seed)
    sent: dict[int, int] = {}
    due: dict[int, tuple[float, int]] = {}
    now, last = 0.0, (0.0, -1)
    for t in range(6):
        fed.iteration = t
        idle = [i for i in range(n) if i not in fed.in_flight]
        post(fed, idle, float(t))
        sent |= dict.fromkeys(idle, t)
        due |= {e.client: (e.due, e.number) for e in fed.transport.endings if e.client in idle}
        assert all(due[i][0] >= now for i in idle)
        r = fed.collect(count)
        order = [due[i] for i in r.idle]
        assert [last, *order] == sorted([last, *order]), "in order of time, then of number"
        assert fed.now == max(now, order[-1][0]), (
            "time stands still between arrivals and never goes back"
        )
        now, last = fed.now, order[-1]
        assert len(r) == count or not fed.in_flight
        assert all(place[0] >= last[0] for i, place in due.items() if i in fed.in_flight)
        assert [reply.client for reply in r] == [
            i for i in r.idle if i in {reply.client for reply in r}
        ]
        for reply in r:
            assert float(reply.values["own"]) == sent[reply.client], (
                "what it was sent, not what is newest"
            )
            assert reply.staleness == t - sent[reply.client]


@pytest.mark.parametrize(
    "changes", [{}, {"faults": None}, {"delay": Pareto(), "local_steps": (1, 4)}]
)
def test_stack_loop_and_any_number_ahead_agree(changes: dict[str, Any], monkeypatch: Any) -> None:
    def run(ahead: int = virtual.AHEAD, seed: int = 3, **options: Any) -> Any:
        monkeypatch.setattr(virtual, "AHEAD", ahead)
        fed = federation(
            [4, 4, 5, 4, 4, 5], environment=conditions(**changes), seed=seed, **options
        )
        return [*play(fed, range(10)), fed.records()], fed.ledger

    whole, ledger = run()
    close(run()[0], whole, 0.0)
    for other in (run(ahead=1), run(ahead=2), run(ahead=1000), run(mode="loop"), run(memory=1)):
        close(other[0], whole, 1e-12)
        assert other[1] == ledger, "what was evaluated ahead is not counted ahead"
    assert run(seed=4)[0] != whole


def test_times_and_staleness_by_hand() -> None:
    """Two clients take 2 s, one takes 10 s; one arrival an iteration, and who is idle gets the next task at once."""
    fed = federation(environment={"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0)})
    (slow,) = fed.transport.fates.slow
    a, b = (i for i in range(3) if i != slow)
    post(fed, [a, b, slow], 0.0)
    seen = []
    for t in range(9):
        fed.iteration = t
        (reply,) = (r := fed.collect(1))
        seen.append((fed.now, reply.client, reply.staleness))
        post(fed, r.idle, float(t))
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


def test_tasks_under_way_run_as_one_stack(monkeypatch: Any) -> None:
    fed = federation([4] * 5, environment={"delay": Constant()})
    stacks: list[list[float]] = []
    executor = fed.transport.executor
    run = executor.run

    def spy(tasks: Any, **options: Any) -> Any:
        stacks.append([task.broadcast.message["scale"] for task in tasks])
        return run(tasks, **options)

    monkeypatch.setattr(executor, "run", spy)
    for own in (7.0, 8.0):
        post(fed, [0, 1] if own == 7.0 else [2, 3, 4], own)
    assert [float(reply.values["own"]) for reply in fed.collect(2)] == [7, 7]
    waiting = [flight.reply[0] for flight in fed.transport.flights.values()]
    assert [t.untyped_storage().nbytes() for t in waiting] == [24] * 3, (
        "none of them keeps the stack"
    )
    assert [float(reply.values["own"]) for reply in fed.collect(3)] == [8, 8, 8]
    assert stacks == [[7, 7, 8, 8, 8]]


def test_messages_of_another_form_are_not_stacked() -> None:
    fed = federation()
    fed.post(PROBE, [0], scale=2.0, each=[{"own": 1.0}], more=torch.zeros(2))
    # Replies with whole numbers are waited for together with others.
    fed.post(PROBE, [1, 2], scale=3, each=[{"own": 1}] * 2)
    assert [float(reply.values["own"]) for reply in fed.collect(3)] == [2, 3, 3]


@pytest.mark.parametrize("clients", [1, 3])
def test_replies_that_wait_come_back_as_they_were(clients: int) -> None:
    """Whatever their dtypes, strides and sizes."""
    numbers = torch.arange(60.0).view(6, 10)
    stack = {
        "flag": torch.tensor([True, False, True])[:clients],
        "tree": fb.Tree(
            a=numbers.T[:clients, 1:4],
            b=numbers.long()[:clients, :0],
            c=numbers.double()[:clients, 5],
        ),
        "strided": numbers[::2, 3:4][:clients].T.T,
    }
    rows, packing = packed(stack)
    assert rows.shape == (clients, 1 + 3 * 4 + 8 + 4)
    torch.testing.assert_close(packing.stack(rows), stack, rtol=0, atol=0)
    for j in range(clients):
        one = tree_map(lambda t, j=j: t[j : j + 1], stack)
        torch.testing.assert_close(packing.stack(rows[j : j + 1]), one, rtol=0, atol=0)


# Asking on the clock


def test_an_ask_takes_as_long_as_its_slowest_client() -> None:
    fed = federation(environment={"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0)})
    (slow,) = fed.transport.fates.slow
    quick = (slow + 1) % 3
    for clients, now in (([quick], 2.0), ([0, 1, 2], 12.0), ([quick, quick], 16.0)):
        ask(fed, clients, 1.0)
        assert fed.now == now
    assert "participants" not in fed.records()


def test_an_ask_waits_for_what_its_client_does_and_leaves_its_reply() -> None:
    fed = federation(environment={"delay": Constant(2.0)})
    post(fed, [0, 1], 5.0)
    (asked,) = ask(fed, [0], 6.0)
    assert (fed.now, float(asked.values["own"])) == (4.0, 6.0)
    assert [(reply.client, float(reply.values["own"])) for reply in fed.collect(2)] == [
        (0, 5.0),
        (1, 5.0),
    ]
    assert fed.now == 4.0


def test_a_deadline_ends_an_ask_and_only_an_ask() -> None:
    environment = {"delay": Constant(2.0), "stragglers": Stragglers(1, 5.0), "deadline": 3.0}
    fed = federation(environment=environment)
    (slow,) = fed.transport.fates.slow
    r = ask(fed, range(3), 1.0)
    assert (fed.now, len(r), fed.ledger.lost_tasks) == (3.0, 2, 1)
    assert slow not in [reply.client for reply in r]
    assert all(slow not in fed.sample() for _ in range(20)), "it is still at it"
    assert fed.ledger.phases["probe"].samples == 2 * 4, (
        "what is lost and leaves no memory is not computed"
    )
    post(fed, [slow], 2.0)
    assert len(fed.collect(1)) == 1
    assert (fed.now, fed.ledger.lost_tasks) == (20.0, 1)
    strict = federation(environment={**environment, "min_replies": 3})
    with pytest.raises(
        QuorumError, match="phase 'probe', round 1: 2 of 3 replies were accepted, at least 3 needed"
    ):
        ask(strict, range(3), 1.0)


@dataclass(frozen=True)
class Noted(LogNormal):
    """Keeps what it drew."""

    drawn: ClassVar[list[list[tuple[int, float]]]] = []

    def seconds(self, keys: torch.Tensor, clients: Sequence[int]) -> list[float]:
        seconds = super().seconds(keys, clients)
        self.drawn.append(list(zip(clients, seconds, strict=True)))
        return seconds


@pytest.mark.parametrize(
    "name", ["simfbo", "la-asfbo", "fednest", "fedmbo", "fedbioacc", "localbsgvr"]
)
def test_methods_with_a_barrier_only_learn_what_time_it_is(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=5, samples=4, noise=1.0)
    environment = {"participation": 3, "local_steps": (1, 3), "batch_size": 2}
    Noted.drawn.clear()
    timeless = iterate(task, build(name), 3, environment=environment)
    timed = iterate(task, build(name), 3, environment={**environment, "delay": Noted()})
    assert all(map(torch.equal, tensors(timeless.state), tensors(timed.state)))
    assert timeless.fed.ledger.phases == timed.fed.ledger.phases
    assert len(Noted.drawn) == timed.fed.ledger.rounds
    by_hand = 0.0
    for drawn in Noted.drawn:
        by_hand += max(sum(s for client, s in drawn if client == asked) for asked, _ in drawn)
    assert timeless.fed.now == 0.0
    assert timed.fed.now == pytest.approx(by_hand, rel=1e-12)


# Delays and stragglers


def below(seconds: list[float], limit: float, share: float) -> None:
    """As many are below as should be, within 5 standard deviations."""
    found = sum(s < limit for s in seconds)
    assert abs(found - share * len(seconds)) < 5 * math.sqrt(share * (1 - share) * len(seconds))


def test_delays_have_their_means_and_quantiles() -> None:
    n = len(KEYS)
    assert Constant(0.3).seconds(KEYS[:4], range(4)) == [0.3] * 4
    lognormal = LogNormal(2.0, 0.7).seconds(KEYS, range(n))
    error = 2.0 * math.sqrt(math.expm1(0.7**2) / n)
    assert abs(sum(lognormal) / n - 2.0) < 5 * error
    for share, normal in ((0.5, 0.0), (0.8413447, 1.0), (0.0227501, -2.0), (0.9986501, 3.0)):
        below(lognormal, 2.0 * math.exp(0.7 * normal - 0.7**2 / 2), share)
    pareto = Pareto(2.0, 3.0).seconds(KEYS, range(n))
    error = 2.0 / math.sqrt(3.0 * (3.0 - 2.0) * n)  # the variance is mean^2 / (shape (shape - 2))
    assert abs(sum(pareto) / n - 2.0) < 5 * error
    least = 2.0 * 2 / 3
    assert min(pareto) >= least
    for share in (0.1, 0.5, 0.9, 0.999):
        below(pareto, least * (1 - share) ** (-1 / 3), share)
    assert LogNormal().seconds(KEYS[:3], [9, 9, 9]) == LogNormal().seconds(KEYS[:3], [0, 1, 2])


def test_a_trace_is_drawn_from(tmp_path: Path) -> None:
    own = Trace(str(write(tmp_path / "a.csv", "0,1.5\n1,2\n0,2.5\n")))
    seconds = own.seconds(KEYS, [0] * len(KEYS))
    assert set(seconds) == {1.5, 2.5}
    below(seconds, 2.0, 0.5)
    assert own.seconds(KEYS[:3], [1, 1, 1]) == [2.0] * 3
    mixed = Trace(str(write(tmp_path / "b.csv", "7\r\n1, 3\r\n")))
    assert mixed.seconds(KEYS[:3], [0, 1, 2]) == [7.0, 3.0, 7.0]
    fed = federation(environment={"delay": mixed})
    ask(fed, [1], 1.0)
    ask(fed, [0, 1], 1.0)
    assert fed.now == 10.0
    with pytest.raises(ValueError, match=r"a.csv holds no duration of client 2$"):
        federation(environment={"delay": own})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\nfast\n", 2),
        ("0,1,2\n", 1),
        ("1\n\n2\n", 2),
        ("-1,2", 1),
        (",2", 1),
        ("0,-3", 1),
        ("nan", 1),
        ("1e999", 1),
    ],
)
def test_a_wrong_line_of_a_trace_is_refused(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(
        ValueError, match=f"a.csv, line {line} is '.*'; it must be seconds, or client,seconds$"
    ):
        Trace(str(write(tmp_path / "a.csv", text)))


def test_a_wrong_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.csv is empty; it must hold a duration a line$"):
        Trace(str(write(tmp_path / "a.csv", "")))
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe1")
    with pytest.raises(
        ValueError, match=r"b.csv is not UTF-8 text; it must hold a duration a line$"
    ):
        Trace(str(tmp_path / "b.csv"))
    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        Trace(str(tmp_path / "c.csv"))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 999), data=st.data())
def test_stragglers_are_so_many_and_the_same_throughout(n: int, seed: int, data: Any) -> None:
    k = data.draw(st.integers(1, n))
    fed = federation(
        [2] * n, environment={"delay": Constant(1.0), "stragglers": Stragglers(k, 7.0)}, seed=seed
    )
    for _ in range(3):
        post(fed, range(n), 0.0)
        before = fed.now
        took = {ending.client: ending.due - before for ending in fed.transport.endings}
        slow = {client for client, seconds in took.items() if seconds == 7.0}
        assert {client for client, seconds in took.items() if seconds == 1.0} == set(
            range(n)
        ) - slow
        assert slow == fed.transport.fates.slow
        assert len(slow) == k
        fed.collect(n)
    assert fed.now == 21.0


# Faults


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("fault", ["drop", "duplicate", "corrupt", "leave"])
def test_a_fault_is_absorbed_and_counted(fault: str, posted: bool, caplog: Any) -> None:
    environment = {"delay": Constant(1.0), "faults": Faults(**{fault: 0.25}, away_s=50.0)}
    fed = federation([2] * 40, environment=environment)
    accepted, refused, tasks = 0, [], 12 * 40
    for t in range(12):
        if posted:
            post(fed, range(40), float(t))
        r = fed.collect(40) if posted else ask(fed, range(40), float(t))
        assert all(float(reply.values["own"]) == t for reply in r)
        assert sorted(r.idle) == list(range(40)), "whom to send the next task"
        accepted, refused = accepted + len(r), refused + r.refused
    assert fed.ledger.refused_replies == len(refused)
    lost = fed.ledger.lost_tasks
    wrong = {
        "drop": lost,
        "leave": (fed.now - 12) / 50,
        "corrupt": len(refused),
        "duplicate": len(refused),
    }
    if fault == "leave":
        assert (lost, len(refused), accepted) == (0, 0, tasks)
        assert 1 <= wrong[fault] <= 12, "who is away begins when it is back"
        return
    assert abs(wrong[fault] - tasks / 4) < 5 * math.sqrt(tasks * 3 / 16)
    assert accepted == tasks - lost - (len(refused) if fault == "corrupt" else 0)
    reasons = {why.split(": ", 1)[1] for why in refused}
    assert reasons == {
        "drop": set(),
        "duplicate": {"answered twice"},
        "corrupt": {
            "mean is not finite",
            "replied with 'mean' of another shape than 'x', which it declares",
        },
    }.get(fault)
    cost = fed.ledger.phases["probe"]
    answers = tasks - lost
    assert (cost.samples, cost.gradients, cost.bytes_up) == (2 * answers, answers, 24 * answers)
    assert cost.bytes_down == 0, "numbers are the envelope"


def test_nonsense_of_whole_numbers_has_another_shape() -> None:
    class Counting(Probe):
        reply: ClassVar = {"count": "scalar"}

        def finish(self, carry: Any) -> dict[str, Any]:
            return {"count": carry[2].long()}

    fed = federation([2] * 20, environment={"faults": Faults(corrupt=0.5)})
    r = ask(fed, range(20), 3.0, Counting())
    assert 0 < len(r.refused) < 20
    assert all("another shape" in why for why in r.refused)
    assert r.mean("count") == 3.0


@pytest.mark.parametrize(("posted", "deadline"), [(False, None), (False, 1.0), (True, None)])
def test_a_lost_reply_was_computed_and_its_client_remembers(
    posted: bool, deadline: float | None
) -> None:
    """Every task adds a power of two to what its client remembers: the sum tells which tasks were run, once each."""
    environment = {"delay": LogNormal(), "deadline": deadline, "faults": Faults(drop=0.5)}
    fed = federation([2] * 12, environment=environment)
    for t in range(5):
        if posted:
            post(fed, range(12), 2.0**t, VISITS)
            if t == 2:  # what was posted comes first, also where it is lost
                for reply in ask(fed, range(12), 2.0**t / 2, VISITS):
                    assert float(reply.values["visits"]) == 1 + 2 + 4 + 2
            r = fed.collect(12)
        else:
            r = ask(fed, range(12), 2.0**t, VISITS)
        extra = 2.0 if posted and t > 2 else 0.0
        assert all(float(reply.values["visits"]) == 2.0 ** (t + 1) - 1 + extra for reply in r)
    assert 10 < fed.ledger.lost_tasks < 62
    final = {float(memory["visits"]) for memory in fed.transport.executor.memories.values()}
    assert final == {31.0 + (2.0 if posted else 0.0)}
    assert fed.ledger.phases["visits"].samples == 2 * 12 * (6 if posted else 5)


def test_a_collect_takes_what_there_is_and_too_few_replies_end_an_ask() -> None:
    fed = federation(
        [2] * 6, environment={"delay": Constant(), "faults": Faults(drop=0.9), "min_replies": 3}
    )
    post(fed, [0, 1], 1.0)
    r = fed.collect(6)
    assert (len(r), r.idle, fed.in_flight, fed.ledger.lost_tasks) == (0, [0, 1], {}, 2)
    with pytest.raises(QuorumError, match="phase 'probe', round 1: no reply was accepted"):
        r.mean("own")
    with pytest.raises(
        QuorumError, match=r"round 2: [012] of 6 replies were accepted, at least 3 needed"
    ):
        ask(fed, range(6), 1.0)
    task = fb.tasks.load("quadratic", clients=4)
    environment = fb.Environment(faults=Faults(drop=0.9), min_replies=4)
    result = fb.solve(task.problem, task.clients, rounds=5, environment=environment)
    assert result.status == "diverged"
    assert "at least 4 needed" in result.reason


def test_who_is_busy_or_away_is_not_sampled() -> None:
    environment = {"participation": 2, "min_replies": 2, "delay": Constant(4.0)}
    fed = federation([2] * 8, environment=environment)
    post(fed, [0, 2, 5], 1.0)
    cohorts = [fed.sample() for _ in range(1000)]
    assert all(len(set(cohort)) == 2 for cohort in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten(), minlength=8).double()
    assert counts[[0, 2, 5]].sum() == 0
    free = counts[[1, 3, 4, 6, 7]]
    assert (
        float(((free - 400) ** 2 / 400).sum()) < 18.5
    )  # chi-square, 4 degrees of freedom, p = .001
    fed.transport.free_at = {client: 10.0 + client for client in range(7)}
    assert sorted(fed.sample()) == [0, 7], "time passes until two are there"
    assert fed.now == 10.0
    cohorts = []
    for _ in range(200):  # everyone is back at the same moment
        fed.transport.free_at = dict.fromkeys(range(8), fed.now + 1)
        cohorts += fed.sample()
    counts = torch.bincount(torch.tensor(cohorts), minlength=8).double()
    assert fed.now == 210.0
    assert (
        float(((counts - 50) ** 2 / 50).sum()) < 24.4
    )  # chi-square, 7 degrees of freedom, p = .001


# Going on


def reload(fed: Federation) -> Any:
    """Its snapshot, through a file."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder, "checkpoint"), fed.snapshot())
        return checkpoint.load(Path(folder, "checkpoint"))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    cut=st.integers(1, 9),
    phase=st.sampled_from([PROBE, VISITS]),
    ahead=st.sampled_from([1, 2, 1000]),
    moment=st.sampled_from(["between", "in flight"]),
)
def test_a_restart_at_any_moment_changes_no_bit(
    seed: int,
    cut: int,
    phase: Phase,
    ahead: int,
    moment: str,
) -> None:
    def fresh() -> Federation:
        return federation(
            [4, 4, 5, 4, 4, 5], environment=conditions(delay=Pareto(1.0, 1.2)), seed=seed
        )

    whole, stopped, resumed = fresh(), fresh(), fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual, "AHEAD", ahead)
        seen = play(whole, range(10), phase=phase)[cut:]
        play(stopped, range(cut), phase=phase)
        if moment == "in flight":
            stopped.iteration = cut
            post(stopped, [i for i in range(6) if i not in stopped.in_flight], float(cut), phase)
        resumed.restore(reload(stopped))
        for other in (stopped, resumed):
            close(play(other, range(cut, 10), phase=phase), seen, 0.0)
            close(other.snapshot(), whole.snapshot(), 0.0)
            assert other.ledger == whole.ledger
        assert stopped.records() == resumed.records() == whole.records()


@pytest.mark.parametrize("lr_x", [0.05, lambda t: 0.05 / (1 + t)])
def test_a_run_without_a_barrier_goes_on_with_the_same_bits(lr_x: Any, tmp_path: Path) -> None:
    task = fb.tasks.load("quadratic", clients=8, samples=4, noise=1.0)
    environment = fb.Environment(
        **conditions(local_steps=(1, 3), faults=Faults(duplicate=0.3, drop=0.2))
    )

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        options = {
            "rounds": rounds,
            "environment": environment,
            "out": tmp_path / folder,
            "resume": resume,
        }
        return fb.solve(task.problem, task.clients, Async(lr_x=lr_x), **options)

    for rounds in (3, 4, 9):
        resumed = solve(rounds, "stopped", resume=rounds > 3)
    whole = solve(9, "whole")
    assert all(map(torch.equal, tensors((resumed.x, resumed.y)), tensors((whole.x, whole.y))))
    assert [m["virtual_s"] for m in resumed.history] == [m["virtual_s"] for m in whole.history]
    assert whole.history[-1]["staleness"] >= 1


def test_after_a_restart_the_same_tasks_can_be_stacked() -> None:
    """Stacks round differently: only tasks of one iteration have equal phases, as before."""
    task = fb.tasks.load("quadratic", clients=6)
    environment = fb.Environment(delay=LogNormal())
    runs = []
    for _ in range(2):
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        runs.append(Run(Async(lr_x=lambda t: 0.1 / (t + 1)), fed, {}))
    for _ in range(3):
        runs[0].advance()
    runs[1].fed.restore(reload(runs[0].fed))
    phases = [{i: task.broadcast.phase for i, task in run.fed.in_flight.items()} for run in runs]
    assert 1 < len(set(phases[0].values())) < 6
    assert phases[0] == phases[1]
    stacks = []
    for run in runs:
        executor = run.fed.transport.executor
        tasks = list(run.fed.in_flight.values())
        list(executor.run(tasks))
        stacks.append([[task.client for task in chunk] for chunk in executor._chunks(tasks)])
    assert stacks[0] == stacks[1]
    assert 1 < len(stacks[0]) < 6


def test_an_interrupted_iteration_leaves_no_trace() -> None:
    task = fb.tasks.load("quadratic", clients=6, samples=4, noise=1.0)

    def run() -> Run:
        environment = fb.Environment(**conditions(faults=Faults(duplicate=0.4, leave=0.3)))
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(Async(), fed, {"rounds": 7})

    whole, stopped = run(), run()
    list(whole)
    post_, calls = stopped.fed.post, iter(range(100))

    def interrupt(*args: Any, **kwargs: Any) -> None:
        post_(*args, **kwargs)
        if next(calls) in (4, 9):
            raise KeyboardInterrupt

    stopped.fed.post = interrupt  # type: ignore[method-assign]
    for _ in range(3):
        list(stopped)
        stopped.status = "completed"
    assert all(map(torch.equal, tensors(stopped.state), tensors(whole.state)))
    before, after = ({**run.fed.ledger.__dict__, "wall_s": 0} for run in (whole, stopped))
    assert before == after
    assert (stopped.fed.now, stopped.fed.iteration) == (whole.fed.now, whole.fed.iteration)


OWN = """
from fedbilevel import algorithms, tasks
from tests.support.asynchronous import Async

def quadratic(seed: int = 0):
    return tasks.load("quadratic", clients=5, samples=3, noise=0.3, seed=seed)

algorithms.register("async")(type("Async", (Async,), {}))
"""


def test_a_run_on_the_clock_killed_twice(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(algorithms, "_registry", dict(algorithms._registry))
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "own_clock.py", OWN)
    text = """
    task = "own_clock:quadratic"
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
    file, run, whole = write(tmp_path / "a.toml", text), tmp_path / "run", tmp_path / "whole"
    done("run", file, "--out", whole)
    for wanted in (5, 16):
        process = fork("run", file, "--out", run, "--resume", "--quiet", cwd=tmp_path)
        wait(lambda wanted=wanted: lines(run) >= wanted, 60, "no progress")
        time.sleep(0.001 * wanted)
        process.kill()
        process.join()
        assert not (run / "summary.json").exists()
    done("run", file, "--out", run, "--resume")
    same(run, whole)


# Wrong input


def test_wrong_calls_are_refused_in_one_sentence() -> None:
    fed = federation(environment={"delay": Constant()})
    post(fed, [0, 1], 1.0)
    for wrong, sentence in (
        (
            lambda: post(fed, [2, 1], 1.0),
            "client 1 would have two tasks in flight; it can have one at a time",
        ),
        (
            lambda: post(fed, [2, 2], 1.0),
            "client 2 would have two tasks in flight; it can have one at a time",
        ),
        (
            lambda: post(fed, [2], 1.0, VISITS),
            "phase 'visits' must wait: tasks of 'probe' are in flight",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            wrong()
    with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
        fed.collect(0)
    with pytest.raises(ValueError, match="client is 3; it must be 0 to 2"):
        post(fed, [3], 1.0)
    assert len(fed.collect(5)) == 2
    with pytest.raises(
        RuntimeError, match="nothing is in flight, so nothing can be collected; post a task first"
    ):
        fed.collect()
    post(fed, [0], 1.0, VISITS)
    assert len(fed.collect(1)) == 1
    fed.post(PROBE, [1], scale=1.0)
    with pytest.raises(RuntimeError, match=r"^client 1, phase 'probe', round 3: .*not 'own'$"):
        fed.collect(1)


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (Constant, {"mean": 0}, "mean is 0; it must be above 0"),
        (LogNormal, {"sigma": -1.0}, "sigma is -1.0; it must be above 0"),
        (Pareto, {"shape": 1}, "shape is 1; it must be above 1, or there is no mean"),
        (Stragglers, {"clients": 0}, "clients is 0; it must be at least 1"),
        (Stragglers, {"clients": 1, "slowdown": 0.5}, "slowdown is 0.5; it must be at least 1"),
        (Faults, {"drop": 1.5}, "drop is 1.5; it must be in [0, 1]"),
        (
            Faults,
            {"drop": 0.5, "corrupt": 0.5},
            "drop is 0.5 and corrupt is 0.5; some replies must get through",
        ),
        (Faults, {"away_s": 0.0}, "away_s is 0.0; it must be above 0"),
        (
            fb.Environment,
            {"delay": 2.0},
            "delay is 2.0; it must be one of fedbilevel.delays, or None",
        ),
        (fb.Environment, {"faults": 0.1}, "faults is 0.1; it must be a delays.Faults"),
        (
            fb.Environment,
            {"deadline": 2.0},
            "deadline is 2.0 but delay is None; without delays there are none",
        ),
        (
            fb.Environment,
            {"delay": Constant(), "deadline": -1.0},
            "deadline is -1.0; it must be above 0",
        ),
        (
            fb.Environment,
            {"faults": Faults(leave=0.5)},
            "faults.leave is 0.5 but delay is None; without delays no time passes",
        ),
    ],
)
def test_wrong_conditions_are_refused_in_one_sentence(
    kind: Any, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(sentence)}$"):
        kind(**given)


def test_more_stragglers_than_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^stragglers.clients is 4; there are only 3 clients$"):
        federation(environment={"delay": Constant(), "stragglers": Stragglers(4)})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "delay = 2.0",
            "environment.delay is 2.0; a table must have model = 'constant' or 'lognormal' or 'pareto'",
        ),
        (
            'delay = { model = "gamma" }',
            "a table must have model = 'constant' or 'lognormal' or 'pareto' or 'trace'",
        ),
        (
            'delay = { model = "pareto", sigma = 1.0 }',
            "unknown key 'environment.delay.sigma'; allowed are mean, shape",
        ),
        ('delay = { model = "constant", mean = "long" }', "environment.delay.mean is 'long'; "),
        (
            'delay = { model = "constant", mean = -1 }',
            "environment.delay.mean is -1; it must be above 0",
        ),
        ('delay = { model = "trace" }', "environment.delay.path is missing"),
        ('delay = { model = "trace", path = "no.csv" }', "no.csv"),
        ("stragglers = 3", "environment.stragglers is 3; it must be a table"),
        ("stragglers = { slowdown = 2 }", "environment.stragglers.clients is missing"),
        (
            "stragglers = { clients = 1 }",
            "[environment] stragglers is Stragglers(clients=1, slowdown=5.0) but delay",
        ),
        (
            "deadline = 3.0",
            "[environment] deadline is 3.0 but delay is None; without delays there are none",
        ),
        (
            'deadline = "soon"\ndelay = { model = "constant" }',
            "environment.deadline is 'soon'; it must be a number",
        ),
        ("faults = { dorp = 0.1 }", "unknown key 'environment.faults.dorp'; allowed are drop"),
        ("faults = { drop = 2.0 }", "environment.faults.drop is 2.0; it must be in [0, 1]"),
    ],
)
def test_wrong_tables_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(configs.ConfigError) as error:
        resolve(f'task.name = "quadratic"\n[environment]\n{text}')
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def resolve(text: str, **options: Any) -> configs.Config:
    return configs.resolve("a.toml", tomllib.loads(text), **options)


def test_conditions_survive_being_written_down(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.csv", "1.0\n2.0\n")
    delay = st.sampled_from(
        [
            'delay = { model = "constant", mean = 3 }',
            'delay = { model = "lognormal", sigma = 0.25 }',
            'delay = { model = "pareto", shape = 1.5 }',
            f'delay = {{ model = "trace", path = "{trace}" }}',
        ]
    )
    rest = st.lists(
        st.sampled_from(
            [
                "stragglers = { clients = 2, slowdown = 3 }",
                "deadline = 9",
                "faults = { drop = 0.1, leave = 1 }",
            ]
        ),
        unique=True,
    )

    @settings(max_examples=25, deadline=None)
    @given(delay, rest)
    def check(delay: str, rest: list[str]) -> None:
        first = resolve("\n".join(['task.name = "quadratic"', "[environment]", delay, *rest]))
        again = resolve(tomli_w.dumps(first.table))
        assert again.table == first.table
        assert again.environment == first.environment

    check()


def test_a_section_adds_to_the_conditions_of_all() -> None:
    text = """
    task.name = "quadratic"
    environment = { delay = { model = "constant" } }
    algorithms.fedbio.environment = { stragglers = { clients = 2 } }
    """
    assert resolve(text).environment.stragglers is None
    assert resolve(text, algorithm="fedbio").environment.stragglers == Stragglers(2)


def test_smoke_has_clients_enough_for_its_stragglers() -> None:
    text = 'task.name = "quadratic"\nenvironment = { delay = { model = "constant" }, stragglers = { clients = 5 } }'
    config = resolve(text, smoke=True)
    config.environment.check(len(config.load_task(None).clients))
