"""Federations on Flower, with the messages but without the processes: what is sent, checked, refused and counted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cryptography import x509
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms.afbo import WorkOnDifferences
from fedbilevel.cli import _with_clients, main
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.deploy.flower import client, keys, warm
from fedbilevel.deploy.flower.deployment import Deployment, split
from fedbilevel.deploy.flower.wire import WireError, decode, encode
from fedbilevel.experiments import config as configs
from fedbilevel.federation import QuorumError
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stages import Clip
from fedbilevel.runs.run import Run
from fedbilevel.tasks import Task
from tests.conformance.cases import CASES
from tests.support.flower import (
    Grid,
    clock,
    config,
    error,
    federation,
    only,
    own_data,
    own_task,
    quickly,
    simulated,
)

TABLE: dict[str, Any] = {
    "task": {"name": "quadratic", "clients": 4, "dim_x": 3, "dim_y": 2, "samples": 6, "noise": 0.5},
    "algorithm": {"name": "simfbo"},
    "environment": {"local_steps": [1, 4], "batch_size": 2},
    "rounds": 5,
    "every": 5,
}


DESCEND = algorithms.SimFBO().descend().plain()


@pytest.fixture(autouse=True)
def _state(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    client._workers.clear()
    quickly(monkeypatch)


def test_a_message_comes_back_bit_for_bit() -> None:
    values = {
        "x": Tree(
            w=torch.randn(3, 4, dtype=torch.float64), b=torch.tensor(2.5, dtype=torch.float64)
        ),
        "half": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 3),
        "numbers": (1, -(2**62), 0.1, True, None, "ä"),
        "nested": {"said": {3: (1, Tree(w=torch.arange(4)))}},
    }
    back = decode(encode(**values))
    assert back["numbers"] == values["numbers"]
    assert torch.equal(back["x"]["w"], values["x"]["w"])
    assert back["x"]["b"].shape == ()
    assert torch.equal(back["half"], values["half"])
    assert back["empty"].shape == (0, 3)
    assert torch.equal(back["nested"]["said"][3][1]["w"], torch.arange(4))


def _content(header: Any, **arrays: Any) -> RecordDict:
    text = header if isinstance(header, str) else json.dumps(header)
    return RecordDict({"tensors": ArrayRecord(arrays), "header": ConfigRecord({"json": text})})


GOOD = {"version": 2, "tensors": [["float32", [2]]], "values": {"dict": [["x", {"tensor": "0"}]]}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_content("{"), "cannot be read"),
        (
            _content({**GOOD, "version": 1}, float32=Array(np.zeros(2, "f4"))),
            "version 1; this side speaks 2",
        ),
        (_content(GOOD), "cannot be read"),
        (_content(GOOD, float32=Array(np.zeros(1, "f4"))), "more float32 numbers than there are"),
        (_content(GOOD, float32=Array(np.zeros(3, "f4"))), "does not tell of"),
        (_content(GOOD, float32=Array(np.zeros(2, "f8"))), "holds float64"),
        (
            _content(GOOD, float32=Array("float32", (2,), "numpy.ndarray", b"\x80\x04N.")),
            "cannot be read",
        ),
        (
            _content({**GOOD, "tensors": [["float32", [-2]]]}, float32=Array(np.zeros(2, "f4"))),
            "shape",
        ),
        (_content(GOOD, object=Array(np.zeros(2, "f4"))), "array of 'object'"),
        (
            _content('{"version":2,"tensors":[],"values":' + "[" * 900 + "]" * 900 + "}"),
            "RecursionError",
        ),
        (_content({**GOOD, "tensors": [], "values": 3}), "names no values"),
        (_content(" " * (2**20 + 1)), "at most"),
        (RecordDict({"a": ConfigRecord({})}), "other records"),
    ],
)
def test_what_is_not_a_message_is_refused_in_one_line(content: RecordDict, why: str) -> None:
    with pytest.raises(WireError, match=why) as caught:
        decode(content)
    assert "\n" not in str(caught.value)


def test_the_wire_carries_little_more_than_the_tensors() -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    tree = Tree({f"layer{j}.weight": torch.randn(40, 100) for j in range(40)})
    Grid(1)
    found = config(TABLE)
    sent = Message(
        encode(job="a" * 16, table=found.table, phase=DESCEND, shared={"x": tree}), 1, "train"
    )
    wire = sum(len(part.deflate()) for part in get_all_nested_objects(sent).values())
    assert tree.nbytes == 640_000
    assert wire < 1.05 * tree.nbytes


@pytest.mark.parametrize(
    "name", [n for n in algorithms.names() if "shared" in algorithms.get(n).lower_levels]
)
def test_every_method_moves_as_in_simulation(name: str) -> None:
    table = {
        **TABLE,
        "algorithm": {"name": name},
        "environment": {"local_steps": 2, "batch_size": 2},
    }
    for key, value in CASES[name].settings.items():
        schedule = (
            {"schedule": type(value).__name__.lower(), **vars(value)} if callable(value) else None
        )
        table["algorithm"][key] = schedule or value
    real, pretended = federation(Grid(4), config(table))[1], simulated(config(table))
    for run in (real, pretended):
        for _ in range(3):
            run.advance()
    for value, expected in zip(real.state, pretended.state, strict=True):
        if isinstance(value, Tree):
            assert torch.allclose(flatten(value), flatten(expected), rtol=0, atol=1e-9)
    one, other = real.fed.ledger, pretended.fed.ledger
    assert one.phases == other.phases
    assert (one.refused_replies, one.lost_tasks) == (0, 0)
    told, expected = (run.fed.transport.losses(*run.state[:2]) for run in (real, pretended))
    assert told == pytest.approx(expected, abs=1e-9)


def test_nodes_round_the_backbone_where_the_experiment_says_so() -> None:
    table = {
        **TABLE,
        "task": {
            "name": "hyper-representation",
            "clients": 2,
            "model": "mlp",
            "hidden": 4,
            "samples": 60,
        },
        "data": {"name": "digits"},
        "algorithm": {"name": "simfbo"},
    }
    coarse = config(table | {"runtime": {"precision": "bf16", "mode": "loop"}})
    runs = federation(Grid(2), coarse)[1], simulated(coarse), simulated(config(table))
    for run in runs:
        run.advance()
    real, pretended, exact = (flatten(run.state.x) for run in runs)
    assert float((real - pretended).abs().max()) < 1e-6 < float((exact - pretended).abs().max())


def test_weights_by_samples_and_epochs_use_what_the_clients_say() -> None:
    table = {
        **TABLE,
        "task": {
            "name": "hyper-representation",
            "clients": 3,
            "model": "mlp",
            "hidden": 4,
            "samples": 60,
        },
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.5},
        "algorithm": {"name": "fednest", "lower_steps": "1 epoch"},
        "weights": "samples",
        "environment": {"batch_size": 4},
    }
    real, pretended = federation(Grid(3), config(table))[1], simulated(config(table))
    for run in (real, pretended):
        run.advance()
    assert torch.allclose(flatten(real.state.x), flatten(pretended.state.x), atol=1e-5)
    assert list(real.fed.weights()) == pytest.approx(list(pretended.fed.weights()))


def test_submodels_travel_cut() -> None:
    table = {
        **TABLE,
        "task": {"name": "loss-tuning", "clients": 4, "hidden": 8, "samples": 400},
        "data": {"name": "digits"},
        "algorithm": {"name": "rabo", "policy": "rolling", "lower_steps": 2},
        "environment": {"capacity": [1.0, 0.5], "batch_size": 8},
    }
    real, pretended = federation(Grid(4), config(table))[1], simulated(config(table))
    for run in (real, pretended):
        run.advance()
        run.advance()
    assert torch.allclose(flatten(real.state.x), flatten(pretended.state.x), atol=1e-5)
    assert real.fed.ledger.phases == pretended.fed.ledger.phases


def test_nothing_but_declared_messages_crosses() -> None:
    """No tensor of what the nodes answer holds a sample, and none has any name or shape but the declared ones."""
    grid = Grid(4)
    replies: list[Message] = []
    for node in grid.nodes:
        grid.odd[node] = lambda message, handle: (replies.append(handle(message)), replies[-1])[1]
    fed, run = federation(grid, config(TABLE))
    run.advance()
    fed.transport.losses(run.state.x, run.state.y)
    task = config(TABLE).load_task(None)
    samples = [
        row.reshape(-1)
        for data in task.clients
        for side in (data.train, data.val)
        for t in side
        for row in t
    ]
    kinds = set()
    for reply in replies:
        said = decode(reply.content)
        kinds.add(tuple(sorted(said)))
        trees = said.get("values", {})
        assert {name: flatten(tree).shape for name, tree in trees.items()} in (
            {},
            {"qx": (3,), "qy": (2,), "qz": (2,)},
        )
        for tree in trees.values():
            assert not any(
                torch.equal(flatten(tree), sample) for sample in samples if sample.numel() > 1
            )
    assert kinds == {
        ("client", "samples"),
        ("number", "took", "values"),
        ("client", "lower", "upper"),
    }


def _with(change: Any) -> Any:
    """A node that answers a task with something changed."""

    def act(message: Message, handle: Any) -> Message:
        said = decode(handle(message).content)
        return Message(encode(**change(said)), reply_to=message)

    return only("train", act)


def _values(**new: Any) -> Any:
    return lambda said: {**said, "values": {**said["values"], **new}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_values(qx=Tree(x=torch.full((3,), torch.nan, dtype=torch.float64))), "qx is not finite"),
        (_values(qx=Tree(x=torch.zeros(4, dtype=torch.float64))), "another shape"),
        (_values(qx=Tree(x=torch.zeros(3))), "another dtype"),
        (_values(qx=Tree({"../../x": torch.zeros(3, dtype=torch.float64)})), "another shape"),
        (_values(qx=3), "something else than tensors"),
        (
            lambda said: {
                **said,
                "values": {torch.zeros(2): torch.zeros(2), torch.ones(2): torch.zeros(2)},
            },
            "no text",
        ),
        (lambda said: {**said, "number": torch.zeros(40, 40)}, "number is"),
        (lambda said: {**said, "took": torch.zeros(3)}, "ind"),
        (_values(extra=torch.zeros(())), "it declares"),
        (lambda said: {**said, "number": 10**6}, "was given"),
        (lambda said: {**said, "took": {**said["took"], "flops": -1}}, "flops is -1"),
        (lambda said: {"values": said["values"]}, "no 'number'"),
    ],
)
@pytest.mark.parametrize("norm_bound", [None, 1e6])
def test_a_lie_is_refused_counted_and_named(
    norm_bound: float | None, change: Any, why: str, caplog: Any
) -> None:
    grid = Grid(4)
    grid.odd[102] = _with(change)
    fed, run = federation(grid, config(TABLE), Conduct(norm_bound=norm_bound))
    for _ in range(5):
        run.advance()
    assert fed.ledger.refused_replies == 3  # and then it is put aside
    assert fed.transport.aside == [2]
    lines = [line.message for line in caplog.records if "refused, client 2" in line.message]
    assert len(lines) == 3
    assert why in lines[0]
    assert "\n" not in lines[0]
    assert fed.ledger.lost_tasks == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"x": torch.zeros(3, dtype=torch.float64)},
        [torch.zeros(3, dtype=torch.float64)],
        {"x": {"z": torch.zeros(3, dtype=torch.float64)}},
    ],
    ids=["a dict", "a list", "a nest"],
)
@pytest.mark.parametrize("values", [(), ("qy",)], ids=["clipped", "not clipped"])
def test_a_lie_behind_a_stage_is_the_liars_alone(
    lie: Any, values: tuple[str, ...], caplog: Any
) -> None:
    """A stage may make any form of a value: what it does not undo is refused, and nobody else's reply with it."""
    grid = Grid(4)
    grid.odd[100] = _with(_values(qx=lie))
    clip = {"stage": "clip", "norm": 1e6, "values": list(values)}
    fed, run = federation(
        grid, config({**TABLE, "environment": {**TABLE.get("environment", {}), "stages": [clip]}})
    )
    for _ in range(4):
        run.advance()
    assert (fed.ledger.refused_replies, fed.transport.aside) == (3, [0])
    assert sum("refused, client 0" in line.message for line in caplog.records) == 3


