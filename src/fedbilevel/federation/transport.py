"""What a federation expects of a transport, and what a transport reports.

A transport carries tasks to clients and reports what becomes of them. Checks, averages, quorums and
costs belong to the federation.

A task that brings no reply is lost: the transport reports it as `Missed`. A late reply is refused
by the transport: it gives the task up at the deadline, reports it as `Missed`, and never reports
the reply, in a simulation by `OutcomeSampler.draw_outcomes` (transports/_outcomes.py), on Flower by
`FlowerTransport._lose_late_task` (deploy/flower/transport.py). A reply that arrives but cannot be
read is reported as `Rejected`. A reply that arrives with a wrong shape or value is refused by the
federation (replies.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Side
from fedbilevel.federation.task import Results, Task, TaskCost


class Departed(NamedTuple):
    """A report: messages were sent to clients. Their bytes are counted now.

    Args:
        tasks: The tasks that were sent, of one phase.

    Examples:
        The first line of a `send` that cannot fail:

        >>> def send(tasks, barrier):
        ...     yield Departed(tasks)
    """

    tasks: Sequence[Task]


class Arrived(NamedTuple):
    """A report: replies arrived. Nobody has checked them yet.

    Args:
        results: The replies, and what they cost.

    Examples:
        A `receive` that computes all tasks at once:

        >>> def receive(executor, tasks):
        ...     for results in executor.run(tasks):
        ...         yield Arrived(results)
    """

    results: Results


class Missed(NamedTuple):
    """A report: a task ended without a reply, or its reply was too late.

    Args:
        task: The task.
        cost: What the client spent all the same, if that is known.
        excluded: Whether the client is excluded, or absent, so that it was not sent the task; the
            task then does not count as lost.

    Examples:
        >>> def report(task, now, deadline):
        ...     if now > deadline:
        ...         yield Missed(task)
    """

    task: Task
    cost: TaskCost | None = None
    excluded: bool = False


class Rejected(NamedTuple):
    """A report: something arrived from a client that cannot be a reply.

    Args:
        client: Who sent it.
        why: What is wrong with it.
        task: The task that ended with it; None if no task did, as with a second reply.

    Examples:
        >>> Rejected(client=3, why="answered twice")
        Rejected(client=3, why='answered twice', task=None)
    """

    client: int
    why: str
    task: Task | None = None


Report = Departed | Arrived | Missed | Rejected


class Transport(ABC):
    """Carries tasks to clients, reports what becomes of them, and tells the time.

    A transport must define `now`, `samples`, `losses`, `send` and `receive`. The other methods have
    defaults for a transport whose clients are always available and which cannot be resumed while
    tasks are in flight. `docs/howto/own-stage.md` has a complete one that runs tasks in threads.

    Attributes:
        ordered: Whether reports come in an order that does not depend on timing. If not, the
            federation sums the replies of an `ask` in the order of its clients, so that rounding
            does not depend on who was first.
        reads_own: Whether `own` can read what clients have of a model for themselves.
        has_links: Whether clients can send each other values (`Federation.mix`).

    Examples:
        A federation asks its transport for the time and for the size of a client's data:

        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> isinstance(fed.transport, Transport), fed.transport.now
        (True, 0.0)
    """

    ordered: ClassVar[bool] = False
    reads_own: ClassVar[bool] = False
    has_links: ClassVar[bool] = False

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began, on this transport's clock."""

    @abstractmethod
    def samples(self, client: int, side: Side) -> int:
        """How many samples a client holds on one side: for training or for validation."""

    @abstractmethod
    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """Evaluate the global losses. This is a measurement: it costs nothing.

        Args:
            x: The upper variable.
            y: The lower variable.

        Returns:
            The weighted means over clients, as "upper_loss" and "lower_loss".
        """

    @abstractmethod
    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterable[Report]:
        """Hand over tasks.

        Args:
            tasks: The tasks, of one phase.
            barrier: Whether nothing else happens until all of them have ended (`Federation.ask`).

        Returns:
            Reports, at least a `Departed` for each task that was sent.
        """

    @abstractmethod
    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterable[Report]:
        """Report what becomes of tasks, and set `ended_at` of each task that ends.

        Args:
            tasks: Tasks that were sent with a barrier: report until all of them have ended. None:
                those that were sent without one.
            limit: Without a barrier, report until this many replies have arrived or no task is
                left.

        Returns:
            Reports: `Arrived`, `Missed` or `Rejected` for every task that ends.
        """

    def own(self, client: int) -> Mapping[str, Tree]:
        """What a client has of a model for itself, where it can be read: variables that it owns.

        Args:
            client: The client.

        Returns:
            The client's parts by name in messages, such as "y".

        Raises:
            LookupError: The clients of this transport are elsewhere, and keep it for themselves.
        """
        raise LookupError(f"the own model of client {client} is with it, on its own machine")

    def client_metrics(
        self, clients: Sequence[int], x: Tree, y: Tree
    ) -> dict[int, dict[str, float]]:
        """Let clients that keep their models for themselves evaluate them.

        Args:
            clients: The clients.
            x: The server's part of x.
            y: The server's part of y.

        Returns:
            The metrics of the clients that answered, by name; by default of none.
        """
        return {}

    def unavailable(self, needed: int, busy: Collection[int]) -> Collection[int]:
        """The clients that cannot be asked now; waits while too few can be.

        Args:
            needed: Wait until at least this many clients can be asked.
            busy: The clients whose posted tasks have not ended.

        Returns:
            The clients that must not be sampled.
        """
        return busy

    @property
    def excluded(self) -> Collection[int]:
        """The clients that were put aside after too many refused replies.

        An `ask` leaves them out; a task that is posted to one is reported as missed.
        """
        return ()

    def notify_refused(self, clients: Sequence[int]) -> None:
        """Learn that replies of these clients were not accepted; one entry per reply."""

    def paused_clock(self) -> AbstractContextManager[None]:
        """A context in which no time passes, for `Federation.uncharged`.

        Raises:
            RuntimeError: This transport has a real clock.
        """
        raise RuntimeError("only a simulation can leave an exchange out of costs and time")

    def mark(self) -> Any:
        """Mark the present state, for `rollback`; the previous mark is void."""

    def rollback(self, mark: Any) -> None:
        """Undo everything since the mark."""

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values and tensors, for a checkpoint."""
        return {}

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        """Resume from a snapshot.

        Args:
            snapshot: What `snapshot` returned.
            tasks: The tasks that were in flight without a barrier, by client.

        Raises:
            ValueError: This transport cannot resume with tasks in flight, and there are some.
        """
        if tasks:
            name = type(self).__name__
            raise ValueError(f"{name} cannot resume with tasks in flight; there are {len(tasks)}")

    def store_in(self, folder: Path) -> None:
        """Set the folder for files that are too large for every checkpoint."""
