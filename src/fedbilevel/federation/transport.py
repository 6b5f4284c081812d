"""What a federation expects of a transport, and what a transport reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fedbilevel.core.tree import Tree
from fedbilevel.federation.task import Results, Task, TaskCost


class Departed(NamedTuple):
    """Tasks went to their clients."""

    tasks: Sequence[Task]


class Arrived(NamedTuple):
    """Replies came; nobody has checked them."""

    results: Results


class Missed(NamedTuple):
    """A task ended without a reply; `cost` is what the client spent all the same, if that is known.

    `put_aside`: the server has given the client up, and with it the task; this does not count as lost.
    """

    task: Task
    cost: TaskCost | None = None
    put_aside: bool = False


class Rejected(NamedTuple):
    """A reply of this client cannot be used; `task` is the one that has ended with it, if one has."""

    client: int
    why: str
    task: Task | None = None


Report = Departed | Arrived | Missed | Rejected


class Transport(ABC):
    """Carries tasks to clients and reports what becomes of them; tells the time and who is there.

    `now`, `samples`, `losses`, `send` and `receive` make a transport; the rest has defaults that suit one whose clients
    are always there and which cannot be resumed while tasks are in flight.

    Attributes:
        ordered: whether reports come in an order that does not depend on timing. If not, the federation adds up the
            replies of an `ask` in the order of its clients.
    """

    ordered: ClassVar[bool] = False

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began, on this transport's clock."""

    @abstractmethod
    def samples(self, client: int) -> int:
        """How many training samples a client holds."""

    @abstractmethod
    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """The upper and lower loss over the clients, `upper_loss` and `lower_loss`; costs nothing."""

    @abstractmethod
    def send(self, tasks: Sequence[Task], barrier: bool) -> Iterable[Report]:
        """Hand tasks over. With a barrier nothing else happens until all of them have ended."""

    @abstractmethod
    def receive(self, tasks: Sequence[Task] | None, limit: int) -> Iterable[Report]:
        """Report what becomes of these tasks, until all have ended.

        None stands for the tasks that were sent without a barrier: report until `limit` replies have come, or none are
        left. Set `task.ended` of each that has ended.
        """

    def absent(self, needed: int, busy: Collection[int]) -> Collection[int]:
        """The clients that cannot be asked now; waits until `needed` of the others can be."""
        return busy

    def refused(self, clients: Sequence[int]) -> None:
        """Replies of these clients were not accepted."""

    def standstill(self) -> AbstractContextManager[None]:
        """Within, no time passes."""
        raise RuntimeError(
            "only a simulation can leave an exchange out of costs and time; aphe must be 'clients'"
        )

    def mark(self) -> Any:
        """What `back` needs to undo everything that happens from now on, until the next mark."""

    def back(self, mark: Any) -> None:
        """Undo everything since the mark."""

    def snapshot(self) -> dict[str, Any]:
        """The state as plain values and tensors, for a file."""
        return {}

    def restore(self, snapshot: Mapping[str, Any], tasks: Mapping[int, Task]) -> None:
        """Go on from a snapshot; `tasks` are those that were in flight without a barrier, by client."""
        if tasks:
            raise ValueError(
                f"{type(self).__name__} cannot go on with tasks in flight; {len(tasks)} were"
            )

    def keep_in(self, folder: Path) -> None:
        """Where to put, from now on, what would make every checkpoint large."""
