"""The federation: what an algorithm sees of its clients, the same on every transport.

`Federation.sample` draws cohorts; `ask`, `post` and `collect` exchange messages and replies with
clients. How an exchange runs, and what it costs, is in `exchanges.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, integers, root, subset
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.federation._assignment import Assigner, ClientMessages, Submodels
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.exchanges import Exchanges
from fedbilevel.federation.ledger import Ledger, LinksCrossed, RoundStarted
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.records import Records
from fedbilevel.federation.replies import QuorumError, Replies
from fedbilevel.federation.stacks import stack_replies
from fedbilevel.federation.task import Task
from fedbilevel.federation.topology import among, links_of, mix, mixing_matrix
from fedbilevel.federation.transport import Transport


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
    KEPT = ("iteration", "cohorts", "draws", "heard")

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
        self.exchanges = Exchanges(problem, transport, self.environment)
        self.runtime: Mapping[str, str] = {}
        self.no_second_derivatives = ""
        self.iteration = 0
        self.cohorts = 0  # how many cohorts were drawn
        self.draws = 0  # how many numbers the server has drawn
        self.recorded = Records()
        self.heard: set[int] = set()  # clients whose replies were collected

    def __len__(self) -> int:
        """The number of registered clients."""
        return self.clients

    @property
    def ledger(self) -> Ledger:
        """What the run has cost so far."""
        return self.exchanges.ledger

    @property
    def in_flight(self) -> Mapping[int, Task]:
        """The posted tasks that have not ended, by client."""
        return self.exchanges.in_flight

    @property
    def excluded(self) -> Collection[int]:
        """The clients that were put aside after too many refused replies."""
        return self.transport.excluded

    @property
    def now(self) -> float:
        """Seconds since the run began; virtual seconds in a simulation."""
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
            QuorumError: Fewer than `Environment.min_replies` replies were accepted, and the phase
                has a `quorum`. For replies that are summed on a GPU it is raised one round later.
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
        tasks = self._assign(phase, clients, each, submodels, message)
        replies = self.exchanges.ask(phase, tasks, self.iteration)
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
        self.exchanges.check_can_post(phase, clients)
        self.exchanges.post(self._assign(phase, clients, each, submodels, message))

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
        replies = self.exchanges.collect(count, self.iteration)
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
        self.ledger.book(RoundStarted("mix"))
        sent = [links * row for links in links_of(W)]
        self.ledger.book(LinksCrossed("mix", clients, sent))
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
        replies = self.exchanges.local(phase, tasks, self.iteration)
        return stack_replies(
            [{name: reply.values[name] for name in phase.reply} for reply in replies]
        )

    def _assign(
        self,
        phase: Phase,
        clients: Sequence[int],
        each: ClientMessages,
        submodels: Submodels,
        message: Mapping[str, Any],
    ) -> list[Task]:
        """Make the tasks of the next round."""
        round_ = self.ledger.rounds + 1
        return self.assigner.assign(
            phase, clients, each, submodels, message, round_, self.iteration
        )

    def _check_exclusions(self) -> None:
        """Raise a `QuorumError` if too few clients are left that may be asked."""
        excluded = self.transport.excluded
        needed = self.environment.min_replies
        if len(self) - len(excluded) < needed:
            raise QuorumError(f"clients {sorted(excluded)} were excluded, {needed} are needed")

    def check_pending(self) -> None:
        """Check the replies of the last `ask`; raise a `QuorumError` if too few were accepted."""
        self.exchanges.check_pending()

    def refuse(self, client: int, why: str) -> None:
        """Count a reply that was accepted as refused after all.

        Args:
            client: Who sent it.
            why: What is wrong with it; completes "client 3: ".
        """
        self.exchanges.refuse(client, why)

    def uncharged(self, setting: str) -> AbstractContextManager[None]:
        """A context in which exchanges cost nothing and take no time.

        It is meant for simulations of a method whose paper takes an exchange to be free.

        Args:
            setting: The setting that asks for it, for the error: "aphe is 'server'".

        Raises:
            RuntimeError: The transport has a real clock.
        """
        return self.exchanges.uncharged(setting)

    def personal(self, client: int, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """The whole x and y of one client, as `Result.personal` returns them.

        It reads what a client has kept for itself. It is for evaluation and export; no algorithm
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
            self.recorded.add(name, value)

    def records(self) -> dict[str, float]:
        """What was recorded since the last call, for the metrics.

        Returns:
            The means and extremes by name, and "participants", the number of different clients
            whose replies were collected (without a barrier only).
        """
        records = self.recorded.take()
        if self.heard:
            records["participants"] = len(self.heard)
        self.heard = set()
        return records

    def mark(self) -> dict[str, Any]:
        """Mark the present state, for `rollback`; the previous mark is void."""
        return {
            **{name: copy(getattr(self, name)) for name in self.KEPT},
            "recorded": dict(self.recorded.values),
            "tasks": self.assigner.tasks_made,
            "exchanges": self.exchanges.mark(),
        }

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Undo everything since the mark."""
        self._set_kept(mark)
        self.exchanges.rollback(mark["exchanges"])

    def snapshot(self) -> dict[str, Any]:
        """Everything that the next iteration depends on except the algorithm's state.

        Returns:
            Plain values and tensors, for a checkpoint.
        """
        return {
            **self.exchanges.snapshot(),
            **{name: getattr(self, name) for name in self.KEPT},
            "heard": sorted(self.heard),
            "recorded": self.recorded.plain(),
            "tasks": self.assigner.tasks_made,
            "in_flight": self.assigner.tasks_to_dict(list(self.in_flight.values())),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Resume from a snapshot."""
        self._set_kept(snapshot)
        tasks = self.assigner.tasks_from_dict(snapshot["in_flight"], self.device)
        self.exchanges.restore(snapshot, {task.client: task for task in tasks})

    def _set_kept(self, state: Mapping[str, Any]) -> None:
        """Set what both marks and snapshots hold."""
        for name in self.KEPT:
            setattr(self, name, copy(state[name]))
        self.heard = set(state["heard"])
        self.recorded = Records(state["recorded"])
        self.assigner.tasks_made = state["tasks"]
