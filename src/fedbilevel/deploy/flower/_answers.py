"""What clients answer: replies to tasks, and their losses. Nothing that arrives is trusted."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.deploy.flower._members import POLL_S, Got, Members
from fedbilevel.deploy.flower.wire import WireError, one_line
from fedbilevel.federation.replies import log
from fedbilevel.federation.task import Results, Task, TaskCost
from fedbilevel.federation.transport import Arrived, Rejected, Report


def opened(task: Task, reply: Got, problem: Problem, device: str) -> Report:
    """A reply to a task as tensors and costs, or why it cannot be read."""
    try:
        said = reply.read()
        if (number := checks.integer("number", said["number"], least=0)) != task.number:
            raise WireError(f"answers task {number}, was given {task.number}")
        values = _tensors(said["values"])
        if not task.broadcast.stages:  # what stages make of a value may have any form
            _check_numbers(values, next(iter(problem.x.values())).dtype)
        limits = {"least": 0, "most": 2**62}
        cost = TaskCost(
            *(checks.integer(name, said["took"][name], **limits) for name in TaskCost._fields)
        )
    except KeyError as error:
        return Rejected(task.client, f"the reply has no {error}", task)
    except (ValueError, TypeError, IndexError) as error:
        return Rejected(task.client, one_line(error), task)
    stack = pytree.tree_map(lambda t: t.to(device).unsqueeze(0), values)
    return Arrived(Results([task], [cost], nbytes(values), stack))


def _tensors(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(
        isinstance(t, Tensor) for t in pytree.tree_leaves(values)
    ):
        raise WireError("replied with something else than tensors")
    if not all(isinstance(name, str) for name in values):
        raise WireError("replied with a name that is no text")
    return values


def _check_numbers(values: Mapping[str, Any], dtype: torch.dtype) -> None:
    for name, value in values.items():
        if not isinstance(value, (Tree, Tensor)):
            raise WireError("replied with something else than tensors")
        dtypes = {tensor.dtype for tensor in pytree.tree_leaves(value)}
        for other in dtypes - {dtype, torch.float64, torch.float32, torch.int64}:
            raise WireError(f"replied with {name!r} as {other}")


def heard_losses(
    members: Members, job: str, content: RecordDict, clients: Collection[int], deadline_s: float
) -> dict[int, tuple[float, float]]:
    """The upper and lower loss of each of these clients that answers in time."""
    waiting: dict[int, tuple[str, int]] = {}
    for client in clients:
        node = members.node[client]
        if pushed := members.mailbox.push(Message(content, node, "evaluate", ttl=deadline_s)):
            waiting[client] = pushed, node
    due = time.monotonic() + deadline_s
    said: dict[int, tuple[float, float]] = {}
    while waiting and time.monotonic() < due:
        for client, (pushed, node) in list(waiting.items()):
            reply = members.mailbox.pull(pushed)
            if reply is not None or members.node.get(client) != node:
                del waiting[client]
            if reply is not None and (pair := _losses(client, reply)):
                said[client] = pair
        members.look(job)
        time.sleep(POLL_S)
    for client, (_, node) in waiting.items():
        log.warning("client %d did not tell its losses in time", client)
        members.missing(client, node)
    return said


def _losses(client: int, reply: Got) -> tuple[float, float] | None:
    try:
        found = reply.read()
        return _loss("upper", found["upper"]), _loss("lower", found["lower"])
    except (ValueError, TypeError, KeyError) as error:
        log.warning("client %d did not tell its losses: %s", client, one_line(error))
        return None


def _loss(name: str, value: Any) -> float:
    if not isinstance(value, float):  # any whole number could be too large for one
        raise TypeError(f"its {name} loss is {value!r:.40}; it must be a number")
    return checks.number(f"its {name} loss", value)
