"""The client: what it computes, remembers and sends, and what it refuses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.deploy.flower.wire import decode, encode
from fedbilevel.runs.run import Run
from fedbilevel.tasks import Task
from tests.support.flower import (
    DESCEND,
    HYPER_REPRESENTATION,
    QUADRATIC,
    FakeGrid,
    Handler,
    advance,
    only_for,
    own_data,
    own_task,
    real_federation,
    resolve_config,
    simulated_run,
)

pytestmark = pytest.mark.usefixtures("in_process")

OWN_DATA = "tests.support.flower:own_data"
OWN_TASK = "tests.support.flower:own_task"


def test_nodes_round_the_backbone_if_the_experiment_says_so() -> None:
    table = {
        **QUADRATIC,
        "task": {**HYPER_REPRESENTATION, "clients": 2},
        "data": {"name": "digits"},
        "algorithm": {"name": "simfbo"},
    }
    rounded = resolve_config({**table, "runtime": {"precision": "bf16", "mode": "loop"}})
    _, real = real_federation(FakeGrid(2), rounded)
    simulated = simulated_run(rounded)
    unrounded = simulated_run(resolve_config(table))
    advance(1, real, simulated, unrounded)
    expected = flatten(simulated.state.x)
    error = float((flatten(real.state.x) - expected).abs().max())
    effect_of_rounding = float((flatten(unrounded.state.x) - expected).abs().max())
    assert error < 1e-6 < effect_of_rounding


def samples_of(task: Task) -> list[Tensor]:
    samples: list[Tensor] = []
    for data in task.clients:
        for tensor in (*data.train, *data.val):
            samples += [row.reshape(-1) for row in tensor]
    return samples


def test_clients_send_only_what_their_phases_declare() -> None:
    """No tensor of a reply is a sample, and names and shapes are the declared ones."""
    grid = FakeGrid(4)
    replies: list[Message] = []

    def record(message: Message, handle: Handler) -> Message:
        reply = handle(message)
        replies.append(reply)
        return reply

    for node in grid.nodes:
        grid.behaviours[node] = record
    config = resolve_config(QUADRATIC)
    fed, run = real_federation(grid, config)
    run.advance()
    fed.transport.losses(run.state.x, run.state.y)
    samples = [sample for sample in samples_of(config.load_task(None)) if sample.numel() > 1]
    names = set()
    for reply in replies:
        values = decode(reply.content)
        names.add(tuple(sorted(values)))
        if "values" not in values:
            continue
        trees = {name: flatten(tree) for name, tree in values["values"].items()}
        shapes = {name: tuple(vector.shape) for name, vector in trees.items()}
        assert shapes == {"qx": (3,), "qy": (2,), "qz": (2,)}
        for vector in trees.values():
            assert not any(torch.equal(vector, sample) for sample in samples)
    assert names == {
        ("client", "samples"),
        ("cost", "number", "values"),
        ("client", "lower", "upper"),
    }


def task_message() -> dict[str, Any]:
    """A task that a client accepts."""
    config = resolve_config(QUADRATIC)
    x, y = config.load_task(None).problem.start
    return {
        "job": "ab",
        "table": config.table,
        "phase": DESCEND,
        "number": 0,
        "steps": 1,
        "key": 1,
        "round": 1,
        "iteration": 0,
        "kept": None,
        "shared": {"x": x, "y": y, "z": y},
        "kinds": {},
        "each": {},
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"phase": "os.system"}, "phase is 'os.system'"),
        ({"phase": {"phase": "os.system"}}, "phase is 'os.system', which is not registered here"),
        ({"phase": {**DESCEND, "command": "true"}}, "command"),
        ({"phase": {**DESCEND, "damping": "true"}}, "damping"),
        ({"phase": {"phase": DESCEND["phase"]}}, "lr_x"),
        ({"job": "../../etc"}, "not hexadecimal"),
        ({"shared": {"../x": 1}}, "not an identifier"),
        ({"steps": 0}, "steps is 0"),
        (
            {"table": {**QUADRATIC, "task": {"name": "os:system", "command": "true"}}},
            "allows only tasks that fedbilevel provides",
        ),
        ({"table": {**QUADRATIC, "algorithm": {"name": "simfbo", "lr_x": -1.0}}}, "lr_x"),
    ],
)
def test_a_node_refuses_what_a_server_must_not_ask(change: dict[str, Any], reason: str) -> None:
    grid = FakeGrid(1)
    accepted = task_message()
    for message in (accepted, {**accepted, **change}):
        grid.push_messages([Message(encode(**message), 100, "train")])
    assert not grid.replies["0"].has_error()
    assert reason in str(grid.replies["1"].error.reason)


def test_a_section_of_the_experiment_cannot_name_another_task(tmp_path: Path) -> None:
    grid = FakeGrid(1)
    written = tmp_path / "written"
    section = {"task": {"name": "os:system", "command": f"touch {written}"}}
    table = resolve_config(QUADRATIC).table
    sectioned = {**table, "algorithms": {"simfbo": section}}
    grid.push_messages([Message(encode(job="ab", table=sectioned), 100, "query")])
    assert not written.exists()
    grid.nodes[100]["task"] = OWN_TASK
    grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    assert f"this node allows '{OWN_TASK}'" in str(grid.replies["1"].error.reason)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"name": "harm:Method"}},
        {"algorithms": {"harm:Method": {}}},
        {"algorithms": {"simfbo": {"algorithm": "harm:Method"}}},
        {"compare": ["harm:Method"]},
        {"algorithm": {"name": "harm:Method"}, "code": "CODE"},
    ],
)
def test_a_node_imports_no_algorithm_that_it_was_sent(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "written"
    (tmp_path / "harm.py").write_text(f"open({str(written)!r}, 'w')\nMethod = 1\n")
    if change.get("code"):
        change = {**change, "code": str(tmp_path)}
    else:
        monkeypatch.syspath_prepend(tmp_path)
    grid = FakeGrid(1)
    table = {**resolve_config(QUADRATIC).table, **change}
    grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    assert "this node allows registered ones" in str(grid.replies["0"].error.reason)
    assert not written.exists()


@pytest.mark.parametrize("section", [None, "simfbo", "fednest"])
def test_a_node_opens_no_path_that_it_was_sent(section: str | None, tmp_path: Path) -> None:
    """Not under any condition, those included that somebody will add."""
    secret = tmp_path / "secret.csv"
    secret.write_text("patient 17\n")
    table = resolve_config(QUADRATIC).table
    grid = FakeGrid(1)
    with files_opened() as opened:
        for field in dataclasses.fields(fb.Environment):
            condition = {field.name: {"model": "trace", "path": str(secret)}}
            if section is None:
                changed = {**table, "environment": condition}
            else:
                changed = {**table, "algorithms": {section: {"environment": condition}}}
            grid.push_messages([Message(encode(job="ab", table=changed), 100, "query")])
    assert len(grid.replies) == len(dataclasses.fields(fb.Environment))
    assert all(reply.has_error() for reply in grid.replies.values())
    assert str(secret) not in opened


def test_a_node_opens_no_file_for_a_task_that_it_was_sent(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("patient 17\n" * 1000)
    task = {"name": "mixture", "owners": ["secret"], "target": "secret", "text": str(tmp_path)}
    table = {**resolve_config(QUADRATIC).table, "task": task}
    grid = FakeGrid(1)
    with files_opened() as opened:
        grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    reason = str(grid.replies["0"].error.reason)
    assert reason == "task.text is a path; this node opens none that it was sent"
    assert str(secret) not in opened


@contextmanager
def files_opened() -> Iterator[list[str]]:
    """Collect the names of the files that this process opens within the block."""
    opened: list[str] = []
    active = [True]

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if active and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(note)  # it cannot be removed
    try:
        yield opened
    finally:
        active.clear()


@pytest.mark.parametrize(
    "condition",
    [
        {"delay": {"model": "constant"}},
        {"inner_delay": {"model": "constant"}},
        {"stragglers": {"clients": 1}},
        {"deadline": 1.0},
        {"faults": {"drop": 0.5}},
        {"topology": "ring"},
    ],
)
def test_a_node_refuses_conditions_of_the_simulator(condition: dict[str, Any]) -> None:
    table = dict(resolve_config(QUADRATIC).table)
    table["environment"] = {**table["environment"], **condition}
    grid = FakeGrid(1)
    grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    (name,) = condition
    assert f"environment.{name} is for simulations" in str(grid.replies["0"].error.reason)


def broken_data(partition: int) -> None:
    float("patient 17")


@pytest.mark.parametrize("setting", ["client-data", "task"])
def test_an_error_of_the_node_is_in_its_log_and_not_in_its_reply(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of an error may quote the data of the client, or its code."""
    (tmp_path / "clinic.py").write_text("def load(client):\n    pass\nfloat('patient 17')\n")
    monkeypatch.syspath_prepend(tmp_path)
    grid = FakeGrid(1)
    grid.nodes[100][setting] = {
        "client-data": "tests.deploy.flower.test_client:broken_data",
        "task": "clinic:load",
    }[setting]
    table = dict(resolve_config(QUADRATIC).table)
    if setting == "task":
        table["task"] = {"name": "clinic:load"}
    grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    reason = str(grid.replies["0"].error.reason)
    assert reason == "the client failed (ValueError); the log of its node says why"
    assert "patient 17" in caplog.text


