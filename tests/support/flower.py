"""Flower without its processes: a grid whose nodes are in this one, and what a test may have them do wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedbilevel.core.problem import ClientData
from fedbilevel.deploy.flower import _members as members
from fedbilevel.deploy.flower import client, transport
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import load, run_of, simulation
from fedbilevel.federation import Federation
from fedbilevel.federation.conduct import Conduct
from fedbilevel.runs.run import Run
from fedbilevel.tasks import Task
from fedbilevel.tasks.quadratic import quadratic

Handler = Callable[[Message], Message]


class Grid:
    """Nodes 100, 101, ... are clients 0, 1, ...; `odd[node]` takes a node's message and its usual handler."""

    def __init__(self, clients: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1  # type: ignore[attr-defined]
        self.nodes = {100 + j: {"partition-id": j} for j in range(clients)}
        self.names: dict[int, str] = {}
        self.odd: dict[int, Callable[[Message, Handler], Message | None]] = {}
        self.replies: dict[str, Message] = {}
        self.sent: list[Message] = []

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=self.names.get(node, "")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return ""
        name = str(len(self.sent))
        self.sent.append(message)

        def handle(message: Message) -> Message:
            message.metadata.__dict__["_message_id"] = name
            try:
                return client.app(message, Context(1, node, self.nodes[node], RecordDict(), {}))
            except Exception as error:
                return Message(Error(code=2, reason=str(error)), reply_to=message)

        reply = self.odd[node](message, handle) if node in self.odd else handle(message)
        if reply is not None:
            self.replies[name] = reply
        return name

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in names if name in self.replies]


def config(table: dict[str, Any], **overrides: Any) -> configs.Config:
    return configs.resolve("test", table, overrides={"runtime.threads": 1, **overrides})


def federation(
    grid: Any, found: configs.Config, conduct: Conduct | None = None, clients: int = 0
) -> tuple[Federation, Run]:
    task, experiment = load(found), found.experiment
    fed = transport.flower_federation(
        *(grid, task.problem, clients or len(task.clients), found.environment, found.table),
        conduct or found.conduct,
        weights=experiment.weights,
        seed=experiment.seed,
    )
    return fed, run_of(found, task, fed)


def simulated(found: configs.Config) -> Run:
    task = load(found)
    return run_of(found, task, simulation(found, task))


def error(code: int) -> Callable[[Message, Handler], Message]:
    def reply(message: Message, _: Handler) -> Message:
        message.metadata.__dict__["_message_id"] = "x"
        return Message(Error(code=code, reason="gone"), reply_to=message)

    return reply


def only(
    kind: str, act: Callable[[Message, Handler], Message | None]
) -> Callable[[Message, Handler], Message | None]:
    """Odd with messages of one kind, as usual with the others."""
    return lambda message, handle: (
        act(message, handle) if message.metadata.message_type == kind else handle(message)
    )


def quickly(monkeypatch: Any) -> None:
    monkeypatch.setattr(transport, "POLL_S", 0.0)
    monkeypatch.setattr(members, "NODES_S", 0.0)


def clock(monkeypatch: Any) -> Callable[[float], None]:
    """Time that passes when a test says so, and a little at every look."""
    now = [time.monotonic()]

    def monotonic() -> float:
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(transport.time, "monotonic", monotonic)

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def own_data(partition: int) -> ClientData:
    """A client's own data, for the quadratic of 3 and 2 dimensions."""
    eye = torch.eye(2, dtype=torch.float64).expand(1, 2, 2)
    rest = [
        torch.full(shape, float(partition), dtype=torch.float64)
        for shape in ((1, 2, 3), (1, 2), (1, 2), (1, 3))
    ]
    return ClientData(train=(eye, rest[0], rest[1]), val=(rest[2], rest[3], rest[0]))


def own_task() -> Task:
    """A task without clients, as a server has it whose clients bring their own data."""
    return Task(quadratic(clients=1, dim_x=3, dim_y=2).problem, [])
