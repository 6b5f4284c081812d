"""A client on Flower: it looks the phase up by name, runs it on its own data, and answers with tensors and counts.

The experiment travels with every message, as the table that describes it, and is checked again here; so a node may come
late, restart, or serve several runs. What the client remembers between tasks stays here, in a file.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import tasks
from fedbilevel.core import checks
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import ClientData
from fedbilevel.core.submodels import Submodel, units
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower.wire import WireError, decode, encode, one_line
from fedbilevel.execution.losses import ClientLosses
from fedbilevel.execution.reference import ReferenceExecutor
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import load
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import like, log
from fedbilevel.federation.stages import decoded
from fedbilevel.federation.task import Broadcast, Task
from fedbilevel.runs import checkpoint

app = ClientApp()


@dataclass(frozen=True)
class Node:
    """What a node's owner says: which client it is, where its data comes from, and what it will run.

    client_data: module:function, called with the number of the client, returns its `ClientData`; without one the
    experiment's own task deals the data. task: the only one that the experiment may name (None: those that we ship).
    """

    partition: int
    client_data: str | None = None
    task: str | None = None
    data_dir: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        checks.integer("partition", self.partition, least=0)

    @classmethod
    def of(cls, settings: Any) -> Node:
        """From the `--node-config` of a SuperNode."""
        known = {
            "partition-id": "partition",
            "client-data": "client_data",
            "task": "task",
            "data-dir": "data_dir",
        }
        known |= {"device": "device"}
        settings = {
            key: value for key, value in settings.items() if key != "num-partitions"
        }  # of Flower's simulations
        for key in settings:
            checks.one_of("node-config", key, known)
        if "partition-id" not in settings:
            raise ValueError(
                "node-config has no partition-id; it must say which client this is, from 0 on"
            )
        return cls(**{known[key]: value for key, value in settings.items()})


class Worker:
    """One client of one run, made from the experiment's table."""

    def __init__(self, node: Node, job: str, table: dict[str, Any]) -> None:
        if not re.fullmatch("[0-9a-f]{1,64}", job):
            raise WireError("the run's name is not hexadecimal")
        name = table.get("task", {}).get("name")
        if name not in ([node.task] if node.task else tasks.names()):
            # Whoever may name any module:function may run anything here.
            allowed = repr(node.task) if node.task else "no own task"
            raise WireError(f"the experiment's task is {name!r:.80}; this node allows {allowed}")
        self.node, self.client = node, node.partition
        self.config, task = _load(json.dumps(table), name, node.device, node.data_dir)
        self.problem = task.problem.to(node.device)
        self.data = self._data(task)
        environment = self.config.environment
        episode = environment.batch_size if self.problem.lower_level == "private" else None
        self.problem.check(self.data, node.device, episode)
        rounded = self.problem.rounded(self.config.experiment.runtime.precision)
        held = {self.client: self.data}
        self.executor = ReferenceExecutor(rounded, held, environment.batch_size, device=node.device)
        self.memory = Path(
            platformdirs.user_state_dir("fedbilevel"), job, f"client-{self.client}.safetensors"
        )
        self.losses: dict[int, ClientLosses] = {}

    def _data(self, task: tasks.Task) -> ClientData:
        if self.node.client_data is None:
            if not task.clients:
                raise ValueError("client-data is missing; this task deals no data of its own")
            checks.integer("partition", self.client, least=0, most=len(task.clients) - 1)
            return task.clients[self.client]
        found = configs.imported("client-data", self.node.client_data)(self.client)
        if not isinstance(found, ClientData):
            raise TypeError(
                f"{self.node.client_data} made a {type(found).__name__}; it must make a ClientData"
            )
        return found

    def hello(self) -> dict[str, Any]:
        """Who this is and how much data it holds."""
        return {"client": self.client, "samples": [self.data.size("train"), self.data.size("val")]}

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """The reply to one task, and what it took."""
        phase = Phase.load(task["phase"])
        number, key = (
            checks.integer(name, task[name], least=-(2**63)) for name in ("number", "key")
        )
        round_, iteration = (
            checks.integer(name, task[name], least=0) for name in ("round", "iteration")
        )
        steps = checks.integer("steps", task["steps"], least=1)
        submodel = self._submodel(task["kept"])
        stages = self.config.environment.stages
        down = [stage for stage in stages if stage.direction == "down"]
        kinds = {
            name: checks.one_of("kind", kind, ("x", "y")) for name, kind in task["kinds"].items()
        }
        whole = like(kinds, self.problem, submodel)  # type: ignore[arg-type]
        message = decoded(down, self._here(task["shared"]), kinds, whole)
        up = [stage for stage in stages if stage.direction == "up"]
        broadcast = Broadcast(phase, message, round_, iteration, submodel, stages=up)
        own = self._here(task["each"])
        before = self._recall(number) if broadcast.remembers else {}
        self.executor.memories[self.client] = before
        (results,) = self.executor.run(
            [Task(broadcast, number, 0, self.client, steps, own, key, 1.0)]
        )
        if broadcast.remembers:
            after = self.executor.memories.get(self.client, {})
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.save(self.memory, {"number": number, "before": before, "after": after})
        values = pytree.tree_map(lambda t: t[0], results.values)
        return {"number": number, "values": values, "took": results.costs[0]._asdict()}

    def _recall(self, number: int) -> dict[str, Any]:
        """What the client remembers; of a task that is sent again, what it remembered then."""
        if not self.memory.exists():
            return {}
        saved = checkpoint.load(self.memory)
        return dict(saved["before"] if saved["number"] == number else saved["after"])

    def _submodel(self, kept: dict[str, Tensor] | None) -> Submodel | None:
        if kept is None:
            return None
        axes = self.problem.axes
        return Submodel(axes, units(axes, {**self.problem.x, **self.problem.y}), kept)

    def _here(self, values: dict[str, Any]) -> dict[str, Any]:
        if not all(isinstance(name, str) and name.isidentifier() for name in values):
            raise WireError("the message has a name that is not an identifier")
        return {name: _to(value, self.node.device) for name, value in values.items()}

    def evaluate(self, x: Tree, y: Tree, share: int) -> dict[str, Any]:
        """Both losses on the client's share of the evaluation."""
        if share not in self.losses:
            parts = (
                self.config.environment,
                self.config.experiment.seed,
                self.client,
                share,
                self.node.device,
            )
            self.losses = {share: ClientLosses(Oracle(self.problem), self.data, *parts)}
        found = self.losses[share]
        with torch.no_grad():
            upper, lower = found(_to(x, self.node.device), _to(y, self.node.device), found.batch)
        return {"client": self.client, "upper": float(upper), "lower": float(lower)}