@pytest.mark.parametrize("algorithm", [{"name": "afbo", "memory": "client"}, {"name": "fedbioacc"}])
def test_a_task_that_is_sent_twice_changes_the_memory_of_the_client_once(
    algorithm: dict[str, Any],
) -> None:
    replies: list[tuple[Tree, Tree]] = []

    def answer_twice(message: Message, handle: Handler) -> Message:
        first = decode(handle(message).content)["values"]
        reply = handle(message)
        second = decode(reply.content)["values"]
        for name, tree in first.items():
            if isinstance(tree, Tree):
                replies.append((tree, second[name]))
        return reply

    grid = FakeGrid(4)
    grid.behaviours[101] = only_for("train", answer_twice)
    config = resolve_config({**QUADRATIC, "algorithm": algorithm})
    _, run = real_federation(grid, config)
    simulated = simulated_run(config)
    advance(3, run, simulated)
    assert replies
    for first, second in replies:
        assert torch.equal(flatten(first), flatten(second))
    assert torch.allclose(flatten(run.state.x), flatten(simulated.state.x), rtol=0, atol=1e-12)


def test_clients_load_their_own_data_and_the_server_needs_none() -> None:
    grid = FakeGrid(3)
    for node_config in grid.nodes.values():
        node_config |= {"client-data": OWN_DATA, "task": OWN_TASK}
    config = resolve_config({"task": {"name": OWN_TASK}, "algorithm": {"name": "simfbo"}})
    fed, run = real_federation(grid, config, clients=3)
    clients = [own_data(partition) for partition in range(3)]
    simulated = Run(config.algorithm, fb.simulated_federation(own_task().problem, clients), {})
    advance(1, run, simulated)
    assert torch.allclose(flatten(run.state.x), flatten(simulated.state.x), rtol=0, atol=1e-12)
    assert fed.transport.present == [0, 1, 2]
