"""Reports of a transport: their order, the tasks that ended with them, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.tree import nbytes
from fedbilevel.federation.ledger import Event, MessagesSent, TaskLost, TasksDone
from fedbilevel.federation.task import Broadcast, Results, Task, TaskCost
from fedbilevel.federation.transport import Arrived, Departed, Missed, Rejected, Report


def in_client_order(reports: Iterable[Report]) -> Iterator[Report]:
    """The same reports with the replies last: one stack per broadcast, in the order of the clients.

    Sums then do not depend on who was first.
    """
    arrived: dict[Broadcast, list[Results]] = defaultdict(list)
    for report in reports:
        if isinstance(report, Arrived):
            arrived[report.results.tasks[0].broadcast].append(report.results)
        else:
            yield report
    for results in arrived.values():
        yield from _merge(results)


def _merge(results: Sequence[Results]) -> Iterator[Arrived]:
    """Results of one broadcast as one stack, or one by one if their replies have unequal shapes."""
    ordered = sorted(results, key=lambda part: part.tasks[0].position)
    tasks: list[Task] = []
    costs: list[TaskCost] = []
    leaves: list[list[Tensor]] = []
    shapes = set()
    for part in ordered:
        tensors, treespec = pytree.tree_flatten(part.values)
        shapes.add((treespec, *((tensor.shape, tensor.dtype) for tensor in tensors)))
        leaves.append(tensors)
        tasks += part.tasks
        costs += part.costs
    if len(shapes) > 1:
        yield from map(Arrived, ordered)
        return
    stacked = [torch.cat(column) for column in zip(*leaves, strict=True)]
    values = pytree.tree_unflatten(stacked, treespec)
    yield Arrived(Results(tasks, costs, ordered[0].nbytes, values))


def ended_tasks(reports: Iterable[Report]) -> Iterator[Task]:
    """The tasks that ended according to these reports."""
    for report in reports:
        if isinstance(report, Arrived):
            yield from report.results.tasks
        elif isinstance(report, (Missed, Rejected)) and report.task is not None:
            yield report.task


def end_time(task: Task) -> tuple[float, int]:
    """When a task ended; the number of the task decides between equal times."""
    return task.ended_at, task.number


def costs_of(report: Report) -> Iterator[Event]:
    """What a report adds to the ledger. Messages and replies that stay on a client have no bytes.

    Refused replies are not among it: nobody knows yet which ones are.
    """
    match report:
        case Departed(tasks):
            if not any(task.broadcast.is_local for task in tasks):
                yield _messages_sent(tasks)
        case Arrived(results):
            broadcast = results.tasks[0].broadcast
            clients = [task.client for task in results.tasks]
            sent = 0 if broadcast.is_local else results.nbytes
            yield TasksDone(broadcast.phase.name, clients, results.costs, [sent] * len(clients))
        case Missed(task, cost, excluded):
            if cost is not None:
                yield TasksDone(task.broadcast.phase.name, [task.client], [cost], [0])
            if not excluded:
                yield TaskLost()


def _messages_sent(tasks: Sequence[Task]) -> MessagesSent:
    """The bytes that tasks have on the wire, on the way to their clients."""
    broadcasts = {task.broadcast for task in tasks}
    shared = {broadcast: nbytes(broadcast.wire_message) for broadcast in broadcasts}
    clients = []
    sizes = []
    for task in tasks:
        size = shared[task.broadcast]
        if task.client_message:
            size += nbytes(dict(task.client_message))
        clients.append(task.client)
        sizes.append(size)
    phase = tasks[0].broadcast.phase.name if tasks else ""
    return MessagesSent(phase, clients, sizes)
