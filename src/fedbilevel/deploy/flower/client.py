"""A client on Flower: it runs phases on its own data and replies with tensors and costs.

A message names its phase, and the client looks the phase up among those that are installed. The
experiment travels with every message, as nested tables, and is validated here; so a node may join
late, restart, or serve several runs. What the client remembers between tasks stays here, in a file.

A node opens no path that it was sent. The server learns why a message was refused if the message
was at fault; of every other error it learns the type alone, because the text may quote data.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import platformdirs
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from safetensors.torch import save
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import tasks
from fedbilevel.core import checks
from fedbilevel.core.capabilities import find_capabilities
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.submodels import Submodel, count_units
from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower.wire import (
    Values,
    WireError,
    decode,
    encode,
    one_line,
    token_of,
)
from fedbilevel.deploy.flower.wire import seal as seal_content
from fedbilevel.diagnostics import value_phases  # noqa: F401  (registers them)
from fedbilevel.execution.client_memory import personal_values
from fedbilevel.execution.losses import ClientLosses
from fedbilevel.execution.reference import ReferenceExecutor
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.parts import import_function
from fedbilevel.experiments.runner import load_task
from fedbilevel.federation.environment import SIMULATED
from fedbilevel.federation.kinds import Kind, client_kinds, templates
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import log
from fedbilevel.federation.stages import decode_values
from fedbilevel.federation.task import Broadcast, Task
from fedbilevel.runs import checkpoint
from fedbilevel.runs.clients import as_numbers
from fedbilevel.runs.folder import node_model

T = TypeVar("T")

NO_TASK = -1  # a number that no task has
# The variable that names the file in which a node notes how the study has ended, and the ways.
ENDED_FILE = "FEDBILEVEL_ENDED_FILE"
ENDS = ("completed", "diverged")

# The `--node-config` of a SuperNode: its keys, and the fields of `Node` that they set.
NODE_CONFIG = {
    "partition-id": "partition",
    "client-data": "client_data",
    "task": "task",
    "data-dir": "data_dir",
    "device": "device",
}


@dataclass(frozen=True)
class Node:
    """What the owner of a node decides: which client it is, where its data is, what it will run.

    Args:
        partition: Index of the client, from 0.
        client_data: `module:function`; the function is called with the index of the client and
            returns its `ClientData`. None: the task of the experiment provides the data.
        task: The only task, as `module:function`, that the experiment may name. None: the tasks
            that fedbilevel provides.
        data_dir: Folder of the data sets. None: the default folder.
        device: Where the client computes: "cpu", "cuda" or "auto".

    Raises:
        TypeError: `partition` is not an integer.
        ValueError: `partition` is negative.

    Examples:
        >>> Node(partition=0, client_data="study:load", task="study:task").device
        'cpu'
    """

    partition: int
    client_data: str | None = None
    task: str | None = None
    data_dir: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        checks.integer("partition", self.partition, least=0)

    @classmethod
    def from_config(cls, node_config: Mapping[str, object]) -> Node:
        """Read the `--node-config` of a SuperNode.

        Args:
            node_config: Values for the keys in `NODE_CONFIG`.

        Returns:
            The node.

        Raises:
            ValueError: A key is unknown, or `partition-id` is missing.

        Examples:
            >>> Node.from_config({"partition-id": 2, "data-dir": "data"}).partition
            2
        """
        fields = {}
        for key, value in node_config.items():
            if key == "num-partitions":  # Flower's simulation engine sets it
                continue
            checks.one_of("node-config", key, NODE_CONFIG)
            fields[NODE_CONFIG[key]] = value
        if "partition" not in fields:
            raise ValueError(
                "node-config has no partition-id; it must be the index of the client, from 0"
            )
        return cls(**fields)  # type: ignore[arg-type]


class Worker:
    """One client in one run: its problem, its data, and what it remembers.

    Args:
        node: What the owner of the node decides.
        job: Name of the run, hexadecimal; the client stores its memory under it.
        table: The experiment as nested tables, as the server sent it.

    Raises:
        WireError: The name of the run is not hexadecimal, or the experiment is not valid, names a
            task that this node does not allow, or has conditions of the simulator.
        ValueError: The client has no data.
        TypeError: The function that loads the data returns something else than a `ClientData`.

    Examples:
        >>> from fedbilevel.experiments import config
        >>> table = config.resolve("example", {"task": {"name": "quadratic", "clients": 2}}).table
        >>> Worker(Node(partition=1), "ab12", table).hello()
        {'client': 1, 'samples': [1, 1]}
    """

    def __init__(self, node: Node, job: str, table: configs.Table) -> None:
        if not re.fullmatch("[0-9a-f]{1,64}", job):
            raise WireError("the run's name is not hexadecimal")
        task_name = _check_task_name(node, table.get("task", {}).get("name"))
        _check_conditions(table)
        _check_algorithm_names(node, table)
        self.node = node
        self.client = node.partition
        sent = {key: value for key, value in table.items() if key != "code"}  # a path of the server
        self.config, task = _load(json.dumps(sent), task_name, node.device, node.data_dir)
        # A task measures on data of its own, which the node's owner may have replaced.
        self.evaluate_client = None if node.client_data else task.evaluate_client
        self.problem = task.problem.to(node.device)
        self.data = self._load_data(task)
        environment = self.config.environment
        episode_size = None
        if self.problem.lower_level == "private":
            episode_size = environment.batch_size
        self.problem.check(self.data, node.device, episode_size)
        self.problem, *_ = find_capabilities(self.problem, self.data, node.device, episode_size)
        self.executor = ReferenceExecutor(
            self.problem,
            {self.client: self.data},
            environment.batch_size,
            device=node.device,
            precision=self.config.experiment.runtime.precision,
        )
        folder = Path(platformdirs.user_state_dir("fedbilevel"), job)
        self.memory_file = folder / f"client-{self.client}.safetensors"
        self.model_file = node_model(folder, self.client)
        self._losses: dict[int, ClientLosses] = {}  # by number of samples; one entry

    def _load_data(self, task: tasks.Task) -> ClientData:
        if self.node.client_data is None:
            if not task.clients:
                raise ValueError("client-data is missing; this task provides no data itself")
            checks.integer("partition", self.client, least=0, most=len(task.clients) - 1)
            return task.clients[self.client]
        data = import_function("client-data", self.node.client_data)(self.client)
        if not isinstance(data, ClientData):
            raise TypeError(
                f"{self.node.client_data} returned a {type(data).__name__}; "
                "it must return a ClientData"
            )
        return data

    def hello(self) -> Values:
        """Answer a greeting: which client this is, and the sizes of its data."""
        return {"client": self.client, "samples": [self.data.size("train"), self.data.size("val")]}

    def run(self, message: Values) -> Values:
        """Run a client task.

        Args:
            message: A decoded `train` message (see `wire`).

        Returns:
            The number of the task, the values of the reply, and the cost of the task.
        """
        with _blame_message():
            task = self._read_task(message)
        remembers = task.broadcast.remembers
        before = {}
        if remembers:
            before = self._load_memory(task.number)
        self.executor.memories[self.client] = before
        (results,) = self.executor.run([task])
        if remembers:
            after = dict(self.executor.memories.get(self.client, {}))
            _make_private(self.memory_file.parent)
            memory = {"number": task.number, "before": before, "after": after}
            checkpoint.save(self.memory_file, memory)
        values = pytree.tree_map(lambda stack: stack[0], results.values)
        return {"number": task.number, "values": values, "cost": results.costs[0]._asdict()}

    def _read_task(self, message: Values) -> Task:
        phase = Phase.from_dict(message["phase"])
        number = checks.integer("number", message["number"], least=-(2**63))
        key = checks.integer("key", message["key"], least=-(2**63))
        round_ = checks.integer("round", message["round"], least=0)
        iteration = checks.integer("iteration", message["iteration"], least=0)
        steps = checks.integer("steps", message["steps"], least=1)
        submodel = self._read_submodel(message["kept"])
        kinds: dict[str, Kind] = {}
        for name, kind in message["kinds"].items():
            kinds[name] = cast(Kind, checks.one_of("kind", kind, ("x", "y")))
        stages = self.config.environment.stages
        down = [stage for stage in stages if stage.direction == "down"]
        up = [stage for stage in stages if stage.direction == "up"]
        payload = self._read_values(message["shared"])
        shared = decode_values(down, payload, kinds, templates(kinds, self.problem, submodel))
        own = self._read_values(message["each"])
        client_part = client_kinds(shared, self.problem)
        broadcast = Broadcast(phase, shared, round_, iteration, submodel, None, up, client_part)
        return Task(broadcast, number, 0, self.client, steps, own, key, 1.0)

    def _read_submodel(self, kept: dict[str, Tensor] | None) -> Submodel | None:
        if kept is None:
            return None
        axes = self.problem.axes
        return Submodel(axes, count_units(axes, {**self.problem.x, **self.problem.y}), kept)

    def _read_values(self, values: Values) -> Values:
        """Check the names of values that came with a message, and move the values to the device."""
        for name in values:
            if not isinstance(name, str) or not name.isidentifier():
                raise WireError("the message has a name that is not an identifier")
        return _to_device(values, self.node.device)

    def _load_memory(self, number: int) -> Values:
        """Return the client's memory; for a task that is sent again, as it was before that task."""
        if not self.memory_file.exists():
            return {}
        saved = checkpoint.load(self.memory_file)
        if saved["number"] == number:
            return dict(saved["before"])
        return dict(saved["after"])

    def evaluate(self, message: Values) -> Values:
        """Evaluate both losses, or the client's own model as the task says.

        Args:
            message: A decoded `evaluate` message (see `wire`).

        Returns:
            The client, and its upper and lower loss at x and y, or its metrics.
        """
        if "share" not in message:
            x, y = self._point(message, personal=True)
            metrics: dict[str, float] = {}
            if self.evaluate_client is not None:
                with torch.no_grad():
                    measured = self.evaluate_client(x, y, self.client)
                metrics = as_numbers("evaluate_client", measured)
            floats = {name: float(value) for name, value in metrics.items()}
            return {"client": self.client, "metrics": floats}
        with _blame_message():
            share = checks.integer("share", message["share"], least=1)
        if share not in self._losses:
            environment = self.config.environment
            seed = self.config.experiment.seed
            oracle = Oracle(self.problem)
            device = self.node.device
            losses = ClientLosses(oracle, self.data, environment, seed, self.client, share, device)
            self._losses = {share: losses}
        losses = self._losses[share]
        x, y = self._point(message, personal=bool(self.problem.client_names))
        with torch.no_grad():
            upper, lower = losses(x, y, losses.batch)
        return {"client": self.client, "upper": float(upper), "lower": float(lower)}

    def _point(self, message: Values, personal: bool) -> tuple[Tree, Tree]:
        """Return the x and y that were sent, or the client's own in their place."""
        with _blame_message():
            x, y = _to_device((message["x"], message["y"]), self.node.device)
        own = {}
        if personal:
            own = personal_values(_to_device(self._load_memory(NO_TASK), self.node.device))
        return self.problem.client_point(x, y, own)

    def keep_model(self, message: Values) -> None:
        """Write the client's own model, for the owner of the node; nobody else is given it.

        Args:
            message: A decoded farewell (see `wire`).
        """
        x, y = self._point(message, personal=True)
        _make_private(self.model_file.parent)
        self.model_file.write_bytes(save({**x, **y}))
        log.info("the model of client %d is in %s", self.client, self.model_file)