def test_a_reply_beyond_norm_bound_is_clipped_to_it() -> None:
    """As in a simulation with the same stage; what is within the bound comes through as it is."""
    grid, bound = Grid(4), 0.05
    table = config(TABLE)
    fed, run = federation(grid, table, Conduct(norm_bound=bound))
    task = table.load_task(None)
    environment = dataclasses.replace(table.environment, stages=(Clip(norm=bound),))
    calm = fb.simulated_federation(
        task.problem, task.clients, environment, seed=table.experiment.seed
    )
    free = simulated(table)
    clipped = Run(table.algorithm, calm, {})
    for each in (run, clipped, free):
        for _ in range(3):
            each.advance()
    assert torch.allclose(flatten(run.state.x), flatten(clipped.state.x), rtol=0, atol=1e-12)
    assert not torch.allclose(flatten(run.state.x), flatten(free.state.x), rtol=0, atol=1e-3)
    x, y, z = run.state[:3]
    for said, taken in ((1e9, bound), (0.01, 0.01)):
        grid.odd[102] = _with(
            _values(qx=Tree(x=torch.tensor([0.0, 0.0, said], dtype=torch.float64)))
        )
        found = fed.ask(table.algorithm.descend(), [2], x=x, y=y, z=z).mean("qx")
        assert found["x"].tolist() == pytest.approx([0.0, 0.0, taken], rel=1e-12)
    assert (fed.ledger.refused_replies, fed.ledger.lost_tasks) == (0, 0)


