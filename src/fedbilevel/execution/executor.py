"""What an executor is: tasks in, results out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.federation.task import Results, Task


class Executor(ABC):
    """Runs the tasks of clients on their data. It knows phases and problems; no algorithm, no clock, no ledger.

    `run` and `samples` make an executor; the rest has defaults that suit one whose clients remember nothing and whose
    numbers do not depend on what it ran before. An executor serves one thread at a time unless it says otherwise.
    """

    @abstractmethod
    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        """What tasks of one phase return, a stack at a time.

        sums: the server needs only the sum of the replies; an executor may then return that.
        """

    @abstractmethod
    def samples(self, client: int) -> int:
        """How many training samples a client holds."""

    def mark(self) -> Any:
        """What `back` needs to undo everything that happens from now on, until the next mark."""

    def back(self, mark: Any) -> None:
        """Undo everything since the mark."""

    def snapshot(self) -> dict[str, Any]:
        """What a resumed run needs to compute the same bits, as plain values and tensors."""
        return {}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what each rank had saved."""

    def keep_in(self, folder: Path) -> None:
        """Where to put, from now on, what clients remember."""