def _make_private(folder: Path) -> None:
    """Create a folder, and the one above it, that only their owner can enter."""
    for each in (folder.parent, folder):
        each.mkdir(parents=True, exist_ok=True)
        each.chmod(0o700)


def _check_task_name(node: Node, name: object) -> str:
    """Refuse a task that the owner of the node has not allowed.

    A task may be any `module:function`: a server that could choose one could run anything here.
    """
    if node.task is not None:
        allowed = [node.task]
        described = repr(node.task)
    else:
        allowed = tasks.names()
        described = "only tasks that fedbilevel provides"
    if name not in allowed:
        raise WireError(f"the experiment's task is {name!r:.80}; this node allows {described}")
    return str(name)


def _check_conditions(table: configs.Table) -> None:
    """Refuse conditions of the simulator, wherever an experiment may have them."""
    sections = table.get("algorithms", {}).values()
    for part in (table, *sections):
        for name in SIMULATED:
            if part.get("environment", {}).get(name) is not None:
                raise WireError(f"environment.{name} is for simulations; this node refuses it")


def _check_algorithm_names(node: Node, table: configs.Table) -> None:
    """Refuse an algorithm as module:class, unless the owner of the node has named that module.

    Whoever names a module has it imported here.
    """
    trusted = (node.task or "").partition(":")[0]
    sections = table.get("algorithms", {})
    names = [table.get("algorithm", {}).get("name"), *table.get("compare", []), *sections]
    names += [section.get("algorithm") for section in sections.values()]
    for name in names:
        module, colon, _ = str(name).partition(":")
        if colon and module != trusted:
            raise WireError(
                f"the experiment's algorithm is {name!r:.80}; this node allows registered ones and "
                "those of the module of its task"
            )