@pytest.mark.parametrize("name", ["simfbo", "afbo", "fedbioacc"])
def test_a_bound_that_nobody_exceeds_changes_nothing(name: str) -> None:
    table = config({**TABLE, "algorithm": {"name": name}, "environment": {"local_steps": 2}})
    (fed, bounded), (_, free) = (
        federation(Grid(4), table, Conduct(norm_bound=bound)) for bound in (1e6, None)
    )
    for run in (bounded, free):
        for _ in range(3):
            run.advance()
    assert fed.ledger.refused_replies == 0
    assert torch.allclose(flatten(bounded.state.x), flatten(free.state.x), rtol=0, atol=1e-12)


def test_a_bound_is_refused_where_clients_remember_what_was_taken() -> None:
    """What they said and what the server took of it would not be the same."""
    table = config({**TABLE, "algorithm": {"name": "afbo", "memory": "client"}})
    with pytest.raises(ValueError, match=r"memory is 'client' and .*; memory must be 'server', or"):
        federation(Grid(4), table, Conduct(norm_bound=1e6))
    federation(Grid(4), table)[1].advance()


@pytest.mark.parametrize("norm_bound", [None, 1e6])
def test_one_client_of_a_longer_dtype_takes_no_other_along(
    norm_bound: float | None, caplog: Any
) -> None:
    """Stacked with the others, its reply would make all of them as long."""
    table = {
        **TABLE,
        "task": {
            "name": "hyper-representation",
            "clients": 3,
            "model": "mlp",
            "hidden": 4,
            "samples": 60,
        },
        "data": {"name": "digits"},
    }
    grid = Grid(3)
    grid.odd[101] = _with(
        lambda said: {
            **said,
            "values": {
                name: tree.map(torch.Tensor.double) for name, tree in said["values"].items()
            },
        }
    )
    fed, run = federation(grid, config(table), Conduct(norm_bound=norm_bound))
    run.advance()
    assert fed.transport.refusals == {1: 1}
    assert "client 1: replied with 'qx' of another dtype than torch.float32" in caplog.text
    assert {tensor.dtype for tensor in run.state.x.values()} == {torch.float32}


