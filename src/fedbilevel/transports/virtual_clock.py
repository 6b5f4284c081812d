"""The virtual clock: a transport that simulates clients in this process, with delays and faults.

Time is virtual: it passes when the server waits, by as much as the delay models say. A late reply,
one that misses the deadline of an `ask`, is lost: `OutcomeSampler.draw_outcomes` in _outcomes.py
marks it so.
"""

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
from fedbilevel.federation.phase import Side
from fedbilevel.federation.screening import Strikes
from fedbilevel.federation.stacks import reply_at, stack_replies
from fedbilevel.federation.task import Results, Task, TaskCost
from fedbilevel.federation.transport import Arrived, Departed, Missed, Rejected, Report, Transport
from fedbilevel.transports._outcomes import Outcome, OutcomeSampler
from fedbilevel.transports._packing import ByteLayout, pack

COMPUTE_AHEAD = 1024  # the most posted tasks that are computed together when one of them is due
SECOND_REPLY = "answered twice"

Losses = Callable[[Tree, Tree], dict[str, float]]


class Flight(NamedTuple):
    """A posted task that has not ended, and its reply once that is computed.

    Attributes:
        task: The task.
        reply: The reply as one row of bytes, and its layout.
        cost: What the client spent on it.
    """

    task: Task
    reply: tuple[Tensor, ByteLayout] | None = None
    cost: TaskCost = TaskCost()


