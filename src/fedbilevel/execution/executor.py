"""The interface of an executor: client tasks in, results out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Side
from fedbilevel.federation.task import Results, Task

Mark = Any  # what `mark` returned; only the executor that made it looks inside


class Executor(ABC):
    """Computes client tasks on the clients' data.

    An executor knows phases and problems. It knows neither algorithms nor clocks nor ledgers.

    A subclass must implement `run` and `samples`. The other methods have defaults for an executor
    whose clients remember nothing and whose results do not depend on what it ran before. Unless a
    subclass says otherwise, an executor serves one thread at a time.

    Examples:
        An executor that counts the tasks that pass through it:

        >>> import fedbilevel as fb
        >>> from fedbilevel.execution.reference import ReferenceExecutor
        >>> class CountingExecutor(ReferenceExecutor):
        ...     tasks = 0
        ...
        ...     def run(self, tasks, sums=False):
        ...         self.tasks += len(tasks)
        ...         return super().run(tasks, sums)
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> federation = fb.simulated_federation(task.problem, task.clients)
        >>> executor = CountingExecutor(task.problem, task.clients, batch_size=None)
        >>> federation.transport.executor = executor
        >>> result = fb.solve(
        ...     task.problem, task.clients, "simfbo", rounds=3, federation=federation
        ... )
        >>> executor.tasks
        12
    """

    @abstractmethod
    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        """Run tasks that share one phase, and yield their results, a stack of clients at a time.

        Args:
            tasks: The client tasks. A client may occur more than once; if the phase remembers,
                its tasks run in the order given.
            sums: Whether the server needs only the sum of the replies. The executor may then
                return sums in place of single replies.

        Yields:
            Replies with a leading axis over some of the tasks, and the cost of each of them.
            Together the results cover every task once, in any order.

        Raises:
            ClientError: The code of a client failed; the message names client, phase and round.
            TypeError: A reply has not the names and shapes that its phase declares.
        """

    @abstractmethod
    def samples(self, client: int, side: Side) -> int:
        """Return how many samples a client holds on one side: for training or for validation."""

    def own(self, client: int) -> Mapping[str, Tree]:
        """Return what a client has of a model for itself, by name in messages."""
        return {}

    def mark(self) -> Mark:
        """Mark the present state; `rollback` returns to it, until the next mark is set."""

    def rollback(self, mark: Mark) -> None:
        """Undo everything since `mark`, which must be the latest one. It may be used again."""

    def snapshot(self) -> dict[str, Any]:
        """Return what a resumed run needs to compute the same bits: plain values and tensors."""
        return {}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Return to the state of a checkpoint.

        Args:
            snapshots: The snapshot of each rank, in order; their number may differ from the
                present number of ranks.
        """

    def store_in(self, folder: Path) -> None:
        """Keep the clients' memories in files in `folder` from now on."""