class Counting(Phase):
    """Replies with a number."""

    name = "counting"
    reply: ClassVar = {"count": "scalar"}

    def start(self, m: Any) -> Any:
        return m.steps

    def step(self, steps: Any, oracle: Any, batch: Any) -> Any:
        return steps

    def finish(self, steps: Any) -> dict[str, Any]:
        return {"count": steps}


@pytest.mark.parametrize(
    "count", [Tree({"": torch.tensor(1.0, dtype=torch.float64)}), torch.tensor(True)]
)
def test_what_is_no_scalar_is_refused(count: Any) -> None:
    """A tree whose only name is empty has the shape of one."""
    grid = Grid(4)
    fed, _ = federation(grid, config(TABLE))
    assert fed.ask(Counting(), range(4)).mean("count") == 1.0
    grid.odd[102] = _with(_values(count=count))
    replies = fed.ask(Counting(), range(4))
    assert [reply.client for reply in replies] == [0, 1, 3]
    assert fed.transport.refusals == {2: 1}


NUMBERS = {"base": torch.tensor(-1), "number": torch.tensor(0)}


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        (torch.tensor(-1), "'ticket' of another shape than the tree"),
        (Tree({"": torch.tensor(-1)}), "'ticket' of another shape than the tree"),
        (Tree(NUMBERS | {"base": torch.tensor([-1])}), "'ticket' of another shape than the tree"),
        (Tree(NUMBERS | {"base": torch.tensor(True)}), "'ticket' as torch.bool"),
    ],
    ids=["a number", "a tree that looks like a number", "another shape", "a truth value"],
)
def test_what_is_no_ticket_is_refused(ticket: Any, why: str, caplog: Any) -> None:
    """Numbers that a server goes on with: those that AFBO's clients send beside their differences."""
    table = {
        **TABLE,
        "algorithm": {"name": "afbo", "memory": "client"},
        "environment": {"participation": 3},
    }
    grid = Grid(4)
    grid.odd[102] = _with(_values(ticket=ticket))
    fed, run = federation(grid, config(table))
    for _ in range(5):
        run.advance()
    assert fed.transport.aside == [2]
    assert (fed.ledger.refused_replies, fed.ledger.lost_tasks) == (
        3,
        0,
    )  # what it is not sent is not lost
    assert why in caplog.text
    del grid.nodes[102]
    again, _ = federation(grid, config(table))
    again.restore(fed.snapshot())
    assert (again.transport.aside, again.transport.refusals) == ([2], {2: 3})
    again.weights()  # does not wait for it
    assert again.transport.members.samples[2] == 6
    work = run.algorithm.work(WorkOnDifferences)
    with pytest.raises(RuntimeError, match="two tasks in flight"):
        again.post(
            work,
            [0, 0],
            each=[{"ack": -1}] * 2,
            x=run.state.x,
            y=run.state.y,
            z=run.state.z,
            number=9,
        )


