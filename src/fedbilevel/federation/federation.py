"""The federation: what an algorithm sees of its clients, the same on every transport.

`Federation.sample` draws cohorts; `ask`, `post` and `collect` exchange messages and replies with
clients. Whatever a transport reports passes through `Federation._handle_report`, where bytes and
costs are booked and replies are handed to `Replies`, which refuses wrong ones.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, integers, root, subset
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.federation import ledger as events
from fedbilevel.federation._assignment import Assigner, ClientMessages, Submodels
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import QuorumError, Replies, log
from fedbilevel.federation.screening import FEWEST, Screen
from fedbilevel.federation.stacks import stack_replies
from fedbilevel.federation.task import Broadcast, Results, Task, TaskCost
from fedbilevel.federation.topology import among, links_of, mix, mixing_matrix
from fedbilevel.federation.transport import Arrived, Departed, Missed, Rejected, Report, Transport

# Recorded numbers whose name begins with one of these words are not averaged.
EXTREMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
}


class Federation:
    """Asks clients to run phases, checks and averages their replies, and books what it costs.

    `ask` waits for all replies: it is a barrier, and one communication round. `post` and `collect`
    are the same without the barrier: a client then has at most one task in flight, all tasks in
    flight are of one phase, and every `collect` is a round. `len(fed)` is the number of registered
    clients.

    Args:
        problem: What is solved.
        clients: How many clients are registered.
        transport: Carries tasks to the clients and tells the time.
        environment: The conditions under which clients take part; by default everyone, always.
        weights: Returns p_i for each client; called when it is first needed.
        seed: The root of everything that is drawn.
        device: Where the server computes.

    Attributes:
        iteration: Completed iterations of the algorithm; the run counts them.
        ledger: What the run has cost so far.
        in_flight: The posted tasks that have not ended, by client.
        runtime: How clients compute, where that was chosen before the first round, for the record.
        no_second_derivatives: Why the losses have no second derivatives; empty if they have, or if
            nobody has looked.

    Raises:
        ValueError: The environment does not fit the number of clients, or the seed is negative.

    Examples:
        One step of SimFBO by hand:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> method = fb.algorithms.SimFBO()
        >>> s = method.init(task.problem)
        >>> replies = fed.ask(method.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        >>> x = s.x - 0.1 * replies.mean("qx")
        >>> fed.ledger.rounds
        1
    """

    # What `mark` and `snapshot` keep of the attributes; their names are keys of a checkpoint.
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
        self.clients = clients
        self.transport = transport
        self.weights = weights
        self.seed = checks.integer("seed", seed, least=0)
        self.device = device
        self.assigner = Assigner(
            problem, clients, self.environment, weights, transport.samples, seed
        )
        self.ledger = Ledger()
        self.runtime: Mapping[str, str] = {}
        self.no_second_derivatives = ""
        self.iteration = 0
        self.cohorts = 0  # how many cohorts were drawn
        self.draws = 0  # how many numbers the server has drawn
        # The sum or the extreme of the numbers recorded under each name, and their count.
        self.recorded: dict[str, tuple[float | Tensor, int]] = {}
        self.heard: set[int] = set()  # clients whose replies were collected
        self.in_flight: dict[int, Task] = {}
        # The replies of the last `ask` until they are checked, and how many clients were asked.
        self.pending: tuple[int, Replies] | None = None
        self.deferred_quorum_error = ""
        self.screen: Screen | None = None
        if self.environment.norm_factor is not None:
            self.screen = Screen(self.environment.norm_factor)

    def __len__(self) -> int:
        """The number of registered clients."""
        return self.clients

    @property
    def now(self) -> float:
        """Seconds since the run began; virtual seconds in a simulation.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> environment = fb.Environment(delay=fb.delays.Constant(2.0))
            >>> fed = fb.simulated_federation(task.problem, task.clients, environment)
            >>> method = fb.algorithms.SimFBO()
            >>> s = method.init(task.problem)
            >>> replies = fed.ask(method.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
            >>> fed.now
            2.0
        """
        return self.transport.now

    def sample(self) -> list[int]:
        """Draw the cohort of a round.

        Its size is `Environment.participation`. Clients are drawn uniformly and without replacement
        from those that are available, that is neither busy with a posted task nor away; if fewer
        are available, all of them are drawn. While fewer than `min_replies` are available, time
        passes.

        Returns:
            Distinct clients. The draw is keyed by the seed and the number of cohorts drawn before.

        Raises:
            QuorumError: Too few clients have become available in time (real federations only).

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=10)
            >>> environment = fb.Environment(participation=0.3)
            >>> fed = fb.simulated_federation(task.problem, task.clients, environment)
            >>> len(set(fed.sample()))
            3
        """
        self._check_exclusions()
        unavailable = self.transport.unavailable(self.environment.min_replies, self.in_flight)
        size = self.environment.cohort_size(len(self))
        self.cohorts += 1
        if size == len(self) and not unavailable:
            return list(range(size))
        key = fold_in(root(self.seed, "cohort"), self.cohorts - 1)
        if not unavailable:
            return subset(key, len(self), size)
        # Enough candidates that a full cohort remains. No list of all registered clients is made.
        candidates = subset(key, len(self), size + len(unavailable))
        available = [client for client in candidates if client not in unavailable]
        return [available[j] for j in subset(fold_in(key, 1), len(available), size)]

    def draw(self, count: int) -> int:
        """Draw a number for the server, uniformly from 0, ..., count - 1.

        Args:
            count: How many numbers there are to choose from.

        Returns:
            The number. The draw is keyed by the seed and the number of such draws before.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> fed = fb.simulated_federation(task.problem, task.clients)
            >>> fed.draw(5) in range(5)
            True
        """
        key = fold_in(root(self.seed, "server"), self.draws)
        self.draws += 1
        return int(integers(key, 0, count - 1))

    def ask(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: ClientMessages = None,
        submodels: Submodels = None,
        **message: Any,
    ) -> Replies:
        """Have clients run a phase, and wait for all replies: one communication round.

        Args:
            phase: What each client does.
            clients: Whom to ask; a client may be asked more than once.
            each: What `clients[j]` alone is sent.
            submodels: The part of the model that `clients[j]` holds: trees in `message` are cut to
                it, and so is the reply. None is the whole model, for one client or for all.
            **message: What everyone is sent: trees, tensors and numbers by name.

        Returns:
            The accepted replies.

        Raises:
            QuorumError: Fewer than `Environment.min_replies` replies were accepted. For replies
                that are summed on a GPU it is raised one round later.
            ClientError: A client's own code or data failed.
            ValueError: A client does not exist, or `each` or `submodels` has a wrong length.
            TypeError: `phase` is not a `Phase`, or replies with something else than it declares.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> fed = fb.simulated_federation(task.problem, task.clients)
            >>> method = fb.algorithms.SimFBO()
            >>> s = method.init(task.problem)
            >>> replies = fed.ask(method.descend(), [0, 2], x=s.x, y=s.y, z=s.z)
            >>> [reply.client for reply in replies]
            [0, 2]
        """
        tasks = self.assigner.assign(
            phase, clients, each, submodels, message, self.ledger.rounds + 1, self.iteration
        )
        excluded = self.transport.excluded
        if excluded:
            tasks = [task for task in tasks if task.client not in excluded]
        replies = self._start_round(phase)
        reports: Iterable[Report] = itertools.chain(
            self.transport.send(tasks, True), self.transport.receive(tasks, len(tasks))
        )
        if not self.transport.ordered:
            reports = _in_client_order(reports)
        for report in reports:
            self._handle_report(report, replies)
        replies.compare()
        replies.idle = [task.client for task in sorted(tasks, key=_end_time)]
        # While these replies are computed on a GPU, those of the last `ask` are checked.
        self.check_pending()
        self.pending = len(clients), replies
        if not replies.has_pending:
            self.check_pending()
        self.record(**replies.coverage())
        return replies

    def post(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: ClientMessages = None,
        submodels: Submodels = None,
        **message: Any,
    ) -> None:
        """Have clients run a phase, without waiting for replies; `collect` fetches them.

        Args:
            phase: What each client does.
            clients: Who gets a task; each must have none in flight.
            each: What `clients[j]` alone is sent.
            submodels: The part of the model that `clients[j]` holds; see `ask`.
            **message: What everyone is sent.

        Raises:
            RuntimeError: A client would have two tasks in flight, or tasks of another phase are in
                flight.
            ValueError: A client does not exist, or `each` or `submodels` has a wrong length.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> environment = fb.Environment(delay=fb.delays.LogNormal())
            >>> fed = fb.simulated_federation(task.problem, task.clients, environment)
            >>> method = fb.algorithms.SimFBO()
            >>> s = method.init(task.problem)
            >>> fed.post(method.descend(), range(4), x=s.x, y=s.y, z=s.z)
            >>> replies = fed.collect(2)
            >>> len(replies), len(fed.in_flight)
            (2, 2)
        """
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
            self._handle_report(report, None)

    def collect(self, count: int | None = None) -> Replies:
        """Wait for the next replies of posted tasks: one communication round.

        There is no quorum: fewer replies than `count` are returned if nothing else is in flight.
        `Replies.idle` has the clients that can be given a new task.

        Args:
            count: How many accepted replies to wait for; by default `Environment.participation`.

        Returns:
            The accepted replies, at most `count`.

        Raises:
            RuntimeError: Nothing is in flight.
            ValueError: `count` is below 1.
            ClientError: A client's own code or data failed.

        Examples:
            See `post`.
        """
        self._check_exclusions()
        if not self.in_flight:
            raise RuntimeError(
                "nothing is in flight, so nothing can be collected; post a task first"
            )
        if count is None:
            count = self.environment.cohort_size(len(self))
        checks.integer("count", count, least=1)
        phase = next(iter(self.in_flight.values())).broadcast.phase
        if self.screen is not None and not self.screen.has_seen(phase.name):
            # Nobody knows yet how long a reply is: the first ones are compared with each other.
            count = max(count, min(FEWEST, len(self.in_flight)))
        replies = self._start_round(phase)
        while self.in_flight and len(replies) < count:
            reports = list(self.transport.receive(None, count - len(replies)))
            if not reports:
                name = type(self.transport).__name__
                raise RuntimeError(
                    f"{name} reports nothing of {len(self.in_flight)} tasks in flight"
                )
            for task in sorted(_ended_tasks(reports), key=_end_time):
                task.position = len(replies.idle)
                replies.idle.append(task.client)
            for report in reports:
                self._handle_report(report, replies)
            replies.compare()
        self._count_refused(replies)
        self.record(**replies.coverage())
        if staleness := [reply.staleness for reply in replies]:
            self.record(staleness=sum(staleness) / len(staleness), max_staleness=max(staleness))
            self.heard |= {reply.client for reply in replies}
        return replies

    def mix(self, clients: Sequence[int], **values: Any) -> dict[str, Any]:
        """Let clients send values to their neighbours, and mix what arrives: one round.

        Links are those of `Environment.topology` between `clients`. Over each of them both clients
        send their rows of all the values.

        Args:
            clients: Who takes part.
            **values: Trees and tensors by name, with a row per client, in the order of `clients`.

        Returns:
            sum_j W_ij v_j by name, in the same rows. The weight of the clients that do not take
            part goes to a client's own value.

        Examples:
            >>> import torch
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> environment = fb.Environment(topology="ring")
            >>> fed = fb.simulated_federation(task.problem, task.clients, environment)
            >>> fed.mix(fed.sample(), v=torch.tensor([0.0, 3.0, 6.0, 9.0]))["v"]
            tensor([4., 3., 6., 5.])
            >>> fed.ledger.rounds, fed.ledger.phases["mix"].bytes_up  # 4 links, 2 numbers each
            (1, 32)
        """
        W = among(self.mixing_matrix, clients)
        row = nbytes(values) // len(clients)
        self.ledger.book(events.RoundStarted("mix"))
        sent = [links * row for links in links_of(W)]
        self.ledger.book(events.LinksCrossed("mix", clients, sent))
        return mix(W, values)

    @functools.cached_property
    def mixing_matrix(self) -> Tensor:
        """The weights W with which clients mix values, in float64."""
        return mixing_matrix(self.environment.topology or "complete", len(self), self.seed)

    def local(self, phase: Phase, clients: Sequence[int], **values: Any) -> dict[str, Any]:
        """Have clients run a phase on values of their own: nothing is sent, and it is no round.

        It takes as long as the slowest of these clients.

        Args:
            phase: What each client does; its replies must not be `summed`. Besides the values, its
                message holds `weight`, n p_i.
            clients: Who computes.
            **values: Trees and tensors by name, also nested in dicts, with a row per client, in the
                order of `clients`.

        Returns:
            What the phase replies with, in the same rows.

        Raises:
            QuorumError: A client has lost its task, or its values are not finite.

        Examples:
            >>> import fedbilevel as fb
            >>> from fedbilevel.algorithms.shared import LocalHypergradient
            >>> from fedbilevel.federation.stacks import copies
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> fed = fb.simulated_federation(task.problem, task.clients)
            >>> x, y = task.problem.start
            >>> own = {"x": copies(x, 4), "y": copies(y, 4)}
            >>> class Hypergradients(LocalHypergradient):
            ...     name = "hypergradients"
            ...     summed = False
            >>> phase = Hypergradients(neumann_lr=0.5, terms=3)
            >>> fed.local(phase, fed.sample(), **own)["h"]["x"].shape
            torch.Size([4, 5])
            >>> fed.ledger.rounds, fed.ledger.totals()["bytes_up"]
            (0, 0)
        """
        weights = self.weights()
        each = []
        for position, client in enumerate(clients):
            own = pytree.tree_map(lambda t, row=position: t[row], values)
            each.append({**own, "weight": len(self) * weights[client]})
        tasks = self.assigner.assign(
            phase, clients, each, None, {}, self.ledger.rounds, self.iteration
        )
        for task in tasks:
            task.broadcast.is_local = True
        label = f"phase {phase.name!r}, after round {self.ledger.rounds}"
        replies = Replies(label, phase, self.problem)
        for report in _in_client_order(
            itertools.chain(
                self.transport.send(tasks, True), self.transport.receive(tasks, len(tasks))
            )
        ):
            self._handle_report(report, replies)
        if len(replies) < len(clients):
            why = replies.refused[0] if replies.refused else "a task was lost"
            raise QuorumError(f"{label}: every client is needed, {why}")
        return stack_replies(
            [{name: reply.values[name] for name in phase.reply} for reply in replies]
        )

    def _start_round(self, phase: Phase) -> Replies:
        self.ledger.book(events.RoundStarted(phase.name))
        label = f"phase {phase.name!r}, round {self.ledger.rounds}"
        return Replies(label, phase, self.problem, self.screen)

    def _check_exclusions(self) -> None:
        """Raise a `QuorumError` if too few clients are left that may be asked."""
        excluded = self.transport.excluded
        needed = self.environment.min_replies
        if len(self) - len(excluded) < needed:
            raise QuorumError(f"clients {sorted(excluded)} were excluded, {needed} are needed")

    def _handle_report(self, report: Report, replies: Replies | None) -> None:
        """Book what a transport reports, and hand replies that arrived to `replies`."""
        if isinstance(report, Departed):
            if not any(task.broadcast.is_local for task in report.tasks):
                self.ledger.book(_messages_sent(report.tasks))
            return
        assert replies is not None
        match report:
            case Arrived(results):
                results.tasks[0].broadcast.check_unchanged()
                clients = [task.client for task in results.tasks]
                sent = 0 if results.tasks[0].broadcast.is_local else results.nbytes
                sizes = [sent] * len(clients)
                self.ledger.book(
                    events.TasksDone(replies.phase.name, clients, results.costs, sizes)
                )
                replies.accept(results, self.iteration)
            case Missed(task, cost, excluded):
                if cost is not None:
                    self.ledger.book(
                        events.TasksDone(replies.phase.name, [task.client], [cost], [0])
                    )
                if not excluded:
                    self.ledger.book(events.TaskLost())
            case Rejected(client, why):
                replies.refuse(client, why)
        for task in _ended_tasks([report]):
            if self.in_flight.get(task.client) is task:
                del self.in_flight[task.client]

    def check_pending(self) -> None:
        """Check the replies of the last `ask`, if they are still pending, and its quorum.

        Raises:
            QuorumError: Too few of them were accepted.
        """
        self._conclude_ask()
        if self.deferred_quorum_error:
            raise QuorumError(self.deferred_quorum_error)

    def _conclude_ask(self) -> None:
        """Count the refused replies of the last `ask`, and note whether a quorum is missing."""
        if self.pending is None:
            return
        asked, replies = self.pending
        self.pending = None
        replies.check_pending()
        self._count_refused(replies)
        needed = min(self.environment.min_replies, asked)
        if len(replies) < needed:
            accepted = f"{len(replies)} of {asked} replies were accepted"
            error = f"{replies.label}: {accepted}, at least {needed} needed"
            if replies.refused:
                error += f" ({replies.refused[0]})"
            self.deferred_quorum_error = error

    @property
    def excluded(self) -> Collection[int]:
        """The clients that were put aside after too many refused replies."""
        return self.transport.excluded

    def refuse(self, client: int, why: str) -> None:
        """Count a reply that was accepted as refused after all.

        Args:
            client: Who sent it.
            why: What is wrong with it; completes "client 3: ".
        """
        log.warning("round %d: reply refused, client %d: %s", self.ledger.rounds, client, why)
        self.ledger.book(events.RepliesRefused(1))
        self.transport.notify_refused([client])

    def _count_refused(self, replies: Replies) -> None:
        self.ledger.book(events.RepliesRefused(len(replies.refused)))
        self.transport.notify_refused(replies.refused_clients)

    @contextmanager
    def uncharged(self, setting: str) -> Iterator[None]:
        """A context in which exchanges cost nothing and take no time.

        It is meant for simulations of a method whose paper takes an exchange to be free.

        Args:
            setting: The setting that asks for it, for the error: "aphe is 'server'".

        Raises:
            RuntimeError: The transport has a real clock.
        """
        try:
            paused_clock = self.transport.paused_clock()
        except RuntimeError as error:
            raise RuntimeError(f"{setting}, but {error}") from None
        self.check_pending()  # pending replies are booked before the costs are set aside
        booked = self.ledger
        self.ledger = deepcopy(booked)
        try:
            with paused_clock:
                yield
                self.check_pending()
        finally:
            self.ledger = booked

    def personal(self, client: int, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """The whole x and y of one client: the server's part and the client's own.

        A method for personal models may keep a whole model with each client; then it is that. It
        reads what a client has kept for itself. It is for evaluation and export; no algorithm
        may use it.

        Args:
            client: The client.
            x: The server's part of x.
            y: The server's part of y.

        Returns:
            x and y of the client.

        Raises:
            ValueError: There is no such client.
            LookupError: The client is on another machine, which alone has its model.

        Examples:
            >>> import dataclasses
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> problem = dataclasses.replace(task.problem, owner={"y": "client"})
            >>> fed = fb.simulated_federation(problem, task.clients)
            >>> x, y = problem.start
            >>> y
            {}
            >>> fed.personal(2, x, y)[1].keys()
            dict_keys(['y'])
        """
        checks.integer("client", client, least=0, most=len(self) - 1)
        return self.problem.client_point(x, y, self.transport.own(client))

    def record(self, **values: float | Tensor) -> None:
        """Record numbers of an algorithm for the metrics.

        Until the next evaluation they are averaged per name. Of names that begin with `max_` or
        `min_` the extreme is kept.

        Args:
            **values: Numbers or 0-d tensors, by name. Tensors stay on their device.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> fed = fb.simulated_federation(task.problem, task.clients)
            >>> for value in (1.0, 4.0):
            ...     fed.record(residual=value, max_residual=value)
            >>> fed.records()
            {'residual': 2.5, 'max_residual': 4.0}
        """
        for name, value in values.items():
            total, count = self.recorded.get(name, (0.0, 0))
            extreme = EXTREMES.get(name.split("_")[0])
            if extreme and count:
                total = extreme(_float64(total), _float64(value))
            elif isinstance(value, Tensor) and not value.is_cpu:
                total = total + value.double()  # not read: that would wait for a GPU
            else:
                total = total + float(value)
            self.recorded[name] = (total, count + 1)

    def records(self) -> dict[str, float]:
        """What was recorded since the last call, for the metrics.

        Returns:
            The means and extremes by name, and "participants", the number of different clients
            whose replies were collected (without a barrier only).
        """
        records = {}
        for name, (total, count) in self.recorded.items():
            records[name] = float(total)
            if name.split("_")[0] not in EXTREMES:
                records[name] /= count
        if self.heard:
            records["participants"] = len(self.heard)
        self.recorded = {}
        self.heard = set()
        return records

    def mark(self) -> dict[str, Any]:
        """Mark the present state, for `rollback`; the previous mark is void."""
        state = {name: copy(getattr(self, name)) for name in self.KEPT}
        state["ledger"] = self.ledger.mark()
        state["pending"] = self.pending
        state["transport"] = self.transport.mark()
        state["tasks"] = self.assigner.tasks_made
        state["norms"] = self._norms()
        return state

    def _norms(self) -> dict[str, Any]:
        if self.screen is None:
            return {}
        return self.screen.plain()

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Undo everything since the mark."""
        self.ledger.rollback(mark["ledger"])
        self.transport.rollback(mark["transport"])
        self.pending = mark["pending"]
        self.assigner.tasks_made = mark["tasks"]
        if self.screen is not None:
            self.screen.restore(mark["norms"])
        for name in self.KEPT:
            setattr(self, name, copy(mark[name]))

    def snapshot(self) -> dict[str, Any]:
        """Everything that the next iteration depends on except the algorithm's state.

        Returns:
            Plain values and tensors, for a checkpoint.
        """
        self._conclude_ask()
        recorded = {}
        for name, (total, count) in self.recorded.items():
            recorded[name] = (float(total), count)
        return {
            **{name: getattr(self, name) for name in self.KEPT},
            "ledger": self.ledger.to_dict(),
            "recorded": recorded,
            "heard": sorted(self.heard),
            "tasks": self.assigner.tasks_made,
            "norms": self._norms(),
            "in_flight": self.assigner.tasks_to_dict(list(self.in_flight.values())),
            "transport": self.transport.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Resume from a snapshot."""
        for name in self.KEPT:
            setattr(self, name, copy(snapshot[name]))
        self.ledger = Ledger.from_dict(snapshot["ledger"])
        self.heard = set(snapshot["heard"])
        self.assigner.tasks_made = snapshot["tasks"]
        if self.screen is not None:
            self.screen.restore(snapshot["norms"])
        tasks = self.assigner.tasks_from_dict(snapshot["in_flight"], self.device)
        self.in_flight = {task.client: task for task in tasks}
        self.transport.restore(snapshot["transport"], self.in_flight)


def _float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _in_client_order(reports: Iterable[Report]) -> Iterator[Report]:
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


def _end_time(task: Task) -> tuple[float, int]:
    return task.ended_at, task.number


def _ended_tasks(reports: Iterable[Report]) -> Iterator[Task]:
    """The tasks that ended according to these reports."""
    for report in reports:
        if isinstance(report, Arrived):
            yield from report.results.tasks
        elif isinstance(report, (Missed, Rejected)) and report.task is not None:
            yield report.task


def _messages_sent(tasks: Sequence[Task]) -> events.MessagesSent:
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
    return events.MessagesSent(phase, clients, sizes)
