"""The federation: what an algorithm sees of its clients, the same on every transport."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, integers, root, subset
from fedbilevel.core.tree import nbytes
from fedbilevel.federation import ledger as events
from fedbilevel.federation._assignment import Assigner, Own, Submodels
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import QuorumError, Replies
from fedbilevel.federation.task import Broadcast, Results, Task
from fedbilevel.federation.transport import Arrived, Departed, Missed, Rejected, Report, Transport


class Federation:
    """Asks clients to run phases, checks and averages what they reply, and books what it costs.

    `ask` is a barrier and one communication round; `post` and `collect` are the same without the barrier. A client has
    at most one posted task at a time, and posted tasks are of one phase at a time.

    Args:
        problem: what is solved.
        clients: how many clients are registered.
        transport: carries tasks to the clients and tells the time.
        environment: the conditions under which clients take part.
        weights: returns p_i for each client; called when it is first needed.
        seed: of everything that is drawn.
        device: where the server computes.
    """

    KEPT = (
        "iteration",
        "cohorts",
        "draws",
        "recorded",
        "heard",
        "in_flight",
        "deferred_quorum_error",
    )

    def __init__(
        self,
        problem: Problem,
        clients: int,
        transport: Transport,
        environment: Environment | None = None,
        *,
        weights: Callable[[], Sequence[float]],
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.environment = environment or Environment()
        self.environment.check(clients)
        self.problem = problem
        self.n = clients
        self.transport = transport
        self.weights = weights
        self.seed = checks.integer("seed", seed, least=0)
        self.device = device
        self.assigner = Assigner(
            problem, clients, self.environment, weights, transport.samples, seed
        )
        self.ledger = Ledger()
        self.iteration = 0  # completed iterations of the algorithm
        self.cohorts = 0
        self.draws = 0
        self.recorded: dict[str, tuple[float | Tensor, int]] = {}  # sums or extremes, and counts
        self.heard: set[int] = set()
        self.in_flight: dict[int, Task] = {}  # posted tasks that have not ended, by client
        self.unjudged: tuple[int, Replies] | None = (
            None  # how many were asked, and replies taken unchecked
        )
        self.deferred_quorum_error = ""

    def __len__(self) -> int:
        """The number of registered clients."""
        return self.n

    @property
    def now(self) -> float:
        """Seconds since the run began; virtual ones in a simulation."""
        return self.transport.now

    def sample(self) -> list[int]:
        """The cohort of a round: distinct clients, drawn uniformly among those that are neither busy nor away.

        If there are fewer than `min_replies` of them, time passes until there are so many.
        """
        absent = self.transport.absent(self.environment.min_replies, self.in_flight)
        key = fold_in(root(self.seed, "cohort"), self.cohorts)
        self.cohorts += 1
        size = self.environment.cohort(len(self))
        if not absent:
            return subset(key, len(self), size)
        candidates = subset(
            key, len(self), size + len(absent)
        )  # costs nothing per registered client
        present = [client for client in candidates if client not in absent]
        return [present[place] for place in subset(fold_in(key, 1), len(present), size)]

    def draw(self, count: int) -> int:
        """A choice of the server's own among 0 .. count - 1, uniform and keyed."""
        key = fold_in(root(self.seed, "server"), self.draws)
        self.draws += 1
        return int(integers(key, 0, count - 1))

    def ask(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: Own = None,
        submodels: Submodels = None,
        **message: Any,
    ) -> Replies:
        """Have clients run a phase, and wait for all replies.

        Args:
            phase: what each client does.
            clients: whom to ask; a client may be asked more than once.
            each: what `clients[j]` alone is sent.
            submodels: one per client; the trees in `message` are cut to it, and so is the reply. None: the whole model.
            **message: what everyone is sent.
        """
        tasks = self.assigner.assign(
            phase, clients, each, submodels, message, self.ledger.rounds + 1, self.iteration
        )
        self.ledger.book(events.Round(phase.name))
        replies = Replies(f"phase {phase.name!r}, round {self.ledger.rounds}", phase, self.problem)
        reports: Iterable[Report] = itertools.chain(
            self.transport.send(tasks, True), self.transport.receive(tasks, len(tasks))
        )
        if not self.transport.ordered:
            reports = _in_order(reports)
        for report in reports:
            self._take(report, replies)
        replies.idle = [task.client for task in sorted(tasks, key=_end_time)]
        return self._quorum(len(tasks), replies)

    def post(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: Own = None,
        submodels: Submodels = None,
        **message: Any,
    ) -> None:
        """Have clients run a phase, without waiting; the arguments are those of `ask`."""
        for client, times in Counter(clients).items():
            if client in self.in_flight or times > 1:
                raise RuntimeError(
                    f"client {client} would have two tasks in flight; it can have one at a time"
                )
        for other in itertools.islice(self.in_flight.values(), 1):
            if other.broadcast.phase.name != phase.name:
                name = other.broadcast.phase.name
                raise RuntimeError(
                    f"phase {phase.name!r} must wait: tasks of {name!r} are in flight"
                )
        tasks = self.assigner.assign(
            phase, clients, each, submodels, message, self.ledger.rounds + 1, self.iteration
        )
        self.in_flight |= {task.client: task for task in tasks}
        for report in self.transport.send(tasks, False):
            self._take(report, None)

    def collect(self, count: int | None = None) -> Replies:
        """The next `count` accepted arrivals (by default the environment's participation), or all there are."""
        if not self.in_flight:
            raise RuntimeError(
                "nothing is in flight, so nothing can be collected; post a task first"
            )
        if count is None:
            count = self.environment.cohort(len(self))
        checks.integer("count", count, least=1)
        phase = next(iter(self.in_flight.values())).broadcast.phase
        self.ledger.book(events.Round(phase.name))
        replies = Replies(f"phase {phase.name!r}, round {self.ledger.rounds}", phase, self.problem)
        while self.in_flight and len(replies) < count:
            reports = list(self.transport.receive(None, count - len(replies)))
            if not reports:
                name = type(self.transport).__name__
                raise RuntimeError(
                    f"{name} reports nothing of {len(self.in_flight)} tasks in flight"
                )
            for task in sorted(_ended(reports), key=_end_time):
                task.position = len(replies.idle)
                replies.idle.append(task.client)
            for report in reports:
                self._take(report, replies)
        self._refused(replies)
        self.record(**replies.coverage())
        if staleness := [reply.staleness for reply in replies]:
            self.record(staleness=sum(staleness) / len(staleness), max_staleness=max(staleness))
            self.heard |= {reply.client for reply in replies}
        return replies

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        """Within, exchanges cost nothing and take no time: only to simulate what a paper takes to be free."""
        self.settle()  # replies taken unchecked are counted where they were spent
        booked = self.ledger
        self.ledger = deepcopy(booked)
        try:
            with self.transport.standstill():
                yield
                self.settle()
        finally:
            self.ledger = booked

    def record(self, **values: float | Tensor) -> None:
        """An algorithm's own numbers for the metrics; averaged between evaluations.

        Of what is called max_... or min_... the extreme is kept.
        """
        for name, value in values.items():
            total, count = self.recorded.get(name, (0.0, 0))
            extreme = EXTREMES.get(name.split("_")[0])
            if extreme and count:
                self.recorded[name] = (extreme(float(total), float(value)), count + 1)
            else:  # tensors stay where they are: a GPU is not waited for
                self.recorded[name] = (
                    total + (value.double() if isinstance(value, Tensor) else value),
                    count + 1,
                )

    def records(self) -> dict[str, float]:
        """What was recorded since the last call."""
        found = {}
        for name, (total, count) in self.recorded.items():
            found[name] = float(total) / (1 if name.split("_")[0] in EXTREMES else count)
        if self.heard:
            found["participants"] = len(self.heard)
        self.recorded = {}
        self.heard = set()
        return found

    def settle(self) -> None:
        """Judge the replies that were taken unchecked, if any."""
        self._judge()
        if self.deferred_quorum_error:
            raise QuorumError(self.deferred_quorum_error)

    def mark(self) -> dict[str, Any]:
        """What `back` needs to undo an iteration, until the next mark."""
        kept = {name: copy(getattr(self, name)) for name in self.KEPT}
        kept |= {
            "ledger": self.ledger.mark(),
            "unjudged": self.unjudged,
            "transport": self.transport.mark(),
        }
        return {**kept, "tasks": self.assigner.made}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.ledger.back(mark["ledger"])
        self.transport.back(mark["transport"])
        self.unjudged = mark["unjudged"]
        self.assigner.made = mark["tasks"]
        for name in self.KEPT:
            setattr(self, name, copy(mark[name]))

    def snapshot(self) -> dict[str, Any]:
        """Everything but the algorithm's state that the next iteration depends on, for a file."""
        self._judge()
        return {
            **{name: getattr(self, name) for name in self.KEPT},
            "ledger": asdict(self.ledger),
            "recorded": {
                name: (float(total), count) for name, (total, count) in self.recorded.items()
            },
            "heard": sorted(self.heard),
            "tasks": self.assigner.made,
            "in_flight": self.assigner.plain(list(self.in_flight.values())),
            "transport": self.transport.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot."""
        for name in self.KEPT:
            setattr(self, name, copy(snapshot[name]))
        self.ledger = Ledger.load(snapshot["ledger"])
        self.heard = set(snapshot["heard"])
        self.assigner.made = snapshot["tasks"]
        self.in_flight = {
            task.client: task for task in self.assigner.load(snapshot["in_flight"], self.device)
        }
        self.transport.restore(snapshot["transport"], self.in_flight)

    def _take(self, report: Report, replies: Replies | None) -> None:
        """Book what a transport reports, and add what has arrived to the replies."""
        if isinstance(report, Departed):
            self.ledger.book(_sent(report.tasks))
            return
        assert replies is not None
        match report:
            case Arrived(results):
                clients = [task.client for task in results.tasks]
                sizes = [results.nbytes] * len(clients)
                self.ledger.book(events.Worked(replies.phase.name, clients, results.costs, sizes))
                replies.accept(results, self.iteration)
            case Missed(task, cost, put_aside):
                if cost is not None:
                    self.ledger.book(events.Worked(replies.phase.name, [task.client], [cost], [0]))
                if not put_aside:
                    self.ledger.book(events.Lost())
            case Rejected(client, why):
                replies.refuse(client, why)
        for task in _ended([report]):
            if self.in_flight.get(task.client) is task:
                del self.in_flight[task.client]

    def _quorum(self, asked: int, replies: Replies) -> Replies:
        """The end of an `ask`. Replies that were taken unchecked are judged when the next are there: a GPU is then
        busy with those."""
        self.settle()
        self.unjudged = asked, replies
        if not replies.unchecked:
            self.settle()
        self.record(**replies.coverage())
        return replies

    def _judge(self) -> None:
        if self.unjudged is None:
            return
        asked, replies = self.unjudged
        self.unjudged = None
        replies.settle()
        self._refused(replies)
        needed = min(self.environment.min_replies, asked)
        if len(replies) < needed:
            why = f" ({replies.refused[0]})" if replies.refused else ""
            accepted = f"{len(replies)} of {asked} replies were accepted"
            self.deferred_quorum_error = (
                f"{replies.label}: {accepted}, at least {needed} needed{why}"
            )

    def _refused(self, replies: Replies) -> None:
        self.ledger.book(events.Refused(len(replies.refused)))
        self.transport.refused(replies.refused_clients)


EXTREMES: dict[str, Callable[..., float]] = {"max": max, "min": min}


def _in_order(reports: Iterable[Report]) -> Iterator[Report]:
    """The same reports, with the replies last, as one stack per broadcast in the order of the clients.

    Sums then do not depend on who was first.
    """
    arrived: dict[Broadcast, list[Results]] = defaultdict(list)
    for report in reports:
        if isinstance(report, Arrived):
            arrived[report.results.tasks[0].broadcast].append(report.results)
        else:
            yield report
    for alike in arrived.values():
        yield from _stacked(alike)


def _stacked(alike: Sequence[Results]) -> Iterator[Report]:
    """Results of single tasks as one stack, or as they are where a reply has another form than the others."""
    ordered = sorted(alike, key=lambda results: results.tasks[0].position)
    flat = [pytree.tree_flatten(results.values) for results in ordered]
    leaves = [tensors for tensors, _ in flat]
    forms = {(form, *((t.shape, t.dtype) for t in tensors)) for tensors, form in flat}
    if len(forms) > 1:
        yield from map(Arrived, ordered)
        return
    values = pytree.tree_unflatten(
        [torch.cat(column) for column in zip(*leaves, strict=True)],
        flat[0][1],
    )
    tasks = [task for results in ordered for task in results.tasks]
    costs = [cost for results in ordered for cost in results.costs]
    yield Arrived(Results(tasks, costs, ordered[0].nbytes, values))


def _end_time(task: Task) -> tuple[float, int]:
    return task.ended, task.number


def _ended(reports: Iterable[Report]) -> Iterator[Task]:
    """The tasks that have ended by these reports."""
    for report in reports:
        if isinstance(report, Arrived):
            yield from report.results.tasks
        elif isinstance(report, (Missed, Rejected)) and report.task is not None:
            yield report.task


def _sent(tasks: Sequence[Task]) -> events.Sent:
    """What tasks weigh on their way to the clients."""
    shared = {
        broadcast: nbytes(broadcast.travels) for broadcast in {task.broadcast for task in tasks}
    }
    sizes = [shared[task.broadcast] + (nbytes(dict(task.own)) if task.own else 0) for task in tasks]
    phase = tasks[0].broadcast.phase.name if tasks else ""
    return events.Sent(phase, [task.client for task in tasks], sizes)