def test_nobody_left_ends_a_run_without_barriers_too() -> None:
    table = {**TABLE, "algorithm": {"name": "afbo"}, "rounds": 50}
    grid = Grid(4)
    for node in grid.nodes:
        grid.odd[node] = only("train", error(2))
    _, run = federation(grid, config(table))
    for _ in run:
        pass
    assert (run.status, run.reason) == (
        "diverged",
        "clients [0, 1, 2, 3] were put aside; 1 are needed",
    )


LOSSES = [float("nan"), float("-inf"), 10**400, True, "1", torch.zeros(2)]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: repr(loss)[:8])
def test_a_lie_about_losses_changes_nothing(loss: Any, caplog: Any) -> None:
    grid, alone = Grid(2), config(TABLE, **{"task.clients": 2})

    def lie(message: Message, handle: Any) -> Message:
        said = {**decode(handle(message).content), "upper": loss}
        return Message(encode(**said), reply_to=message)

    fed, run = federation(grid, alone)
    x, y = run.state[:2]
    grid.odd[101] = only("evaluate", error(2))
    expected = fed.transport.losses(x, y)  # of the other client
    grid.odd[101] = only("evaluate", lie)
    assert fed.transport.losses(x, y) == expected
    assert "client 1 did not tell its losses: its upper loss is" in caplog.text


def test_a_run_that_ends_for_want_of_clients_ends_at_once_and_is_measured(monkeypatch: Any) -> None:
    later, grid = clock(monkeypatch), Grid(2)

    def die(message: Message, handle: Any) -> None:
        del grid.nodes[101]
        later(20.0)

    grid.odd[101] = only("train", die)
    table = {**TABLE, "environment": {"min_replies": 2}}
    fed, run = federation(grid, config(table, **{"task.clients": 2}), Conduct(deadline_s=10.0))
    for _ in run:
        pass
    assert run.status == "diverged"
    assert "1 of 2 replies were accepted" in run.reason
    assert fed.now < 60


def test_a_reply_that_flower_cannot_read_is_refused() -> None:
    """Flower takes the first object that a node has sent for a message, whatever it is."""
    grid = Grid(4)
    grid.odd[102] = only("train", lambda message, handle: handle(message).content)
    fed, run = federation(grid, config(TABLE))
    run.advance()
    assert fed.transport.refusals == {2: 1}


def test_a_client_whose_code_fails_is_refused_like_one_that_lies(caplog: Any) -> None:
    grid = Grid(3)
    grid.nodes[102] = {"partition-id": 2, "client-data": "nowhere:load"}
    fed, _ = federation(grid, config(TABLE, **{"task.clients": 3}), Conduct(start_clients=2))
    fed.weights()
    assert fed.transport.present == [0, 1]
    assert "node 102 refused: client-data is 'nowhere:load'" in caplog.text


@pytest.mark.parametrize(
    ("change", "why"),
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
            {"table": {**TABLE, "task": {"name": "os:system", "command": "true"}}},
            "allows no own task",
        ),
        ({"table": {**TABLE, "algorithm": {"name": "simfbo", "lr_x": -1.0}}}, "lr_x"),
    ],
)
def test_a_node_refuses_what_a_server_must_not_ask(change: dict[str, Any], why: str) -> None:
    grid = Grid(1)
    found = config(TABLE)
    task = {
        "phase": DESCEND,
        "number": 0,
        "steps": 1,
        "key": 1,
        "round": 1,
        "iteration": 0,
        "kept": None,
        "each": {},
    }
    x, y = found.load_task(None).problem.start
    sent = {
        "job": "ab",
        "table": found.table,
        **task,
        "shared": {"x": x, "y": y, "z": y},
        "kinds": {},
    }
    for message in (sent, {**sent, **change}):
        grid.push_messages([Message(encode(**message), 100, "train")])
    assert not grid.replies["0"].has_error()
    assert why in str(grid.replies["1"].error.reason)


