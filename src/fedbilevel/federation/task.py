"""Tasks: what one client is asked to do, and what came of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stages import Stage

Values = dict[
    str, Any
]  # a reply, or a stack of replies with a leading axis: trees and tensors by name


class ClientError(RuntimeError):
    """A client's own code failed; the message names the client, the phase and the round."""


@dataclass(eq=False)
class Broadcast:
    """What the tasks of one `ask` or `post` have in common: the phase and the message for everyone.

    Tasks on different submodels are sent different parts of the model, and so have a broadcast per submodel.

    Attributes:
        message: what a client computes with.
        payload: what travels instead, where the message goes through stages.
        stages: what the replies go through.
        form: equal for messages that can be stacked.
    """

    phase: Phase
    message: Mapping[str, Any]
    round: int
    iteration: int
    submodel: Submodel | None = None
    payload: Mapping[str, Any] | None = None
    stages: Sequence[Stage] = ()
    form: str = field(init=False)

    def __post_init__(self) -> None:
        self.form = form_of(self.message)

    @property
    def travels(self) -> Mapping[str, Any]:
        """What is sent to everyone."""
        return self.message if self.payload is None else self.payload

    @property
    def remembers(self) -> bool:
        """Whether a task leaves something with its client, for the phase or for a stage."""
        return self.phase.remembers or any(stage.remembers for stage in self.stages)

    def __str__(self) -> str:
        return f"phase {self.phase.name!r}, round {self.round}"


@dataclass(slots=True, eq=False)
class Task:
    """One client's work.

    Attributes:
        number: unique in the run; the draws of the task are keyed by it.
        position: the place of the client among those that were asked; of a posted task, once it has ended, its place
            among those that `collect` has seen end.
        own: what this client alone is sent.
        key: the root of the client's draws.
        weight: n p_i, with which the reply is averaged.
        ended: when the task ended, on the clock of the transport.
    """

    broadcast: Broadcast
    number: int
    position: int
    client: int
    steps: int
    own: Mapping[str, Any]
    key: int
    weight: float
    ended: float = 0.0

    def plain(self, broadcast: int) -> tuple[Any, ...]:
        """The task as plain values, for a file; its broadcast is a number there."""
        return (
            broadcast,
            self.number,
            self.position,
            self.client,
            self.steps,
            dict(self.own),
            self.key,
            self.weight,
        )


class TaskCost(NamedTuple):
    """What a client spent on a task, or on a part of one; `peak_bytes` is the most it held at once."""

    samples: int = 0
    gradients: int = 0
    flops: int = 0
    peak_bytes: int = 0

    def then(self, other: TaskCost) -> TaskCost:
        return TaskCost(
            self.samples + other.samples,
            self.gradients + other.gradients,
            self.flops + other.flops,
            max(self.peak_bytes, other.peak_bytes),
        )


class Sums(NamedTuple):
    """Replies that were added up where they were computed, with their weights.

    `accepted` counts the replies that are finite, and `totals` and `steps` are theirs; `finite` has a row for each
    tensor of a reply and a column for each client.
    """

    totals: Values
    steps: Tensor
    accepted: Tensor
    finite: Tensor

    @property
    def names(self) -> list[str]:
        """The name of the value that each row of `finite` belongs to."""
        return [name for name, value in self.totals.items() for _ in pytree.tree_leaves(value)]


class Results(NamedTuple):
    """What some tasks of one broadcast returned: their costs, the bytes of one reply, and a stack of replies.

    Where the server needs only their sum, `sums` may stand in the place of `values`.
    """

    tasks: Sequence[Task]
    costs: Sequence[TaskCost]
    nbytes: int
    values: Values
    sums: Sums | None = None

    def chosen(self, places: Sequence[int]) -> Results:
        """The results of some of the tasks."""
        if len(places) == len(self.tasks):
            return self
        return self._replace(
            tasks=[self.tasks[j] for j in places],
            costs=[self.costs[j] for j in places],
            values=pytree.tree_map(lambda t: t[list(places)], self.values),
        )


def in_turns(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    """Tasks that may run side by side: where clients remember, those of one client follow each other."""
    if not tasks or not tasks[0].broadcast.remembers:
        return [tasks]
    turns: dict[int, list[Task]] = defaultdict(list)
    before: Counter[int] = Counter()
    for task in tasks:
        turns[before[task.client]].append(task)
        before[task.client] += 1
    return list(turns.values())


def by_broadcast(tasks: Sequence[Task]) -> dict[Broadcast, list[Task]]:
    groups: dict[Broadcast, list[Task]] = defaultdict(list)
    for task in tasks:
        groups[task.broadcast].append(task)
    return groups


def form_of(values: Mapping[str, Any]) -> str:
    """A text that is equal for nested values whose tensors have equal shapes."""

    def shapes(value: Any) -> Any:
        if isinstance(value, Tree):  # the common case, and often
            return {name: tensor.shape for name, tensor in value.items()}
        return pytree.tree_map(lambda t: getattr(t, "shape", ()), value)

    return repr({name: shapes(value) for name, value in values.items()}) if values else ""


class on_client:  # noqa: N801  (it reads as a phrase: with on_client(3, "round 1"))
    """Within, an error of a client's own code or data names the client and the place.

    A `ValueError` or `TypeError` stays one; its subclasses may want other arguments than a message.
    """

    __slots__ = ("client", "place")

    def __init__(self, client: int, place: object) -> None:
        self.client = client
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ClientError):
            return
        where = f"client {self.client}, {self.place}"
        if type(error) in (ValueError, TypeError):
            raise type(error)(f"{where}: {first_line(error)}") from error
        cause = f"{where}: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, (ValueError, TypeError)):
            raise (ValueError if isinstance(error, ValueError) else TypeError)(cause) from error
        raise ClientError(cause) from error


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or "no message"