class VirtualClock(Transport):
    """A transport to simulated clients in this process.

    An `ask` takes as long as its slowest client, and so does an iteration of a method without a
    server: a link waits for the slower one of its two clients. A posted task ends when its client's
    delay is over. What it computes depends only on what was sent, not on when it is computed; it is
    computed when its reply is first needed, together with other tasks in flight.

    `fb.simulated_federation` puts it together with an executor and a federation.

    Args:
        executor: Computes what tasks return.
        clients: How many clients are registered.
        environment: Delays, stragglers, faults and the deadline.
        seed: The root of the draw of stragglers; delays and faults are keyed by the task.
        device: Where waiting replies are kept.
        losses: Computes the global upper and lower loss.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> environment = fb.Environment(delay=fb.delays.Constant(2.0))
        >>> fed = fb.simulated_federation(task.problem, task.clients, environment)
        >>> result = fb.solve(task.problem, task.clients, "simfbo", rounds=3, federation=fed)
        >>> type(fed.transport).__name__, fed.transport.now
        ('VirtualClock', 6.0)
    """

    ordered = True
    reads_own = True
    has_links = True

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
        # Clients whose reply is not computed yet, oldest first: a dict serves as an ordered set.
        self.uncomputed: dict[int, None] = {}
        self.scheduled: list[Outcome] = []  # a heap: what becomes of posted tasks, earliest first
        self.free_at: dict[int, float] = {}  # when a client that is busy or away can begin a task
        self.outcomes = OutcomeSampler(environment, clients, seed)
        self.strikes = Strikes(environment.strikes)

    @property
    def now(self) -> float:
        """Virtual seconds since the run began."""
        return self._now

    @property
    def excluded(self) -> Collection[int]:
        """The clients that were put aside after `Environment.strikes` refused replies."""
        return self.strikes.excluded

    def notify_refused(self, clients: Sequence[int]) -> None:
        """Count refused replies."""
        self.strikes.count(clients)

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """The global upper and lower loss; see `Transport.losses`."""
        return self._losses(x, y)

    def samples(self, client: int, side: Side) -> int:
        """How many samples a client holds on one side."""
        return self.executor.samples(client, side)

    def unavailable(self, needed: int, busy: Collection[int]) -> Collection[int]:
        """The clients that are busy or away; time passes until `needed` others are there.

        A client whose delay is over is available, whether or not its reply was collected. Without
        delays everyone always is.
        """
        self.free_at = {client: time for client, time in self.free_at.items() if time > self.now}
        waiting = [time for client, time in self.free_at.items() if client not in self.excluded]
        missing = needed - (self.clients - len(self.excluded) - len(waiting))
        if missing > 0:
            self._now = sorted(waiting)[missing - 1]
        away = {client for client, time in self.free_at.items() if time > self.now}
        return away.union(self.excluded)

    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterator[Report]:
        """Hand over tasks; without a barrier, what becomes of them is drawn now."""
        excluded = [task for task in tasks if task.client in self.excluded]
        tasks = [task for task in tasks if task.client not in self.excluded]
        yield Departed(tasks)
        if barrier:
            return
        for task in excluded:
            self.flights[task.client] = Flight(task)
            heapq.heappush(self.scheduled, Outcome(self.now, task.number, 0, task.client, True))
        outcomes = self.outcomes.draw_outcomes(tasks, self.now, float("inf"), self.free_at)
        if not outcomes:  # there are neither delays nor faults
            outcomes = [Outcome(self.now, task.number, 0, task.client, False) for task in tasks]
        lost = {outcome.number for outcome in outcomes if outcome.lost}
        self.flights |= {task.client: Flight(task) for task in tasks}
        self.uncomputed |= {task.client: None for task in _tasks_to_compute(tasks, lost)}
        for outcome in outcomes:
            heapq.heappush(self.scheduled, outcome)

    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterator[Report]:
        """Report what becomes of tasks; see `Transport.receive`."""
        if tasks is None:
            return self._receive_posted(limit)
        return self._receive_asked(tasks)

    def _receive_asked(self, tasks: Sequence[Task]) -> Iterator[Report]:
        """Compute tasks with a barrier, and report what becomes of them."""
        deadline = self.now + (self.environment.deadline or float("inf"))
        outcomes = self.outcomes.draw_outcomes(tasks, self.now, deadline, self.free_at)
        lost = {outcome.number for outcome in outcomes if outcome.lost}
        if tasks and tasks[0].broadcast.remembers:
            # A client's earlier tasks must leave their memory first.
            self._compute([task.client for task in tasks if task.client in self.uncomputed])
        costs: dict[int, TaskCost] = {}
        computed = _tasks_to_compute(tasks, lost)
        for results in self.executor.run(computed, sums=self._sums_suffice(tasks, lost)):
            kept = [j for j, task in enumerate(results.tasks) if task.number not in lost]
            if len(kept) < len(results.tasks):
                for task, cost in zip(results.tasks, results.costs, strict=True):
                    costs[task.number] = cost
            if kept:
                yield from map(Arrived, self.outcomes.corrupt(results.select(kept)))
        if outcomes:
            yield from self._pass_time(tasks, outcomes, costs)

    def _pass_time(
        self, tasks: Sequence[Task], outcomes: Sequence[Outcome], costs: Mapping[int, TaskCost]
    ) -> Iterator[Report]:
        """Let time pass until tasks with a barrier have ended, and report those without a reply.

        `costs` has the costs of tasks computed in a stack with a lost one, by task number.
        """
        by_number = {task.number: task for task in tasks}
        for outcome in sorted(outcomes):
            self._now = max(self.now, outcome.due)
            task = by_number[outcome.number]
            task.ended_at = outcome.due
            if outcome.copy:
                yield Rejected(outcome.client, SECOND_REPLY)
            elif outcome.lost:
                yield Missed(task, costs.get(outcome.number))

    def _receive_posted(self, limit: int) -> Iterator[Report]:
        """Let time pass until `limit` posted tasks have replied, and report what has ended."""
        arrived: list[int] = []
        while self.scheduled and len(arrived) < limit:
            outcome = heapq.heappop(self.scheduled)
            self._now = max(self.now, outcome.due)
            if outcome.copy:
                yield Rejected(outcome.client, SECOND_REPLY)
                continue
            task = self.flights[outcome.client].task
            task.ended_at = outcome.due
            if not outcome.lost:
                arrived.append(outcome.client)
                continue
            cost = None
            excluded = outcome.client in self.excluded
            if task.broadcast.remembers and not excluded:
                self._compute([outcome.client])
                cost = self.flights[outcome.client].cost
            del self.flights[outcome.client]
            yield Missed(task, cost, excluded)
        self._compute(arrived)
        groups: dict[int, list[Flight]] = {}
        for client in arrived:
            flight = self.flights.pop(client)
            groups.setdefault(id(flight.task.broadcast.submodel), []).append(flight)
        for flights in groups.values():
            yield from map(Arrived, self.outcomes.corrupt(_stack_flights(flights)))

    def _compute(self, clients: Sequence[int]) -> None:
        """Compute the replies of these clients' posted tasks, and of others in flight with them."""
        needed = [client for client in clients if self.flights[client].reply is None]
        if not needed:
            return
        together = dict.fromkeys([*needed, *itertools.islice(self.uncomputed, COMPUTE_AHEAD)])
        for results in self.executor.run([self.flights[client].task for client in together]):
            rows, layout = pack(results.values)
            for task, cost, row in zip(results.tasks, results.costs, rows.split(1), strict=True):
                # A copy: a view would keep the whole stack while the reply of a straggler waits.
                self.flights[task.client] = Flight(task, (row.clone(), layout), cost)
                self.uncomputed.pop(task.client, None)

    def _sums_suffice(self, tasks: Sequence[Task], lost: Collection[int]) -> bool:
        """Whether nobody needs a single reply of these tasks, and all that are computed count."""
        if not tasks or self.outcomes.corrupts:
            return False
        broadcast = tasks[0].broadcast
        if broadcast.stages or (lost and broadcast.remembers):
            return False
        if self.environment.norm_factor is not None:  # single replies are compared
            return False
        return broadcast.phase.summed

    def own(self, client: int) -> Mapping[str, Tree]:
        """What a client has of a model for itself."""
        return self.executor.own(client)

    @contextmanager
    def paused_clock(self) -> Iterator[None]:
        """A context in which no time passes."""
        now = self.now
        free_at = dict(self.free_at)
        try:
            yield
        finally:
            self._now = now
            self.free_at = free_at

    def mark(self) -> Any:
        """Mark the present state, for `rollback`; the previous mark is void."""
        state = (
            self.now,
            dict(self.free_at),
            dict(self.flights),
            dict(self.uncomputed),
            list(self.scheduled),
        )
        return state, self.executor.mark(), self.strikes.plain()

    def rollback(self, mark: Any) -> None:
        """Undo everything since the mark."""
        (now, free_at, flights, uncomputed, scheduled), executor, strikes = mark
        self.strikes.restore(strikes)
        self._now = now
        self.free_at = dict(free_at)
        self.flights = dict(flights)
        self.uncomputed = dict(uncomputed)
        self.scheduled = list(scheduled)
        self.executor.rollback(executor)

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values and tensors, for a checkpoint."""
        computed = {}
        for client, flight in self.flights.items():
            if flight.reply is not None:
                row, layout = flight.reply
                computed[client] = (reply_at(layout.unpack(row), 0), *flight.cost)
        return {
            "now": self.now,
            "free_at": dict(self.free_at),
            "uncomputed": list(self.uncomputed),
            "scheduled": [tuple(outcome) for outcome in self.scheduled],
            "computed": computed,
            "strikes": self.strikes.plain(),
            "executors": ranks.all_gather(self.executor.snapshot()),
        }

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        """Resume from a snapshot; see `Transport.restore`."""
        self._now = snapshot["now"]
        self.free_at = dict(snapshot["free_at"])
        self.uncomputed = dict.fromkeys(snapshot["uncomputed"])
        self.scheduled = [Outcome(*outcome) for outcome in snapshot["scheduled"]]
        self.flights = {client: Flight(task) for client, task in tasks.items()}
        for client, (values, *cost) in snapshot["computed"].items():
            reply = pytree.tree_map(lambda t: t.to(self.device), values)
            packed = pack(stack_replies([reply]))
            self.flights[client] = Flight(tasks[client], packed, TaskCost(*cost))
        self.strikes.restore(snapshot["strikes"])
        self.executor.restore(snapshot["executors"])

    def store_in(self, folder: Path) -> None:
        """Set the folder for the files of client memories."""
        self.executor.store_in(folder)


def _tasks_to_compute(tasks: Sequence[Task], lost: Collection[int]) -> Sequence[Task]:
    """The tasks that must be computed: a lost task only if its client remembers it."""
    if not lost:
        return tasks
    return [task for task in tasks if task.number not in lost or task.broadcast.remembers]


def _stack_flights(flights: Sequence[Flight]) -> Results:
    """Computed replies as a stack."""
    replies = [flight.reply for flight in flights if flight.reply is not None]
    # Most replies share one layout object: only distinct objects are compared.
    layout, *others = {id(layout): layout for _, layout in replies}.values()
    if all(other == layout for other in others):
        values = layout.unpack(torch.cat([row for row, _ in replies]))
    else:  # dtypes differ where a number was sent as another type
        values = stack_replies([reply_at(other.unpack(row), 0) for row, other in replies])
    size = nbytes(values) // len(flights)
    tasks = [flight.task for flight in flights]
    costs = [flight.cost for flight in flights]
    return Results(tasks, costs, size, values)
