"""A simulated transport: clients in this process, and a virtual clock with delays and faults."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.execution.executor import Executor
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.replies import join, row
from fedbilevel.federation.task import Results, Task, TaskCost, Values
from fedbilevel.federation.transport import Arrived, Departed, Missed, Rejected, Report, Transport
from fedbilevel.transports._faults import Ending, Fates

AHEAD = 1024  # posted tasks that are computed together, because one of them is due

Losses = Callable[[Tree, Tree], dict[str, float]]


class Packing(NamedTuple):
    """How the values of one client lie in a row of bytes: one tensor per waiting reply is little to keep."""

    kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    form: pytree.TreeSpec

    def stack(self, rows: Tensor) -> Values:
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in self.kinds]
        parts = zip(rows.split(sizes, 1), self.kinds, strict=True)
        values = [
            _contiguous(part).view(-1).view(dtype).view(len(rows), *shape)
            for part, (dtype, shape) in parts
        ]
        return pytree.tree_unflatten(values, self.form)  # type: ignore[no-any-return]


def packed(stack: Values) -> tuple[Tensor, Packing]:
    """A stack of replies as rows of bytes."""
    tensors, form = pytree.tree_flatten(stack)
    rows = [_contiguous(t.reshape(len(t), -1)).view(torch.uint8) for t in tensors]
    return torch.cat(rows, 1), Packing(tuple((t.dtype, t.shape[1:]) for t in tensors), form)


def _contiguous(t: Tensor) -> Tensor:
    # `contiguous` leaves a single row where it is, at an address and with strides that another dtype need not allow.
    return t.clone(memory_format=torch.contiguous_format)


class Flight(NamedTuple):
    """A posted task on its way, and its reply once that is computed."""

    task: Task
    reply: tuple[Tensor, Packing] | None = None
    cost: TaskCost = TaskCost()


class VirtualClock(Transport):
    """Clients in this process: who is asked what, when it ends, and what becomes of it.

    An `ask` takes as long as its slowest client, a posted task is due when its client's delay is over. What a posted
    task computes depends only on what was sent, so it is computed when it is first needed, together with others that
    are under way.

    Args:
        executor: computes what tasks return.
        clients: how many there are.
        environment: delays, stragglers, faults and the deadline.
        seed: of the choice of stragglers; delays and faults are keyed by the task.
        device: where waiting replies are kept.
        losses: the upper and lower loss over the clients.
    """

    ordered = True

    def __init__(
        self,
        executor: Executor,
        clients: int,
        environment: Environment,
        *,
        seed: int,
        device: str,
        losses: Losses,
    ) -> None:
        self.executor = executor
        self.clients = clients
        self.environment = environment
        self.device = device
        self._losses = losses
        self._now = 0.0
        self.flights: dict[int, Flight] = {}  # by client
        self.uncomputed: dict[
            int, None
        ] = {}  # the clients whose reply is yet to be computed, oldest first
        self.endings: list[Ending] = []  # a heap
        self.free_at: dict[
            int, float
        ] = {}  # when a client that is busy or away can begin the next task
        self.fates = Fates(environment, clients, seed)

    @property
    def now(self) -> float:
        return self._now

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        return self._losses(x, y)

    def absent(self, needed: int, busy: Collection[int]) -> Collection[int]:
        self.free_at = {client: time for client, time in self.free_at.items() if time > self.now}
        missing = needed - (self.clients - len(self.free_at))
        if missing > 0:
            self._now = sorted(self.free_at.values())[missing - 1]
        # A client whose delay is over is free, whether or not its reply was collected; without delays all always are.
        return {client for client, time in self.free_at.items() if time > self.now}

    def samples(self, client: int) -> int:
        return self.executor.samples(client)

    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterator[Report]:
        yield Departed(tasks)
        if barrier:
            return
        at_once = [Ending(self.now, task.number, 0, task.client, False) for task in tasks]
        endings = self.fates.endings(tasks, self.now, float("inf"), self.free_at) or at_once
        lost = {ending.number for ending in endings if ending.lost}
        self.flights |= {task.client: Flight(task) for task in tasks}
        self.uncomputed |= {task.client: None for task in _computed(tasks, lost)}
        for ending in endings:
            heapq.heappush(self.endings, ending)

    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterator[Report]:
        return self._collected(limit) if tasks is None else self._awaited(tasks)

    def _awaited(self, tasks: Sequence[Task]) -> Iterator[Report]:
        """What becomes of tasks with a barrier."""
        latest = self.now + (self.environment.deadline or float("inf"))
        endings = self.fates.endings(tasks, self.now, latest, self.free_at)
        lost = {ending.number for ending in endings if ending.lost}
        if tasks and tasks[0].broadcast.remembers:  # what was posted before comes before
            self._compute([task.client for task in tasks if task.client in self.uncomputed])
        costs: dict[int, TaskCost] = {}
        for results in self.executor.run(
            _computed(tasks, lost), sums=self._only_summed(tasks, lost)
        ):
            kept = [j for j, task in enumerate(results.tasks) if task.number not in lost]
            if len(kept) < len(results.tasks):
                costs |= {
                    task.number: cost
                    for task, cost in zip(results.tasks, results.costs, strict=True)
                }
            if kept:
                yield from map(Arrived, self.fates.arriving(results.chosen(kept)))
        if endings:
            yield from self._ended(tasks, endings, costs)

    def _ended(
        self, tasks: Sequence[Task], endings: Sequence[Ending], costs: Mapping[int, TaskCost]
    ) -> Iterator[Report]:
        """Let time pass until tasks with a barrier have ended; costs: of those that are lost and were computed."""
        by_number = {task.number: task for task in tasks}
        for ending in sorted(endings):
            self._now = max(self.now, ending.due)
            task = by_number[ending.number]
            task.ended = ending.due
            if ending.copy:
                yield Rejected(ending.client, "answered twice")
            elif ending.lost:
                yield Missed(task, costs.get(ending.number))

    def _collected(self, limit: int) -> Iterator[Report]:
        """What comes next of the tasks without a barrier."""
        arrived: list[int] = []
        while self.endings and len(arrived) < limit:
            ending = heapq.heappop(self.endings)
            self._now = max(self.now, ending.due)
            if ending.copy:
                yield Rejected(ending.client, "answered twice")
                continue
            task = self.flights[ending.client].task
            task.ended = ending.due
            if not ending.lost:
                arrived.append(ending.client)
                continue
            cost = None
            if task.broadcast.remembers:
                self._compute([ending.client])
                cost = self.flights[ending.client].cost
            del self.flights[ending.client]
            yield Missed(task, cost)
        self._compute(arrived)
        groups: dict[int, list[Flight]] = {}
        for client in arrived:
            flight = self.flights.pop(client)
            groups.setdefault(id(flight.task.broadcast.submodel), []).append(flight)
        for flights in groups.values():
            yield from map(Arrived, self.fates.arriving(_landed(flights)))

    def _compute(self, needed: list[int]) -> None:
        """Compute the replies of these clients' posted tasks that are not, and of more of those under way."""
        needed = [client for client in needed if self.flights[client].reply is None]
        if not needed:
            return
        together = dict.fromkeys([*needed, *itertools.islice(self.uncomputed, AHEAD)])
        for results in self.executor.run([self.flights[client].task for client in together]):
            rows, packing = packed(results.values)
            for task, cost, reply in zip(results.tasks, results.costs, rows.split(1), strict=True):
                # A copy: a view would keep the whole stack for as long as the reply of a straggler is waited for.
                self.flights[task.client] = Flight(task, (reply.clone(), packing), cost)
                self.uncomputed.pop(task.client, None)

    def _only_summed(self, tasks: Sequence[Task], lost: Collection[int]) -> bool:
        """Whether nobody looks at a single reply of these, and all that are computed count."""
        if not tasks or self.fates.corrupt:
            return False
        broadcast = tasks[0].broadcast
        return (
            broadcast.phase.summed and not broadcast.stages and not (lost and broadcast.remembers)
        )

    @contextmanager
    def standstill(self) -> Iterator[None]:
        now = self.now
        free_at = dict(self.free_at)
        try:
            yield
        finally:
            self._now = now
            self.free_at = free_at

    def mark(self) -> Any:
        state = (
            self.now,
            dict(self.free_at),
            dict(self.flights),
            dict(self.uncomputed),
            list(self.endings),
        )
        return state, self.executor.mark()

    def back(self, mark: Any) -> None:
        (self._now, free_at, flights, uncomputed, endings), executor = mark
        self.free_at, self.flights = dict(free_at), dict(flights)
        self.uncomputed, self.endings = dict(uncomputed), list(endings)
        self.executor.back(executor)

    def snapshot(self) -> dict[str, Any]:
        computed = {
            client: (row(packing.stack(reply), 0), *flight.cost)
            for client, flight in self.flights.items()
            if flight.reply is not None
            for reply, packing in [flight.reply]
        }
        return {
            "now": self.now,
            "free_at": dict(self.free_at),
            "uncomputed": list(self.uncomputed),
            "endings": [tuple(ending) for ending in self.endings],
            "computed": computed,
            "executors": ranks.gather(self.executor.snapshot()),
        }

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        self._now = snapshot["now"]
        self.free_at = dict(snapshot["free_at"])
        self.uncomputed = dict.fromkeys(snapshot["uncomputed"])
        self.endings = [Ending(*ending) for ending in snapshot["endings"]]
        self.flights = {client: Flight(task) for client, task in tasks.items()}
        for client, (values, *cost) in snapshot["computed"].items():
            here = pytree.tree_map(lambda t: t.to(self.device), values)
            self.flights[client] = Flight(tasks[client], packed(join([here])), TaskCost(*cost))
        self.executor.restore(snapshot["executors"])

    def keep_in(self, folder: Path) -> None:
        self.executor.keep_in(folder)


def _computed(tasks: Sequence[Task], lost: set[int]) -> Sequence[Task]:
    """The tasks whose result matters: of a lost one only what the client remembers does."""
    if not lost:
        return tasks
    return [task for task in tasks if task.number not in lost or task.broadcast.remembers]


def _landed(flights: Sequence[Flight]) -> Results:
    """Computed replies as a stack."""
    replies = [flight.reply for flight in flights if flight.reply is not None]
    packing, *others = {
        id(packing): packing for _, packing in replies
    }.values()  # few are compared, not all
    if all(other == packing for other in others):
        values = packing.stack(torch.cat([reply for reply, _ in replies]))
    else:  # of other dtypes, because a number was sent as another type
        values = join([row(other.stack(reply), 0) for reply, other in replies])
    size = nbytes(values) // len(flights)
    return Results(
        [flight.task for flight in flights], [flight.cost for flight in flights], size, values
    )