def test_a_section_of_the_experiment_cannot_name_another_task(tmp_path: Any) -> None:
    grid, there = Grid(1), tmp_path / "there"
    section = {"task": {"name": "os:system", "command": f"touch {there}"}}
    table = {**config(TABLE).table, "algorithms": {"simfbo": section}}
    grid.push_messages([Message(encode(job="ab", table=table), 100, "query")])
    assert not there.exists()
    grid.nodes[100]["task"] = "tests.support.flower:own_task"
    grid.push_messages([Message(encode(job="ab", table=config(TABLE).table), 100, "query")])
    assert "this node allows 'tests.support.flower:own_task'" in str(
        grid.replies["1"].error.reason
    )  # and no other


@pytest.mark.parametrize(
    "said",
    [
        {"samples": [2**60, 1]},
        {"samples": [0, 1]},
        {"samples": [1]},
        {"client": 9},
        {"client": torch.zeros(40, 40)},
    ],
)
def test_who_introduces_itself_wrongly_is_refused(said: dict[str, Any], caplog: Any) -> None:
    grid = Grid(2)
    hello = {"client": 1, "samples": [1, 1], **said}
    grid.odd[101] = only(
        "query",
        lambda message, handle: handle(message) and Message(encode(**hello), reply_to=message),
    )
    fed, _ = federation(grid, config(TABLE, **{"task.clients": 2}), Conduct(start_clients=1))
    fed.weights()
    fed.transport.members.look(fed.transport.job)
    assert fed.transport.present == [0]
    (line,) = [line.message for line in caplog.records if "node 101 refused" in line.message]
    assert "\n" not in line


def test_who_comes_back_before_it_was_missed_is_let_in_then() -> None:
    grid = Grid(2)
    fed, _ = federation(grid, config(TABLE, **{"task.clients": 2}))
    fed.weights()
    grid.nodes[201] = {
        "partition-id": 1
    }  # without a key of its own, a node that restarts is another one
    for _ in range(3):
        fed.transport.members.look(fed.transport.job)
    assert fed.transport.members.node[1] == 101
    del grid.nodes[101]
    for _ in range(3):
        fed.transport.members.look(fed.transport.job)
    assert fed.transport.members.node[1] == 201


def test_two_nodes_cannot_be_one_client_and_a_key_is_bound_to_its_client(caplog: Any) -> None:
    grid = Grid(3)
    grid.nodes[102] = {"partition-id": 0}
    grid.names = {101: "client-7"}
    fed, _ = federation(
        grid, config(TABLE, **{"task.clients": 3}), Conduct(start_clients=1, wait_s=0.1)
    )
    fed.weights()
    fed.transport.members.look(fed.transport.job)
    assert fed.transport.present == [0]
    assert "client 0 is here already" in caplog.text
    assert "its key is that of client-7" in caplog.text


def test_a_client_that_dies_is_sent_its_task_again_when_it_is_back(monkeypatch: Any) -> None:
    grid = Grid(4)
    dead = [True]

    def die_once(message: Message, handle: Any) -> Message:
        if dead[0]:
            dead[0] = False
            del grid.nodes[101]
            grid.nodes[201] = {"partition-id": 1}  # it comes back as another node
            return error(5)(message, handle)
        return handle(message)  # type: ignore[no-any-return]

    grid.odd[101] = only("train", die_once)
    fed, run = federation(grid, config(TABLE))
    calm = simulated(config(TABLE))
    for r in (run, calm):
        for _ in range(3):
            r.advance()
    assert torch.allclose(flatten(run.state.x), flatten(calm.state.x), rtol=0, atol=1e-12)
    assert fed.ledger.lost_tasks == 0


def test_a_client_past_its_deadline_is_lost_and_left_alone_until_it_answers(
    monkeypatch: Any,
) -> None:
    later = clock(monkeypatch)
    grid = Grid(4)
    grid.odd[103] = lambda message, handle: later(20.0) or None  # type: ignore[func-returns-value]
    fed, run = federation(grid, config(TABLE), Conduct(deadline_s=10.0, start_clients=3))
    run.advance()
    assert fed.ledger.lost_tasks == 0  # it has never said who it is
    del grid.odd[103]
    fed.transport.members.greeted.clear()
    run.advance()
    assert 3 in fed.transport.present
    grid.odd[103] = only("train", lambda message, handle: later(20.0) or None)  # type: ignore[func-returns-value]
    before = len(grid.sent)
    run.advance()
    assert fed.ledger.lost_tasks == 1
    asked = [
        m.metadata.dst_node_id for m in grid.sent[before:] if m.metadata.message_type == "train"
    ]
    assert sorted(asked) == [100, 101, 102, 103]


