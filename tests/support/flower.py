"""Flower without its processes: a grid whose nodes run here, and ways for a node to misbehave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedbilevel import algorithms
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower import _members, _replies, client, transport
from fedbilevel.deploy.flower.wire import decode, encode, seal, token_of
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import build_federation, build_run, load_task
from fedbilevel.federation import Federation
from fedbilevel.federation.conduct import Conduct
from fedbilevel.runs.run import Run
from fedbilevel.tasks import Task
from fedbilevel.tasks.quadratic import quadratic

Table = dict[str, Any]
Handler = Callable[[Message], Message]
Behaviour = Callable[[Message, Handler], Message | None]
Values = dict[str, Any]

QUADRATIC: Table = {
    "task": {"name": "quadratic", "clients": 4, "dim_x": 3, "dim_y": 2, "samples": 6, "noise": 0.5},
    "algorithm": {"name": "simfbo"},
    "environment": {"local_steps": [1, 4], "batch_size": 2},
    "rounds": 5,
    "every": 5,
}
HYPER_REPRESENTATION: Table = {
    "name": "hyper-representation",
    "clients": 3,
    "model": "mlp",
    "hidden": 4,
    "samples": 60,
}
DESCEND = algorithms.SimFBO().descend().to_dict()


def answer(message: Message, message_id: str, node: int, node_config: Table) -> Message:
    """What a node answers to a message; Flower turns exceptions into errors."""
    message.metadata.__dict__["_message_id"] = message_id
    try:
        return client.app(message, Context(1, node, node_config, RecordDict(), {}))
    except Exception as error:
        return Message(Error(code=2, reason=str(error)), reply_to=message)


class FakeGrid:
    """A grid whose nodes answer in this process, at once: nodes 100, 101, ... are clients 0, 1, ...

    Attributes:
        nodes: the `--node-config` of each node.
        key_names: the name under which the key of a node is registered.
        behaviours: by node, what answers instead of the client; it is given the message and the
            handler that would have answered. None as an answer is silence.
        sent: all messages that were pushed; the id of a message is its index.
        replies: replies that were not pulled yet, by the id of the message.
    """

    def __init__(self, clients: int) -> None:
        identity: Any = TaskIdentity  # Flower creates no message outside of a task
        identity.run_id = 1
        identity.node_id = 0
        identity.task_id = 1
        self.nodes: dict[int, Table] = {100 + j: {"partition-id": j} for j in range(clients)}
        self.key_names: dict[int, str] = {}
        self.behaviours: dict[int, Behaviour] = {}
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}

    def get_nodes(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(node_id=node, name=self.key_names.get(node, "")) for node in self.nodes
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return ""
        message_id = str(len(self.sent))
        self.sent.append(message)

        def handle(message: Message) -> Message:
            return answer(message, message_id, node, self.nodes[node])

        reply: Message | None
        if node in self.behaviours:
            reply = self.behaviours[node](message, handle)
        else:
            reply = handle(message)
        if reply is not None:
            self.replies[message_id] = _sealed(message, reply)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]


def _sealed(message: Message, reply: Message) -> Message:
    """Seal a reply that a behaviour has made: a liar knows the protocol."""
    with suppress(Exception):  # it may be no reply at all
        if "proof" not in reply.content["header"]:
            reply.content = seal(reply.content, token_of(message.content))
    return reply


def resolve_config(table: Table, **overrides: object) -> configs.Config:
    return configs.resolve("test", table, overrides={"runtime.threads": 1, **overrides})


def real_federation(
    grid: Any, config: configs.Config, conduct: Conduct | None = None, clients: int = 0
) -> tuple[Federation, Run]:
    """A federation over a grid, and the run of the config on it."""
    task = load_task(config)
    fed = transport.flower_federation(
        grid,
        task.problem,
        clients or len(task.clients),
        config.environment,
        config.table,
        conduct or config.conduct,
        weights=config.experiment.weights,
        seed=config.experiment.seed,
    )
    return fed, build_run(config, task, fed)


def simulated_run(config: configs.Config) -> Run:
    """The same run in a simulation."""
    task = load_task(config)
    return build_run(config, task, build_federation(config, task))


def advance(iterations: int, *runs: Run) -> None:
    for run in runs:
        for _ in range(iterations):
            run.advance()


def only_for(message_type: str, behaviour: Behaviour) -> Behaviour:
    """A node that misbehaves with messages of one type, and answers the others."""

    def act(message: Message, handle: Handler) -> Message | None:
        if message.metadata.message_type == message_type:
            return behaviour(message, handle)
        return handle(message)

    return act


def reply_with_error(code: int) -> Behaviour:
    """A message to which Flower replies with this error code."""

    def act(message: Message, _: Handler) -> Message:
        message.metadata.__dict__["_message_id"] = "x"
        return Message(Error(code=code, reason="gone"), reply_to=message)

    return act


def change_reply(change: Callable[[Values], Values]) -> Behaviour:
    """A node that changes its replies to client tasks."""

    def act(message: Message, handle: Handler) -> Message:
        reply = decode(handle(message).content)
        return Message(encode(**change(reply)), reply_to=message)

    return only_for("train", act)


def with_values(**changed: object) -> Callable[[Values], Values]:
    """A change of a reply: some of its values are replaced or added."""
    return lambda reply: {**reply, "values": {**reply["values"], **changed}}


def x_tree(*values: float) -> Tree:
    """A tree that is shaped like x of `QUADRATIC`, if there are three values."""
    return Tree(x=float64(*values))


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def poll_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REPLY_POLL_S", 0.0)
    monkeypatch.setattr(_replies, "REPLY_POLL_S", 0.0)
    monkeypatch.setattr(_members, "NODE_LISTING_S", 0.0)


@contextlib.contextmanager
def clients_in_this_process(folder: Path) -> Iterator[None]:
    """Clients of this process start without memory, and nobody pauses between polls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setattr(client, "_workers", {})
        poll_without_pauses(patch)
        yield


def control_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the real clock: each look at it takes a millisecond, and the returned function adds
    seconds."""
    now = [time.monotonic()]

    def monotonic() -> float:
        now[0] += 1e-3
        return now[0]

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", monotonic)
    return let_pass


def own_data(partition: int) -> ClientData:
    """What a client may load itself, for the quadratic task with 3 and 2 dimensions."""
    eye = torch.eye(2, dtype=torch.float64).expand(1, 2, 2)
    matrix, c, d, e = (
        torch.full(shape, float(partition), dtype=torch.float64)
        for shape in ((1, 2, 3), (1, 2), (1, 2), (1, 3))
    )
    return ClientData(train=(eye, matrix, c), val=(d, e, matrix))


def own_task() -> Task:
    """A task without clients, for a server whose clients load their own data."""
    return Task(quadratic(clients=1, dim_x=3, dim_y=2).problem, [])