@functools.lru_cache(
    maxsize=1
)  # shared by the clients that one process of Flower's simulation plays
def _load(
    table: str, task: str, device: str, data_dir: str | None
) -> tuple[configs.Config, tasks.Task]:
    # The task is named again, because a section of the table ([algorithms.simfbo.task], say) could name another one.
    chosen = {"task.name": task, "device": device}
    config = configs.resolve("the server's experiment", json.loads(table), overrides=chosen)
    return config, load(config, Path(data_dir) if data_dir else None)


def _to(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        kind = Tree if isinstance(value, Tree) else dict
        return kind({key: _to(item, device) for key, item in value.items()})
    return value.to(device) if isinstance(value, Tensor) else value


_workers: dict[
    int, tuple[str, Worker]
] = {}  # of every client in this process, the one for the last run


def worker(context: Context, message: dict[str, Any]) -> Worker:
    """The worker for a message, made once where the process lives on."""
    node, job, table = Node.of(context.node_config), message["job"], message["table"]
    key = json.dumps([repr(node), job, table], sort_keys=True)
    if _workers.get(node.partition, ("",))[0] != key:
        _workers[node.partition] = key, Worker(node, job, table)
    return _workers[node.partition][1]


def _answer(message: Message, context: Context, kind: str) -> Message:
    try:
        sent = decode(message.content)
        here = worker(context, sent)
        if kind == "hello":
            reply = here.hello()
        elif kind == "task":
            reply = here.run(sent)
        else:
            reply = here.evaluate(
                sent["x"], sent["y"], checks.integer("share", sent["share"], least=1)
            )
    except Exception as error:
        log.warning("message refused: %s", one_line(error))
        raise
    return Message(encode(**reply), reply_to=message)


@app.query()
def hello(message: Message, context: Context) -> Message:
    return _answer(message, context, "hello")


@app.train()
def task(message: Message, context: Context) -> Message:
    return _answer(message, context, "task")


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return _answer(message, context, "losses")
