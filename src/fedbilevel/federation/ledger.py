"""The ledger: what a run has cost, per phase and per client.

`Exchanges` books an event whenever something costs something; `Ledger.book` is the only function
that changes the ledger. Bytes are counted on both ways: `bytes_down` when a transport reports that
messages have departed, `bytes_up` when it reports replies (`reports.costs_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbilevel.federation.task import TaskCost

__all__ = ["Cost", "Ledger"]

MAXIMA = ("peak_bytes",)  # the costs of which the largest is kept, not the sum
ENTERED_TOGETHER = 1000  # charges of clients that wait to be entered
MAX_GROUPS = 10  # the most groups of clients in a summary


@dataclass
class Cost:
    """What one phase has cost so far, over all clients.

    Samples, gradients, FLOPs and peak bytes are counted when a task ends. A lost task is computed,
    and counted, only where clients remember.

    Args:
        rounds: Communication rounds: every `ask` and every `collect` is one.
        bytes_up: Bytes that clients send: the replies, after the encoders of their stages, and what
            they send each other along links.
        bytes_down: Bytes of the messages, after the encoders of their stages, for every receiver.
        samples: Samples read, counted once per step that reads them.
        gradients: Gradient evaluations; a Hessian or cross product counts as two.
        flops: Multiplications and additions in matrix products and convolutions.
        peak_bytes: The most bytes that any client held at once.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> result = fb.solve(
        ...     task.problem, task.clients, "simfbo", rounds=2, every=2, federation=fed
        ... )
        >>> cost = fed.ledger.phases["descend"]
        >>> cost.rounds, cost.bytes_up == cost.bytes_down
        (2, True)
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    gradients: int = 0
    flops: int = 0
    peak_bytes: int = 0


class Charge(NamedTuple):
    """What some clients spent: for some of `Accounts.FIGURES`, one amount per client."""

    clients: Sequence[int]
    amounts: Mapping[str, Sequence[int]]


