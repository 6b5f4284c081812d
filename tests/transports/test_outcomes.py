"""Stragglers and faults on the virtual clock: drawn as stated, absorbed and counted."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.federation import QuorumError
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Stragglers
from tests.support.probe import VISITS, Probe, ask, federation, post


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 999), data=st.data())
def test_the_stated_number_of_stragglers_is_slow_throughout(n: int, seed: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    environment = {"delay": Constant(1.0), "stragglers": Stragglers(count, 7.0)}
    fed = federation([2] * n, environment=environment, seed=seed)
    for _ in range(3):
        post(fed, range(n), 0.0)
        durations = {outcome.client: outcome.due - fed.now for outcome in fed.transport.scheduled}
        slow = {client for client, seconds in durations.items() if seconds == 7.0}
        quick = {client for client, seconds in durations.items() if seconds == 1.0}
        assert quick == set(range(n)) - slow
        assert slow == fed.transport.outcomes.slow_clients
        assert len(slow) == count
        fed.collect(n)
    assert fed.now == 21.0


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("fault", ["drop", "duplicate", "corrupt", "leave"])
def test_a_fault_is_absorbed_and_counted(fault: str, posted: bool) -> None:
    environment = {"delay": Constant(1.0), "faults": Faults(**{fault: 0.25}, away_s=50.0)}
    fed = federation([2] * 40, environment=environment)
    accepted = 0
    refused = []
    tasks = 12 * 40
    for t in range(12):
        if posted:
            post(fed, range(40), float(t))
            replies = fed.collect(40)
        else:
            replies = ask(fed, range(40), float(t))
        assert all(float(reply.values["own"]) == t for reply in replies)
        assert sorted(replies.idle) == list(range(40)), "everyone can be sent the next task"
        accepted += len(replies)
        refused += replies.refused
    assert fed.ledger.refused_replies == len(refused)
    lost = fed.ledger.lost_tasks
    occurred = {
        "drop": lost,
        "leave": (fed.now - 12) / 50,
        "corrupt": len(refused),
        "duplicate": len(refused),
    }
    if fault == "leave":
        assert (lost, len(refused), accepted) == (0, 0, tasks)
        assert 1 <= occurred[fault] <= 12, "a client that is away begins when it returns"
        return
    assert abs(occurred[fault] - tasks / 4) < 5 * math.sqrt(tasks * 3 / 16)
    corrupted = len(refused) if fault == "corrupt" else 0
    assert accepted == tasks - lost - corrupted
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
    assert cost.bytes_down == 0, "plain numbers are not counted"


def test_a_corrupted_reply_of_whole_numbers_has_a_wrong_shape() -> None:
    class Counting(Probe):
        reply: ClassVar = {"count": "scalar"}

        def finish(self, carry: Any) -> dict[str, Any]:
            return {"count": carry[2].long()}

    fed = federation([2] * 20, environment={"faults": Faults(corrupt=0.5)})
    replies = ask(fed, range(20), 3.0, Counting())
    assert 0 < len(replies.refused) < 20
    assert all("another shape" in why for why in replies.refused)
    assert replies.mean("count") == 3.0


def test_a_lost_reply_is_remembered_and_its_bytes_are_not_counted() -> None:
    fed = federation(sizes=[4] * 8, environment={"faults": Faults(drop=0.5)})
    replies = ask(fed, range(8), 1.0, VISITS)
    assert 0 < len(replies) < 8
    assert fed.ledger.totals()["bytes_up"] == 8 * len(replies)
    assert fed.ledger.lost_tasks == 8 - len(replies)
    assert sorted(fed.transport.executor.memories) == list(range(8))


@pytest.mark.parametrize(("posted", "deadline"), [(False, None), (False, 1.0), (True, None)])
def test_lost_tasks_are_computed_once_where_clients_remember(
    posted: bool, deadline: float | None
) -> None:
    """Every task adds a power of two to its client's memory: the sum tells which tasks ran."""
    environment = {"delay": LogNormal(), "deadline": deadline, "faults": Faults(drop=0.5)}
    fed = federation([2] * 12, environment=environment)
    extra = 0.0
    for t in range(5):
        if posted:
            post(fed, range(12), 2.0**t, VISITS)
            if t == 2:  # a posted task comes before a later `ask`, even if it is lost
                for reply in ask(fed, range(12), 2.0**t / 2, VISITS):
                    assert float(reply.values["visits"]) == 1 + 2 + 4 + 2
            replies = fed.collect(12)
        else:
            replies = ask(fed, range(12), 2.0**t, VISITS)
        for reply in replies:
            assert float(reply.values["visits"]) == 2.0 ** (t + 1) - 1 + extra
        if posted and t == 2:
            extra = 2.0
    assert 10 < fed.ledger.lost_tasks < 62
    memories = {float(memory["visits"]) for memory in fed.transport.executor.memories.values()}
    assert memories == {31.0 + extra}
    assert fed.ledger.phases["visits"].samples == 2 * 12 * (6 if posted else 5)


def test_a_collect_returns_what_there_is_and_too_few_replies_end_an_ask() -> None:
    environment = {"delay": Constant(), "faults": Faults(drop=0.9), "min_replies": 3}
    fed = federation([2] * 6, environment=environment)
    post(fed, [0, 1], 1.0)
    replies = fed.collect(6)
    assert (len(replies), replies.idle, fed.in_flight, fed.ledger.lost_tasks) == (0, [0, 1], {}, 2)
    with pytest.raises(QuorumError, match="phase 'probe', round 1: no reply was accepted"):
        replies.mean("own")
    with pytest.raises(
        QuorumError, match=r"round 2: [012] of 6 replies were accepted, at least 3 needed"
    ):
        ask(fed, range(6), 1.0)


def test_a_run_whose_replies_are_too_few_ends_as_diverged() -> None:
    task = fb.tasks.load("quadratic", clients=4)
    environment = fb.Environment(faults=Faults(drop=0.9), min_replies=4)
    result = fb.solve(task.problem, task.clients, rounds=5, environment=environment)
    assert result.status == "diverged"
    assert "at least 4 needed" in result.reason
