"""Replies of clients to tasks and to requests for their losses, read without trusting them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch
from flwr.app import Message, RecordDict
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.deploy.flower._claims import MAX_COST
from fedbilevel.deploy.flower._grid import (
    EXPIRED_CODE,
    NODE_DIED_CODES,
    REPLY_POLL_S,
    NodeReply,
    Sent,
)
from fedbilevel.deploy.flower._members import Members
from fedbilevel.deploy.flower.wire import SHORT, Limits, Values, WireError, one_line
from fedbilevel.federation.replies import log
from fedbilevel.federation.task import Results, Task, TaskCost
from fedbilevel.federation.transport import Arrived, Rejected

CHARS_PER_TENSOR = 256  # in the header of a message, without name and shape
CHARS_PER_ITEM = 24  # for a character of the name, which JSON may escape, or a size of the shape
BYTES_PER_VALUE = 16  # twice those of the largest dtype
MAX_METRICS = 32  # of one client
MAX_NAME = 64  # characters of the name of a metric
STAGE_FACTOR = 4  # the payload of a stage may be larger than its value

T = TypeVar("T")


def reply_limits(task: Task, problem: Problem) -> Limits:
    """Bound a reply by what its phase declares, with room for mistakes that are worth a reason."""
    chars, nbytes = SHORT
    for name, kind in task.broadcast.phase.reply.items():
        shapes: Mapping[str, Sequence[int]]
        if kind == "scalar":
            shapes = {"": ()}
        elif isinstance(kind, str):
            variable = problem.x if kind == "x" else problem.y
            shapes = {key: tensor.shape for key, tensor in variable.items()}
        else:
            shapes = kind
        for key, shape in shapes.items():
            chars += CHARS_PER_TENSOR + CHARS_PER_ITEM * (len(name) + len(key) + len(shape))
            nbytes += BYTES_PER_VALUE * math.prod(shape)
    if task.broadcast.stages:
        return Limits(STAGE_FACTOR * chars, STAGE_FACTOR * nbytes)
    return Limits(chars, nbytes)


def read_task_reply(
    task: Task, reply: NodeReply, problem: Problem, device: str
) -> Arrived | Rejected:
    """Decode the reply to a client task, or reject it with a reason.

    Checked here: that the reply is to this task, that its values are tensors of a known dtype, and
    its cost. The federation checks shapes, and whether values are finite, as in a simulation.
    """
    try:
        message = reply.decode()
        number = checks.integer("number", message["number"], least=0)
        if number != task.number:
            raise WireError(f"the reply is to task {number}, not to task {task.number}")
        values = _check_tensors(message["values"])
        if not task.broadcast.stages:  # the payload of a stage may have any structure and dtype
            _check_dtypes(values, next(iter(problem.x.values())).dtype)
        cost = _read_cost(message["cost"])
        stack = pytree.tree_map(lambda tensor: tensor.to(device).unsqueeze(0), values)
    except KeyError as error:
        return Rejected(task.client, f"the reply has no {error}", task)
    except Exception as error:  # whatever the node has sent, it must not end the run
        return Rejected(task.client, one_line(error) or type(error).__name__, task)
    return Arrived(Results([task], [cost], nbytes(values), stack))


def _check_tensors(values: object) -> Values:
    if not isinstance(values, dict):
        raise WireError("the reply holds values that are not tensors")
    if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values)):
        raise WireError("the reply holds values that are not tensors")
    if not all(isinstance(name, str) for name in values):
        raise WireError("the reply has a name that is not a string")
    return values


def _check_dtypes(values: Mapping[str, object], dtype: torch.dtype) -> None:
    allowed = {dtype, torch.float64, torch.float32, torch.int64}
    for name, value in values.items():
        if not isinstance(value, (Tree, Tensor)):
            raise WireError("the reply holds values that are not tensors")
        for tensor in pytree.tree_leaves(value):
            if tensor.dtype not in allowed:
                raise WireError(f"the reply holds {name!r} as {tensor.dtype}")


def _read_cost(cost: Mapping[str, object]) -> TaskCost:
    counts = {}
    for name in TaskCost._fields:
        counts[name] = checks.integer(name, cost[name], least=0, most=MAX_COST)
    return TaskCost(**counts)


def request_values(
    members: Members,
    request: RecordDict,
    clients: Collection[int],
    deadline_s: float,
    what: str,
    read: Callable[[Values], T],
) -> tuple[dict[int, T], list[int]]:
    """Ask clients to evaluate something, and wait for the answers.

    Args:
        members: Knows the node of each client.
        request: The content of the message.
        clients: Whom to ask; all of them are present.
        deadline_s: Seconds in which they must answer.
        what: What they evaluate, for messages: "losses" or "metrics".
        read: Returns what an answer holds; an error says what is wrong with it.

    Returns:
        What each client answered in time, and the clients whose answers were refused.
    """
    waiting: dict[int, tuple[Sent, int]] = {}
    for client in clients:
        node = members.node_of[client]
        sent = members.grid.push(Message(request, node, "evaluate", ttl=deadline_s))
        if sent is not None:
            waiting[client] = (sent, node)
    deadline = time.monotonic() + deadline_s
    answers: dict[int, T] = {}
    refused: list[int] = []
    while waiting and time.monotonic() < deadline:
        for client, (sent, node) in list(waiting.items()):
            reply = members.grid.pull(sent)
            if reply is not None:
                del waiting[client]
                try:
                    answers[client] = read(reply.decode())
                except Exception as error:  # whatever the node has sent, it must not end the run
                    log.warning(
                        "client %d did not report its %s: %s", client, what, one_line(error)
                    )
                    if reply.error_code not in (EXPIRED_CODE, *NODE_DIED_CODES):
                        refused.append(client)
            elif members.node_of.get(client) != node:  # it has left
                del waiting[client]
        members.refresh()
        if waiting:
            time.sleep(REPLY_POLL_S)
    for client, (_, node) in waiting.items():
        log.warning("client %d did not report its %s in time", client, what)
        members.remove(client, node)
    return answers, refused


def read_losses(values: Values) -> tuple[float, float]:
    """Return the upper and the lower loss that a client reports, after checking them."""
    return _check_loss("upper", values["upper"]), _check_loss("lower", values["lower"])


def read_metrics(values: Values) -> dict[str, float]:
    """Return the metrics that a client reports of its own model, after checking them."""
    metrics = values["metrics"]
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise TypeError(f"its metrics are not a table of at most {MAX_METRICS}")
    checked = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_NAME:
            raise TypeError(f"its metric {name!r:.40} is not a name")
        checked[name] = _check_loss(name, value, "")
    return checked


def _check_loss(name: str, value: object, noun: str = " loss") -> float:
    if not isinstance(value, float):  # an int may be too large to become a float
        raise TypeError(f"its {name}{noun} is {value!r:.40}; it must be a number")
    return checks.number(f"its {name}{noun}", value)
