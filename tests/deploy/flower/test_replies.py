"""What clients may not reply: a lie is refused, counted and logged, and affects nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedbilevel.algorithms.afbo import MeanDirectionDifferences
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower.wire import VERSION, bundle, decode, encode
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.phase import Phase
from tests.support.flower import (
    HYPER_REPRESENTATION,
    QUADRATIC,
    FakeGrid,
    Handler,
    Values,
    advance,
    change_reply,
    float64,
    only_for,
    real_federation,
    reply_with_error,
    resolve_config,
    with_values,
    x_tree,
)

Change = Callable[[RecordDict], RecordDict]

pytestmark = pytest.mark.usefixtures("in_process")

TENSOR_NAMES = {torch.zeros(2): torch.zeros(2), torch.ones(2): torch.zeros(2)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_values(qx=x_tree(torch.nan, torch.nan, torch.nan)), "qx is not finite"),
        (with_values(qx=x_tree(0.0, 0.0, 0.0, 0.0)), "another shape"),
        (with_values(qx=Tree(x=torch.zeros(3))), "another dtype"),
        (with_values(qx=Tree({"../../x": float64(0.0, 0.0, 0.0)})), "another shape"),
        (with_values(qx=3), "not tensors"),
        (lambda reply: {**reply, "values": TENSOR_NAMES}, "not a string"),
        (lambda reply: {**reply, "number": torch.zeros(40, 40)}, "number is"),
        (lambda reply: {**reply, "cost": torch.zeros(3)}, "ind"),
        (with_values(extra=torch.zeros(())), "it declares"),
        (lambda reply: {**reply, "number": 10**6}, "the reply is to task 1000000, not to task"),
        (lambda reply: {**reply, "cost": {**reply["cost"], "flops": -1}}, "flops is -1"),
        (lambda reply: {"values": reply["values"]}, "no 'number'"),
    ],
)
@pytest.mark.parametrize("norm_bound", [None, 1e6])
def test_a_lie_is_refused_counted_and_logged(
    norm_bound: float | None,
    change: Callable[[Values], Values],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(4)
    grid.behaviours[102] = change_reply(change)
    fed, run = real_federation(grid, resolve_config(QUADRATIC), Conduct(norm_bound=norm_bound))
    advance(5, run)
    assert fed.ledger.refused_replies == 3  # after which the client is excluded
    assert fed.transport.excluded == [2]
    lines = [line.message for line in caplog.records if "refused, client 2" in line.message]
    assert len(lines) == 3
    assert reason in lines[0]
    assert "\n" not in lines[0]
    assert fed.ledger.lost_tasks == 0


def with_data(data: bytes) -> Change:
    """Replace the tensors of a reply by these bytes."""

    def change(content: RecordDict) -> RecordDict:
        array = Array("float64", (1,), "numpy.ndarray", data)
        return RecordDict({**content, "tensors": ArrayRecord({"float64": array})})

    return change


def with_shape(*sizes: int) -> Change:
    """Let the header of a reply declare one tensor of this shape."""

    def change(content: RecordDict) -> RecordDict:
        packed = {"dict": [["number", {"tensor": "0"}]]}
        fields = {"version": VERSION, "tensors": [["float64", sizes]], "values": packed}
        header = ConfigRecord({"json": json.dumps(fields)})
        array = Array("float64", (1,), "raw", bytes(8))
        return RecordDict({"tensors": ArrayRecord({"float64": array}), "header": header})

    return change


@pytest.mark.parametrize("form", [lambda content: content, bundle], ids=["records", "bundle"])
@pytest.mark.parametrize("renumbered", [False, True])
def test_a_reply_to_an_earlier_message_is_refused(
    renumbered: bool, form: Change, caplog: pytest.LogCaptureFixture
) -> None:
    """Its values are those of an older point; repeating the right task number does not help."""
    kept: list[RecordDict] = []

    def replay(message: Message, handle: Handler) -> Message:
        reply = handle(message)
        content = kept[0] if kept else reply.content
        kept.append(reply.content)
        if renumbered and len(kept) > 1:
            old = decode(content)
            proof = content["header"]["proof"]
            content = encode(**{**old, "number": decode(reply.content)["number"]})
            content["header"]["proof"] = proof
        return Message(form(content), reply_to=message)

    grid = FakeGrid(4)
    grid.behaviours[101] = only_for("train", replay)
    fed, run = real_federation(grid, resolve_config(QUADRATIC))
    advance(6, run)
    assert fed.ledger.refused_replies == 3
    assert fed.transport.excluded == [1]
    assert "client 1: the reply is not to the message that was sent" in caplog.text


def test_a_reply_without_a_proof_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def forge(message: Message, handle: Handler) -> Message:
        content = encode(**decode(handle(message).content))
        content["header"]["proof"] = ""
        return Message(content, reply_to=message)

    grid = FakeGrid(3)
    grid.behaviours[101] = forge
    config = resolve_config(QUADRATIC, **{"task.clients": 3})
    fed, _ = real_federation(grid, config, Conduct(start_clients=2))
    fed.weights()
    assert fed.transport.present == [0, 2]
    assert "node 101 refused: the reply is not to the message that was sent" in caplog.text


NPY = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f8', 'fortran_order': False, 'shape': ("
HOSTILE = {
    "a damaged npy header": with_data((NPY + b"(3,").ljust(127) + b"\n"),
    "an npy header with a huge shape": with_data((NPY + b"%d,), }" % 10**30).ljust(127) + b"\n"),
    "a zip archive": with_data(b"PK\x03\x04" + bytes(60)),
    "a huge size": with_shape(10**30),
    "many sizes": with_shape(*[9] * 100_000),
    "a bundle": lambda content: bundle(with_data(b"PK\x03\x04")(content)),
    "a large tensor": lambda _: encode(x=torch.zeros(2**20)),
    "a deep nest": lambda _: encode(number=0, client=0, values=nest(150), upper=nest(150)),
    "nothing": lambda _: RecordDict(),
}


def nest(depth: int) -> object:
    value: object = {"a": torch.zeros(1)}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("message_type", ["train", "query", "evaluate"])
def test_nothing_that_a_client_sends_ends_the_federation(
    message_type: str, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused in one line that names the client or the node."""

    def attack(message: Message, handle: Handler) -> Message:
        return Message(change(handle(message).content), reply_to=message)

    grid = FakeGrid(3)
    grid.behaviours[102] = only_for(message_type, attack)
    config = resolve_config(QUADRATIC, **{"task.clients": 3})
    fed, run = real_federation(grid, config, Conduct(start_clients=2))
    advance(4, run)
    for _ in range(4):
        fed.transport.losses(*run.state[:2])
    assert fed.transport.present == [0, 1]
    about = {
        "train": "refused, client 2: ",
        "query": "node 102 refused: ",
        "evaluate": "client 2 did not report its losses: ",
    }[message_type]
    lines = [line.message for line in caplog.records if about in line.message]
    assert len(lines) == (1 if message_type == "query" else 3)
    assert not any("\n" in line or line.endswith(": ") for line in lines)
    if message_type != "query":
        assert fed.transport.excluded == [2]