def test_a_reply_that_will_not_come_is_not_waited_for() -> None:
    """Flower says so of a message that has expired, and of a reply whose parts were never sent."""
    grid = Grid(4)
    grid.odd[102] = only("train", error(3))
    fed, run = federation(grid, config(TABLE), Conduct(deadline_s=4.0))
    run.advance()
    assert fed.ledger.lost_tasks == 1
    assert fed.now < 4


def test_sums_do_not_depend_on_who_is_first() -> None:
    states = []
    for late in (0, 1, 2, 3):
        grid = Grid(4)
        pull, seen = grid.pull_messages, set[str]()

        def slowly(
            names: Any, late: int = 100 + late, grid: Any = grid, pull: Any = pull, seen: Any = seen
        ) -> Any:
            early = {
                name
                for name in names
                if name in seen or grid.sent[int(name)].metadata.dst_node_id >= late
            }
            seen |= set(names)
            return pull(early)

        grid.pull_messages = slowly  # type: ignore[method-assign]
        _, run = federation(grid, config(TABLE))
        for _ in range(3):
            run.advance()
        states.append(flatten(run.state.x))
    assert all(torch.equal(state, states[0]) for state in states)


def test_too_few_replies_end_the_run() -> None:
    grid = Grid(2)
    for node in grid.nodes:
        grid.odd[node] = _with(_values(qx=Tree(x=torch.full((3,), torch.nan, dtype=torch.float64))))
    _, run = federation(grid, config(TABLE, **{"task.clients": 2}))
    with pytest.raises(QuorumError, match="qx is not finite"):
        run.advance()
    with pytest.raises(QuorumError, match="1 clients are there, 2 are needed"):
        federation(Grid(1), config(TABLE, **{"task.clients": 2}), Conduct(wait_s=0.05))[0].weights()


def test_a_server_that_was_killed_goes_on_and_its_tasks_are_lost() -> None:
    table = {**TABLE, "algorithm": {"name": "afbo"}, "environment": {"participation": 2}}
    grid = Grid(4)
    grid.odd[103] = only("train", lambda message, handle: None)
    fed, run = federation(grid, config(table))
    for _ in range(2):
        run.advance()
    snapshot, state = fed.snapshot(), run.state
    assert 3 in fed.in_flight
    del grid.odd[103]
    again, rest = federation(grid, config(table))
    again.restore(snapshot)
    rest.state = state
    assert again.now > snapshot["transport"]["now"] > 0
    assert sorted(again.in_flight) == sorted(fed.in_flight)
    rest.advance()
    assert again.ledger.lost_tasks == len(fed.in_flight)
    for _ in range(3):
        rest.advance()
    assert 3 in {
        client for client, _ in rest.state.latest[2].items()
    }  # the one that was lost works again
    assert again.transport.job == fed.transport.job


@pytest.mark.parametrize("algorithm", [{"name": "afbo", "memory": "client"}, {"name": "fedbioacc"}])
def test_memory_stays_with_the_client_and_a_task_sent_twice_is_done_once(
    algorithm: dict[str, Any],
) -> None:
    table = {**TABLE, "algorithm": algorithm}
    grid = Grid(4)
    seen: list[Any] = []

    def twice(message: Message, handle: Any) -> Message:
        first, second = decode(handle(message).content), handle(message)
        again = decode(second.content)
        seen.extend(
            (flatten(tree), flatten(again["values"][name]))
            for name, tree in first["values"].items()
            if isinstance(tree, Tree)
        )
        return second  # type: ignore[no-any-return]

    grid.odd[101] = only("train", twice)
    _, run = federation(grid, config(table))
    for _ in range(3):
        run.advance()
    assert all(torch.equal(a, b) for a, b in seen)
    calm = simulated(config(table))
    for _ in range(3):
        calm.advance()
    assert torch.allclose(flatten(run.state.x), flatten(calm.state.x), rtol=0, atol=1e-12)


def test_no_message_outlives_its_deadline() -> None:
    grid = Grid(4)
    fed, run = federation(grid, config(TABLE), Conduct(deadline_s=10.0))
    run.advance()
    fed.transport.losses(*run.state[:2])
    assert {m.metadata.message_type for m in grid.sent} == {"query", "train", "evaluate"}
    assert all(0 < m.metadata.ttl <= 10 for m in grid.sent)


