"""What a run has cost, by phase and by client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbilevel.federation.task import TaskCost

LARGEST = ("peak_bytes",)  # of the costs: not a sum
GROUPS = 10  # of clients, in a summary


@dataclass
class Cost:
    """What one phase has cost so far; `samples` counts what was drawn, `gradients` what was evaluated, `flops` the
    multiplications and additions of matrix products and convolutions in it; `peak_bytes` is the most that any client
    held at once.

    All four count when a task ends. What was lost is computed, and counted, only where clients remember.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    gradients: int = 0
    flops: int = 0
    peak_bytes: int = 0


@dataclass(eq=False)
class Accounts:
    """What each client that took part has paid: `figures` has a row for each of `FIGURES`, a column for each of `ids`.

    A charge and the way `back` to the last `mark` cost what they change, whatever the number of clients so far.
    """

    FIGURES: ClassVar = ("bytes_up", "bytes_down", "flops", "peak_bytes")
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    figures: Tensor = field(
        default_factory=lambda: torch.zeros(len(Accounts.FIGURES), 0, dtype=torch.int64)
    )

    def __post_init__(self) -> None:
        self._column = {client: j for j, client in enumerate(self.ids.tolist())}
        self._room = torch.zeros(0, 0, dtype=torch.int64)  # ids and figures are parts of it
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._marked = 0

    def mark(self) -> int:
        self._undo, self._marked = [], len(self.ids)
        return self._marked

    def back(self, mark: int) -> None:
        for columns, paid in reversed(self._undo):
            self.figures[:, columns] = paid
        for client in self.ids[mark:].tolist():
            del self._column[client]
        self.ids, self.figures = self.ids[:mark], self.figures[:, :mark]

    def _enrol(self, new: Sequence[int]) -> None:
        before, after = len(self.ids), len(self.ids) + len(new)
        if after > self._room.shape[1]:
            self._room = torch.zeros(1 + len(self.FIGURES), 2 * after, dtype=torch.int64)
            self._room[:, :before] = torch.cat([self.ids.unsqueeze(0), self.figures])
        self._room[:, before:after] = 0
        self._room[0, before:after] = torch.tensor(new)
        self.ids, self.figures = self._room[0, :after], self._room[1:, :after]
        self._column |= {client: j for j, client in enumerate(new, before)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Accounts):
            return False
        return torch.equal(self.ids, other.ids) and torch.equal(self.figures, other.figures)

    def __getitem__(self, client: int) -> dict[str, int]:
        column = self._column.get(client)
        paid = [0] * len(self.FIGURES) if column is None else self.figures[:, column].tolist()
        return dict(zip(self.FIGURES, paid, strict=True))

    def charge(self, clients: Sequence[int], amounts: Mapping[str, Sequence[int]]) -> None:
        if new := [client for client in dict.fromkeys(clients) if client not in self._column]:
            self._enrol(new)
        columns = torch.tensor([self._column[client] for client in clients])
        old = columns[columns < self._marked]
        self._undo.append((old, self.figures[:, old]))
        for name, each in amounts.items():
            row = self.figures[self.FIGURES.index(name)]
            if name in LARGEST:
                row.scatter_reduce_(0, columns, torch.tensor(each), "amax")
            else:
                row.index_add_(0, columns, torch.tensor(each))

    def groups(self) -> list[dict[str, float]]:
        """Clients of equal `peak_bytes`, of at most so many different ones as can be read: how many they are, and what
        one of them has paid on average. How often a client was drawn has no part in its peak.
        """
        if not len(self.ids):
            return []
        peaks = self.figures[self.FIGURES.index("peak_bytes")]
        different, group = peaks.unique(return_inverse=True)
        if len(different) > GROUPS:
            group = peaks.argsort(stable=True).argsort() * GROUPS // len(peaks)
        found = []
        for k in group.unique():
            paid = self.figures[:, group == k].double()
            rows = zip(self.FIGURES, paid, strict=True)
            amounts = {
                name: float(row.max() if name in LARGEST else row.mean()) for name, row in rows
            }
            found.append({"clients": paid.shape[1], **amounts})
        return found


class Round(NamedTuple):
    """A communication round began."""

    phase: str


class Sent(NamedTuple):
    """Messages went to clients, of so many bytes each."""

    phase: str
    clients: Sequence[int]
    nbytes: Sequence[int]


class Worked(NamedTuple):
    """Clients ended their tasks, at these costs, and sent so many bytes each."""

    phase: str
    clients: Sequence[int]
    costs: Sequence[TaskCost]
    nbytes: Sequence[int]


class Lost(NamedTuple):
    """A task ended without a reply."""


class Refused(NamedTuple):
    """Replies were not accepted."""

    replies: int


class Elapsed(NamedTuple):
    """Time went by on the machine that runs the server."""

    wall_s: float


Event = Round | Sent | Worked | Lost | Refused | Elapsed


@dataclass
class Ledger:
    """Everything a run has cost, by phase and by client; `book` is the only function that writes to it."""

    phases: dict[str, Cost] = field(default_factory=dict)
    clients: Accounts = field(default_factory=Accounts)
    wall_s: float = 0.0
    refused_replies: int = 0
    lost_tasks: int = 0

    def book(self, event: Event) -> None:
        """Enter what happened."""
        match event:
            case Round(phase):
                self.phase(phase).rounds += 1
            case Sent(phase, clients, nbytes):
                self._charge(phase, clients, {"bytes_down": nbytes})
            case Worked(phase, clients, costs, nbytes):
                columns = (list(column) for column in zip(*costs, strict=True))
                amounts = dict(zip(TaskCost._fields, columns, strict=True))
                self._charge(phase, clients, {**amounts, "bytes_up": nbytes})
            case Lost():
                self.lost_tasks += 1
            case Refused(replies):
                self.refused_replies += replies
            case Elapsed(wall_s):
                self.wall_s += wall_s

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Ledger:
        phases = {name: Cost(**cost) for name, cost in values["phases"].items()}
        return cls(
            **{**values, "phases": phases, "clients": Accounts(**deepcopy(values["clients"]))}
        )

    def mark(self) -> dict[str, Any]:
        """To go `back` to, until the next."""
        values = {
            f.name: deepcopy(getattr(self, f.name)) for f in fields(self) if f.name != "clients"
        }
        return {**values, "clients": self.clients.mark()}

    def back(self, mark: Mapping[str, Any]) -> None:
        for name, value in mark.items():
            if name != "clients":
                setattr(self, name, deepcopy(value))
        self.clients.back(mark["clients"])

    def phase(self, name: str) -> Cost:
        return self.phases.setdefault(name, Cost())

    @property
    def rounds(self) -> int:
        return sum(cost.rounds for cost in self.phases.values())

    def _charge(
        self, phase: str, clients: Sequence[int], amounts: Mapping[str, Sequence[int]]
    ) -> None:
        """Add what these clients spent, one amount per client."""
        if clients:
            cost = self.phase(phase)
            for name, each in amounts.items():
                setattr(cost, name, _total(name, [getattr(cost, name), *each]))
            own = {name: each for name, each in amounts.items() if name in Accounts.FIGURES}
            self.clients.charge(clients, own)

    def totals(self) -> dict[str, int]:
        costs = self.phases.values()
        return {
            f.name: _total(f.name, [getattr(cost, f.name) for cost in costs]) for f in fields(Cost)
        }


def _total(name: str, values: Sequence[int]) -> int:
    return max(values, default=0) if name in LARGEST else sum(values)