@pytest.mark.parametrize(
    "lie",
    [
        {"x": float64(0.0, 0.0, 0.0)},
        [float64(0.0, 0.0, 0.0)],
        {"x": {"z": float64(0.0, 0.0, 0.0)}},
    ],
    ids=["a dict", "a list", "nested"],
)
@pytest.mark.parametrize("clipped", [[], ["qy"]], ids=["clipped", "not clipped"])
def test_a_payload_that_a_stage_cannot_decode_affects_no_other_reply(
    lie: object, clipped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The payload of a stage may have any structure, so it is checked when it is decoded."""
    grid = FakeGrid(4)
    grid.behaviours[100] = change_reply(with_values(qx=lie))
    clip = {"stage": "clip", "norm": 1e6, "values": clipped}
    environment = {**QUADRATIC["environment"], "stages": [clip]}
    fed, run = real_federation(grid, resolve_config({**QUADRATIC, "environment": environment}))
    advance(4, run)
    assert fed.ledger.refused_replies == 3
    assert fed.transport.excluded == [0]
    assert sum("refused, client 0" in line.message for line in caplog.records) == 3


@pytest.mark.parametrize("norm_bound", [None, 1e6])
def test_a_reply_in_double_precision_does_not_promote_the_others(
    norm_bound: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Stacked with the others, it would make all of them double."""

    def to_double(reply: Values) -> Values:
        values = {name: tree.map(Tensor.double) for name, tree in reply["values"].items()}
        return {**reply, "values": values}

    table = {**QUADRATIC, "task": HYPER_REPRESENTATION, "data": {"name": "digits"}}
    grid = FakeGrid(3)
    grid.behaviours[101] = change_reply(to_double)
    fed, run = real_federation(grid, resolve_config(table), Conduct(norm_bound=norm_bound))
    run.advance()
    assert fed.transport.strikes.refusals == {1: 1}
    assert "client 1: replied with 'qx' of another dtype than torch.float32" in caplog.text
    assert {tensor.dtype for tensor in run.state.x.values()} == {torch.float32}


class Counting(Phase):
    """Replies with a number."""

    name = "counting"
    reply: ClassVar = {"count": "scalar"}

    def start(self, message: Any) -> Any:
        return message.steps

    def step(self, steps: Any, oracle: Any, batch: Any) -> Any:
        return steps

    def finish(self, steps: Any) -> dict[str, Any]:
        return {"count": steps}


@pytest.mark.parametrize(
    "count", [Tree({"": torch.tensor(1.0, dtype=torch.float64)}), torch.tensor(True)]
)
def test_only_a_number_is_accepted_as_a_scalar(count: object) -> None:
    """A tree whose only name is empty has the same shapes as a scalar."""
    grid = FakeGrid(4)
    fed, _ = real_federation(grid, resolve_config(QUADRATIC))
    assert fed.ask(Counting(), range(4)).mean("count") == 1.0
    grid.behaviours[102] = change_reply(with_values(count=count))
    replies = fed.ask(Counting(), range(4))
    assert [reply.client for reply in replies] == [0, 1, 3]
    assert fed.transport.strikes.refusals == {2: 1}


TICKET = {"base": torch.tensor(-1), "number": torch.tensor(0)}


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (torch.tensor(-1), "'ticket' of another shape than the tree"),
        (Tree({"": torch.tensor(-1)}), "'ticket' of another shape than the tree"),
        (Tree(TICKET | {"base": torch.tensor([-1])}), "'ticket' of another shape than the tree"),
        (Tree(TICKET | {"base": torch.tensor(True)}), "'ticket' as torch.bool"),
    ],
    ids=["a number", "a tree that looks like a number", "another shape", "a truth value"],
)
def test_a_malformed_ticket_is_refused(
    ticket: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A ticket holds numbers that the server of AFBO computes with.

    The client that sends it is excluded, and stays so when the server is restarted.
    """
    table = {
        **QUADRATIC,
        "algorithm": {"name": "afbo", "memory": "client"},
        "environment": {"participation": 3},
    }
    grid = FakeGrid(4)
    grid.behaviours[102] = change_reply(with_values(ticket=ticket))
    fed, run = real_federation(grid, resolve_config(table))
    advance(5, run)
    assert fed.transport.excluded == [2]
    assert fed.ledger.refused_replies == 3
    assert fed.ledger.lost_tasks == 0  # a task that an excluded client is not sent is not lost
    assert reason in caplog.text
    del grid.nodes[102]
    restarted, _ = real_federation(grid, resolve_config(table))
    restarted.restore(fed.snapshot())
    assert restarted.transport.excluded == [2]
    assert restarted.transport.strikes.refusals == {2: 3}
    restarted.weights()  # does not wait for the excluded client
    assert restarted.transport.claims.sizes[2] == (6, 6)
    phase = run.algorithm.directions_phase(MeanDirectionDifferences)
    message = {"x": run.state.x, "y": run.state.y, "z": run.state.z, "number": 9}
    with pytest.raises(RuntimeError, match="two tasks in flight"):
        restarted.post(phase, [0, 0], each=[{"ack": -1}] * 2, **message)


@pytest.mark.parametrize(
    "loss",
    [float("nan"), float("-inf"), 10**400, True, "1", torch.zeros(2)],
    ids=lambda loss: repr(loss)[:8],
)
def test_a_client_that_lies_about_its_losses_is_left_out(
    loss: object, caplog: pytest.LogCaptureFixture
) -> None:
    def lie(message: Message, handle: Handler) -> Message:
        honest = decode(handle(message).content)
        return Message(encode(**{**honest, "upper": loss}), reply_to=message)

    grid = FakeGrid(2)
    fed, run = real_federation(grid, resolve_config(QUADRATIC, **{"task.clients": 2}))
    x, y = run.state[:2]
    grid.behaviours[101] = only_for("evaluate", reply_with_error(2))
    losses_of_the_other = fed.transport.losses(x, y)
    grid.behaviours[101] = only_for("evaluate", lie)
    assert fed.transport.losses(x, y) == losses_of_the_other
    assert "client 1 did not report its losses: its upper loss is" in caplog.text