@dataclass(eq=False)
class Accounts:
    """What each client that took part has spent.

    `accounts[client]` has the amounts of one client. A charge, and a `rollback` to the last `mark`,
    take time in proportion to the clients charged, whatever the number of clients so far. Charges
    are entered some at a time: `settle` brings the attributes up to date.

    Attributes:
        ids: The clients, in the order in which they first took part.
        figures: A row for each of `FIGURES`, a column for each of `ids`.
    """

    FIGURES: ClassVar = ("bytes_up", "bytes_down", "flops", "peak_bytes")
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    figures: Tensor = field(
        default_factory=lambda: torch.zeros(len(Accounts.FIGURES), 0, dtype=torch.int64)
    )

    def __post_init__(self) -> None:
        self._column = {client: j for j, client in enumerate(self.ids.tolist())}
        # `ids` and `figures` are views of a buffer with spare columns.
        self._buffer = torch.zeros(0, 0, dtype=torch.int64)
        # Charges that are not in `figures` yet: many small ones are entered faster together.
        self._waiting: list[Charge] = []
        self._waiting_clients = 0
        self._undo: list[tuple[np.ndarray, np.ndarray]] = []
        self._marked = 0  # how many clients there were at the mark
        self._marked_waiting = 0  # how many of the charges that wait were made before the mark

    def charge(self, clients: Sequence[int], amounts: Mapping[str, Sequence[int]]) -> None:
        """Add what clients spent.

        Args:
            clients: The clients; one may occur more than once.
            amounts: For some of `FIGURES`, one amount per entry of `clients`.
        """
        self._waiting.append(Charge(clients, amounts))
        self._waiting_clients += len(clients)
        if self._waiting_clients >= ENTERED_TOGETHER:
            self.settle()

    def settle(self) -> Accounts:
        """Enter the charges that wait, and return these accounts."""
        before_mark = self._waiting[: self._marked_waiting]
        since_mark = self._waiting[self._marked_waiting :]
        if before_mark:
            self._enter(before_mark)
            self._undo = []  # a rollback keeps them
            self._marked = len(self.ids)
        if since_mark:
            self._enter(since_mark)
        self._waiting = []
        self._waiting_clients = 0
        self._marked_waiting = 0
        return self

    def _enter(self, charges: Sequence[Charge]) -> None:
        """Add charges to `figures`, and note what they change."""
        everyone = [client for charge in charges for client in charge.clients]
        new = [client for client in dict.fromkeys(everyone) if client not in self._column]
        if new:
            self._add_columns(new)
        changed = np.array([self._column[client] for client in dict.fromkeys(everyone)], dtype=int)
        old = changed[changed < self._marked]
        figures = self.figures.numpy()  # the same memory: NumPy takes less time for few clients
        self._undo.append((old, figures[:, old]))
        for row, name in zip(figures, self.FIGURES, strict=True):
            columns: list[int] = []
            spent: list[int] = []
            for charge in charges:
                if name in charge.amounts:
                    columns += [self._column[client] for client in charge.clients]
                    spent += charge.amounts[name]
            add = np.maximum if name in MAXIMA else np.add
            add.at(row, columns, spent)

    def _add_columns(self, new: Sequence[int]) -> None:
        before = len(self.ids)
        after = before + len(new)
        if after > self._buffer.shape[1]:
            self._buffer = torch.zeros(1 + len(self.FIGURES), 2 * after, dtype=torch.int64)
            self._buffer[:, :before] = torch.cat([self.ids.unsqueeze(0), self.figures])
        self._buffer[:, before:after] = 0
        self._buffer[0, before:after] = torch.tensor(new)
        self.ids = self._buffer[0, :after]
        self.figures = self._buffer[1:, :after]
        self._column |= {client: j for j, client in enumerate(new, before)}

    def __getitem__(self, client: int) -> dict[str, int]:
        column = self.settle()._column.get(client)
        if column is None:
            return dict.fromkeys(self.FIGURES, 0)
        return dict(zip(self.FIGURES, self.figures[:, column].tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Accounts):
            return False
        ours = self.settle()
        theirs = other.settle()
        return torch.equal(ours.ids, theirs.ids) and torch.equal(ours.figures, theirs.figures)

    def groups(self) -> list[dict[str, float]]:
        """Clients grouped by `peak_bytes`, in ascending order, for a summary.

        Clients of equal peak form a group; if there are more than `MAX_GROUPS` different peaks,
        groups of equal size are formed. A client's peak does not depend on how often it was drawn.

        Returns:
            For each group the number of `clients`, and the mean of what they spent (the maximum of
            `peak_bytes`).
        """
        if not len(self.settle().ids):
            return []
        peaks = self.figures[self.FIGURES.index("peak_bytes")]
        distinct, group = peaks.unique(return_inverse=True)
        if len(distinct) > MAX_GROUPS:
            group = peaks.argsort(stable=True).argsort() * MAX_GROUPS // len(peaks)
        summaries = []
        for number in group.unique():
            spent = self.figures[:, group == number].double()
            summary: dict[str, float] = {"clients": spent.shape[1]}
            for name, row in zip(self.FIGURES, spent, strict=True):
                summary[name] = float(row.max() if name in MAXIMA else row.mean())
            summaries.append(summary)
        return summaries

    def mark(self) -> None:
        """Mark the present state, for `rollback`; the previous mark is void."""
        self._undo = []
        self._marked = len(self.ids)
        self._marked_waiting = len(self._waiting)

    def rollback(self) -> None:
        """Undo all charges since the mark."""
        for columns, spent in reversed(self._undo):
            self.figures.numpy()[:, columns] = spent
        for client in self.ids[self._marked :].tolist():
            del self._column[client]
        self.ids = self.ids[: self._marked]
        self.figures = self.figures[:, : self._marked]
        del self._waiting[self._marked_waiting :]


class RoundStarted(NamedTuple):
    """A communication round of a phase began."""

    phase: str


class MessagesSent(NamedTuple):
    """Messages departed to clients; `nbytes` has the size of each."""

    phase: str
    clients: Sequence[int]
    nbytes: Sequence[int]


class LinksCrossed(NamedTuple):
    """Clients sent values to their neighbours; `nbytes` has what each sent over all its links."""

    phase: str
    clients: Sequence[int]
    nbytes: Sequence[int]


class TasksDone(NamedTuple):
    """Clients did their tasks at these costs; `nbytes` has the size of each reply, 0 if lost."""

    phase: str
    clients: Sequence[int]
    costs: Sequence[TaskCost]
    nbytes: Sequence[int]


class TaskLost(NamedTuple):
    """A task ended without a reply."""


class RepliesRefused(NamedTuple):
    """Replies arrived and were not accepted."""

    replies: int


class TimeElapsed(NamedTuple):
    """Real time passed at the server."""

    wall_s: float


Event = (
    RoundStarted | MessagesSent | LinksCrossed | TasksDone | TaskLost | RepliesRefused | TimeElapsed
)


@dataclass
class Ledger:
    """Everything that a run has cost, per phase and per client.

    Args:
        phases: The cost of each phase, by `Phase.name`.
        clients: What each client has spent.
        wall_s: Real seconds that iterations took, without evaluation.
        refused_replies: Replies that arrived and were not accepted: of a wrong shape, not finite,
            or a second copy.
        lost_tasks: Tasks whose reply never arrived: dropout, fault or deadline.

    Examples:
        >>> ledger = Ledger()
        >>> ledger.book(RoundStarted("descend"))
        >>> ledger.book(MessagesSent("descend", clients=[0, 3], nbytes=[80, 80]))
        >>> ledger.rounds, ledger.totals()["bytes_down"]
        (1, 160)
        >>> ledger.clients[3]["bytes_down"]
        80
    """

    phases: dict[str, Cost] = field(default_factory=dict)
    clients: Accounts = field(default_factory=Accounts)
    wall_s: float = 0.0
    refused_replies: int = 0
    lost_tasks: int = 0

    def book(self, event: Event) -> None:
        """Enter an event: the only function that changes the ledger.

        Args:
            event: What happened; one of the event classes of this module.
        """
        match event:
            case RoundStarted(phase):
                self._cost(phase).rounds += 1
            case MessagesSent(phase, clients, nbytes):
                self._charge(phase, clients, {"bytes_down": nbytes})
            case LinksCrossed(phase, clients, nbytes):
                self._charge(phase, clients, {"bytes_up": nbytes})
            case TasksDone(phase, clients, costs, nbytes):
                columns = (list(column) for column in zip(*costs, strict=True))
                amounts = dict(zip(TaskCost._fields, columns, strict=True))
                self._charge(phase, clients, {**amounts, "bytes_up": nbytes})
            case TaskLost():
                self.lost_tasks += 1
            case RepliesRefused(replies):
                self.refused_replies += replies
            case TimeElapsed(wall_s):
                self.wall_s += wall_s

    def _charge(
        self, phase: str, clients: Sequence[int], amounts: Mapping[str, Sequence[int]]
    ) -> None:
        """Add what clients spent on a phase, one amount per client."""
        if not clients:
            return
        cost = self._cost(phase)
        per_client = {}
        for name, each in amounts.items():
            setattr(cost, name, _total(name, [getattr(cost, name), *each]))
            if name in Accounts.FIGURES:
                per_client[name] = each
        self.clients.charge(clients, per_client)

    def _cost(self, phase: str) -> Cost:
        return self.phases.setdefault(phase, Cost())

    @property
    def rounds(self) -> int:
        """Communication rounds so far, over all phases."""
        return sum(cost.rounds for cost in self.phases.values())

    def totals(self) -> dict[str, int]:
        """The costs over all phases.

        Returns:
            The fields of `Cost` by name: sums, and the maximum of `peak_bytes`.
        """
        costs = self.phases.values()
        totals = {}
        for f in fields(Cost):
            totals[f.name] = _total(f.name, [getattr(cost, f.name) for cost in costs])
        return totals

    def to_dict(self) -> dict[str, Any]:
        """The ledger as plain values and tensors, for a checkpoint; `from_dict` reads them."""
        self.clients.settle()
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_dict` turned into these values."""
        phases = {name: Cost(**cost) for name, cost in values["phases"].items()}
        clients = Accounts(**deepcopy(values["clients"]))
        return cls(**{**values, "phases": phases, "clients": clients})

    def mark(self) -> dict[str, Any]:
        """Mark the present state, for `rollback`; the previous mark is void."""
        self.clients.mark()
        return {
            "phases": {name: Cost(**vars(cost)) for name, cost in self.phases.items()},
            "wall_s": self.wall_s,
            "refused_replies": self.refused_replies,
            "lost_tasks": self.lost_tasks,
        }

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Undo all entries since the mark."""
        for name, value in mark.items():
            setattr(self, name, deepcopy(value))
        self.clients.rollback()


def _total(name: str, values: Sequence[int]) -> int:
    if name in MAXIMA:
        return max(values, default=0)
    return sum(values)