@contextmanager
def _blame_message() -> Iterator[None]:
    """Turn errors of a block that reads nothing but the message into a `WireError`."""
    try:
        yield
    except KeyError as error:
        raise WireError(f"the message has no {one_line(error)}") from error
    except (ValueError, TypeError) as error:
        raise WireError(one_line(error)) from error


@functools.lru_cache(maxsize=1)  # one process of Flower's simulation engine serves many clients
def _load(
    table: str, task: str, device: str, data_dir: str | None
) -> tuple[configs.Config, tasks.Task]:
    # The override of the task's name is needed, because another section of the table
    # ([algorithms.simfbo.task], say) could replace the name that was checked.
    overrides = {"task.name": task, "device": device}
    if ":" in task:  # the errors of the owner's module are not for the server
        import_function("task", task)
    with _blame_message():
        config = configs.resolve("the server's experiment", json.loads(table), overrides=overrides)
    for name in config.load_task.files():
        raise WireError(f"task.{name} is a path; this node opens none that it was sent")
    folder = None
    if data_dir:
        folder = Path(data_dir)
    return config, load_task(config, folder)


def _to_device(values: T, device: str) -> T:
    return cast(T, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), values))


# By client of this process: the settings of its last run as JSON, and its worker. A process of
# Flower's simulation engine serves several clients.
_workers: dict[int, tuple[str, Worker]] = {}