def test_parts_of_a_message_are_looked_for_often_on_both_sides(monkeypatch: Any) -> None:
    looks: list[str] = []
    sides = (
        warm.inflatable_utils.pull_objects,
        warm.inflatable_utils.pull_and_inflate_object_from_tree,
    )
    for pull in sides:
        monkeypatch.setattr(pull, "__kwdefaults__", dict(pull.__kwdefaults__))
    warm.quicken()

    def never(part: str) -> bytes:
        looks.append(part)
        raise warm.inflatable_utils.ObjectUnavailableError(part)

    for pull, parts in zip(
        sides, ((["a"], never), (ObjectTree(object_id="a"), never, looks.append)), strict=True
    ):
        pull.__kwdefaults__["max_time"] = 0.1  # of a minute
        looks.clear()
        with pytest.raises(warm.inflatable_utils.ObjectPullError):
            pull(*parts)
        assert len(looks) > 2


def test_what_only_a_simulation_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"environment\.delay is for simulations"):
        federation(Grid(4), config({**TABLE, "environment": {"delay": {"model": "constant"}}}))
    with pytest.raises(ValueError, match="weights by samples need all 4 clients"):
        federation(Grid(4), config({**TABLE, "weights": "samples"}), Conduct(start_clients=3))


def test_clients_bring_their_own_data_and_a_server_needs_none() -> None:
    grid = Grid(3)
    for node in grid.nodes.values():
        node |= {"client-data": "tests.support.flower:own_data", "task": "tests.support.flower:own_task"}
    table = {"task": {"name": "tests.support.flower:own_task"}, "algorithm": {"name": "simfbo"}}
    fed, run = federation(grid, config(table), clients=3)
    run.advance()
    task = Task(own_task().problem, [own_data(j) for j in range(3)])
    calm = Run(config(table).algorithm, fb.simulated_federation(task.problem, task.clients), {})
    calm.advance()
    assert torch.allclose(flatten(run.state.x), flatten(calm.state.x), rtol=0, atol=1e-12)
    assert fed.transport.present == [0, 1, 2]


def test_keys_are_for_their_owner_and_are_not_made_twice(tmp_path: Any) -> None:
    made = keys.make(tmp_path, 2, ["fl.example.org", "10.0.0.1"])
    assert len(made) == 8
    for path in made:
        secret = path.suffix == ".key" or (path.parent.name == "clients" and path.suffix != ".pub")
        assert (path.stat().st_mode & 0o077 == 0) == secret
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in (keys.CA, keys.SERVER)
    )
    server.verify_directly_issued_by(authority)
    assert (
        authority.not_valid_after_utc > server.not_valid_after_utc
    )  # there is a time to renew it in
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "fl.example.org",
        "localhost",
    ]  # for the proxy beside it
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == [
        "10.0.0.1",
        "127.0.0.1",
    ]
    assert warm.load_key(tmp_path / "clients/client-1")[1].curve.name == "secp384r1"
    assert keys.make(tmp_path, 3, ["other"]) == [
        tmp_path / "clients/client-2",
        tmp_path / "clients/client-2.pub",
    ]
    with pytest.raises(ValueError, match="is no private key"):
        warm.load_key(tmp_path / keys.SERVER)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("serve digits --host 0.0.0.0", "no keys are given"),
        ("join 10.0.0.1:8000 --partition 0", "no keys are given"),
        ("join 10.0.0.1 --partition 0", "must be host:port"),
        ("join 127.0.0.1:1 --partition 0 --client-data nowhere:load", "cannot be imported"),
        ("serve digits --keys nowhere", "has no ca.crt"),
        ("serve digits --clients 4 --set conduct.deadline_s=0", "deadline_s is 0"),
        ("run digits --stock", "for --federation flower"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(command: str, why: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert why in said
    assert said.count("\n") == 1


def test_fewer_clients_than_take_part_all_take_part() -> None:
    place, table = configs.read("digits")
    found = _with_clients(lambda changes: configs.resolve(place, table, overrides=changes), 4)
    assert found.environment.participation == 4
    assert len(found.load_task(None).clients) == 4


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("::1", "[::1]:8000"),
        ("fl.example.org", "fl.example.org:8000"),
    ],
)
def test_where_a_superlink_is_found(host: str, address: str) -> None:
    assert Deployment(host, 8000).address == address
    assert split(address) == (address[:-5].strip("[]"), 8000)
