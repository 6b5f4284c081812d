"""Which tasks an executor runs as one stack; numbers alone do not show it."""

from __future__ import annotations

from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.federation.delays import Constant, LogNormal
from fedbilevel.runs.run import Run
from tests.support.asynchronous import Async
from tests.support.probe import ask_each, federation, post, snapshot_from_file


def test_chunks_keep_to_the_memory_and_change_nothing() -> None:
    whole = federation(sizes=[4] * 9)
    replies = ask_each(whole, range(9))
    footprint = next(iter(whole.transport.executor.footprints.values()))
    small = federation(sizes=[4] * 9, memory=2 * footprint)
    sizes = []
    executor = small.transport.executor
    run_stack = executor._run_stack

    def record_size(tasks: Any, *rest: Any) -> Any:
        sizes.append(len(tasks))
        return run_stack(tasks, *rest)

    executor._run_stack = record_size
    mean = ask_each(small, range(9)).mean("mean")
    assert mean["x"] == pytest.approx(float(replies.mean("mean")["x"]))
    assert sizes[1:] == [2, 2, 2, 2, 1]  # the first stack measured the footprint
    assert small.ledger.phases == whole.ledger.phases


def test_posted_tasks_run_as_one_stack_and_a_waiting_reply_does_not_keep_it(
    monkeypatch: Any,
) -> None:
    fed = federation([4] * 5, environment={"delay": Constant()})
    stacks: list[list[float]] = []
    executor = fed.transport.executor
    run = executor.run

    def record_stack(tasks: Any, **options: Any) -> Any:
        stacks.append([task.broadcast.message["scale"] for task in tasks])
        return run(tasks, **options)

    monkeypatch.setattr(executor, "run", record_stack)
    post(fed, [0, 1], 7.0)
    post(fed, [2, 3, 4], 8.0)
    assert [float(reply.values["own"]) for reply in fed.collect(2)] == [7, 7]
    waiting = [flight.reply[0] for flight in fed.transport.flights.values()]
    assert [row.untyped_storage().nbytes() for row in waiting] == [24] * 3
    assert [float(reply.values["own"]) for reply in fed.collect(3)] == [8, 8, 8]
    assert stacks == [[7, 7, 8, 8, 8]]


def test_the_same_tasks_are_stacked_after_a_restart() -> None:
    """Other stacks would round differently. A stack has one phase: tasks of one iteration."""
    task = fb.tasks.load("quadratic", clients=6)
    environment = fb.Environment(delay=LogNormal())
    runs = []
    for _ in range(2):
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        runs.append(Run(Async(lr_x=lambda t: 0.1 / (t + 1)), fed, {}))
    for _ in range(3):
        runs[0].advance()
    runs[1].fed.restore(snapshot_from_file(runs[0].fed))
    phases = []
    stacks = []
    for run in runs:
        tasks = list(run.fed.in_flight.values())
        phases.append({task.client: task.broadcast.phase for task in tasks})
        executor = run.fed.transport.executor
        list(executor.run(tasks))
        stacks.append([[task.client for task in chunk] for chunk, _ in executor._chunks(tasks)])
    assert 1 < len(set(phases[0].values())) < 6
    assert phases[0] == phases[1]
    assert stacks[0] == stacks[1]
    assert 1 < len(stacks[0]) < 6