def worker_for(context: Context, message: Values) -> Worker:
    """Return the worker for a message: the one of the last message if that was of the same run."""
    node = Node.from_config(context.node_config)
    with _blame_message():
        job = message["job"]
        table = message["table"]
        settings = json.dumps([repr(node), job, table], sort_keys=True)
    cached_settings, worker = _workers.get(node.partition, ("", None))
    if worker is None or cached_settings != settings:
        worker = Worker(node, job, table)
        _workers[node.partition] = (settings, worker)
    return worker


def _reply(
    message: Message, context: Context, compute: Callable[[Context, Values], Values]
) -> Message:
    try:
        values = decode(message.content)
        reply = compute(context, values)
    except WireError as error:
        log.warning("message refused: %s", one_line(error))
        raise
    except Exception as error:
        log.warning("message not answered: %s: %s", type(error).__name__, one_line(error))
        name = type(error).__name__
        raise RuntimeError(f"the client failed ({name}); the log of its node says why") from error
    return Message(encode(**reply), reply_to=message)


def seal(
    message: Message, context: Context, answer: Callable[[Message, Context], Message]
) -> Message:
    """Prove that a reply answers its message; the first of the client app's modifiers.

    Args:
        message: The message.
        context: What Flower knows of the node.
        answer: The rest of the app; what it returns is not changed afterwards.

    Returns:
        The reply, sealed with the token of the message.

    Examples:
        >>> from fedbilevel.deploy.flower import client
        >>> app = ClientApp(mods=[client.seal])
        >>> _ = app.train()(client.task)
    """
    token = token_of(message.content)
    reply = answer(message, context)
    if reply.has_content():
        reply.content = seal_content(reply.content, token)
    return reply


app = ClientApp(mods=[seal])


def _answer_query(context: Context, values: Values) -> Values:
    """Answer a greeting, or note that the study has ended."""
    if "ended" not in values:
        return worker_for(context, values).hello()
    with _blame_message():
        status = checks.one_of("ended", values["ended"], ENDS)
    try:
        worker_for(context, values).keep_model(values)
    except Exception as error:  # the study has ended all the same
        log.warning("the model was not written: %s: %s", type(error).__name__, one_line(error))
    log.info("the study has ended: %s", status)
    if ENDED_FILE in os.environ:
        Path(os.environ[ENDED_FILE]).write_text(status, "utf-8")
    return {}


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Answer a greeting or a farewell; the handler of Flower's `query` messages."""
    return _reply(message, context, _answer_query)


@app.train()
def task(message: Message, context: Context) -> Message:
    """Run a client task; the handler of Flower's `train` messages."""
    return _reply(message, context, lambda c, values: worker_for(c, values).run(values))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the losses; the handler of Flower's `evaluate` messages."""
    return _reply(message, context, lambda c, values: worker_for(c, values).evaluate(values))
