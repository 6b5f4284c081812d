"""Tasks and results: what one client is asked to do, and what it returns.

A `Task` is the work of one client in one exchange. Tasks of one `ask` or `post` share a
`Broadcast`: the phase and the message for everyone.

What crosses the wire. To the client: the phase as plain values (`Phase.to_dict`),
`Broadcast.wire_message`, `Task.client_message`, and the task's number, steps and key. From the
client: the values and the costs in `Results`. Code is never sent.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree
from fedbilevel.federation.kinds import Kind
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stages import Stage

# A reply, or a stack of replies with a leading axis over clients: trees and tensors by name.
Values = dict[str, Any]


class ClientError(RuntimeError):
    """A client's own code or data failed; the message names the client, the phase and the round.

    A failure that is a `ValueError` or a `TypeError` is raised as such, with the same message.
    """


@dataclass(eq=False)
class Broadcast:
    """What the tasks of one `ask` or `post` have in common.

    Clients with different submodels receive different parts of the model; they have one broadcast
    per submodel.

    Attributes:
        phase: What each client does.
        message: The values that a client computes with.
        round: The communication round, counted from 1, for messages.
        iteration: The iteration in which the message was sent, for the staleness of replies.
        submodel: The part of the model that the clients hold; None is the whole model.
        payload: The encoded message, if the message goes through stages.
        stages: What the replies go through.
        client_kinds: The values of the message that have a part which belongs to the clients: "x"
            or "y" by name.
        is_local: Whether message and reply stay on the client, so that nothing is sent.
        shape_key: Equal for messages that can be stacked.
    """

    phase: Phase
    message: Mapping[str, Any]
    round: int
    iteration: int
    submodel: Submodel | None = None
    payload: Mapping[str, Any] | None = None
    stages: Sequence[Stage] = ()
    client_kinds: Mapping[str, Kind] = field(default_factory=dict)
    is_local: bool = False
    shape_key: str = field(init=False)
    _changes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape_key = shape_key(self.message)
        self._changes = self._count_changes()

    def check_unchanged(self) -> None:
        """Refuse a phase that has changed the message in place: the server's own tensors are in it.

        Raises:
            RuntimeError: A tensor of the message was changed since it was sent.
        """
        if self._count_changes() != self._changes:
            raise RuntimeError(
                f"{self} changed its message in place; "
                "a phase must return new values, because all clients share the message"
            )

    def _count_changes(self) -> int:
        """How often the tensors of the message were changed in place, as PyTorch counts it."""
        changes = 0
        for value in self.message.values():
            for leaf in value.values() if isinstance(value, Tree) else pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and not leaf.is_inference():
                    changes += leaf._version
        return changes

    @property
    def wire_message(self) -> Mapping[str, Any]:
        """The message as it crosses the wire, the same for everyone; its bytes are counted."""
        if self.payload is None:
            return self.message
        return self.payload

    @property
    def remembers(self) -> bool:
        """Whether a task leaves something with its client: for the phase, a stage, or its own."""
        own = bool(self.client_kinds)
        return own or self.phase.remembers or any(stage.remembers for stage in self.stages)

    def __str__(self) -> str:
        return f"phase {self.phase.name!r}, round {self.round}"


@dataclass(slots=True, eq=False)
class Task:
    """One client's work in one exchange.

    Attributes:
        broadcast: The phase and the message for everyone.
        number: Unique within a run; the random draws of the task are keyed by it.
        position: The index of the client among those that were asked. For a posted task it is set
            when the task ends: its index among the tasks that this `collect` has seen end.
        client: Who does the work.
        steps: The number of local steps.
        client_message: What this client alone is sent, besides the broadcast.
        key: The root of the client's random draws.
        weight: n p_i, the weight of the reply in averages.
        ended_at: When the task ended, on the clock of the transport.
    """

    broadcast: Broadcast
    number: int
    position: int
    client: int
    steps: int
    client_message: Mapping[str, Any]
    key: int
    weight: float
    ended_at: float = 0.0


class TaskCost(NamedTuple):
    """What a client spent on a task, or on a part of one.

    Attributes:
        samples: Samples read, counted once per step that reads them.
        gradients: Gradient evaluations; a Hessian or cross product counts as two.
        flops: Multiplications and additions in matrix products and convolutions.
        peak_bytes: The most bytes held at once.
    """

    samples: int = 0
    gradients: int = 0
    flops: int = 0
    peak_bytes: int = 0

    def then(self, other: TaskCost) -> TaskCost:
        """The cost of this part followed by another one."""
        return TaskCost(
            self.samples + other.samples,
            self.gradients + other.gradients,
            self.flops + other.flops,
            max(self.peak_bytes, other.peak_bytes),
        )


class Sums(NamedTuple):
    """Replies that were summed where they were computed.

    Attributes:
        totals: The weighted sums of the finite replies, by name; a tree is one vector (`flatten`).
        steps: The weighted sum of the numbers of steps of the finite replies.
        accepted: How many replies are finite.
        weight: The sum of their weights.
        finite: Whether each value of each reply is finite: a row per name, a column per client.
    """

    totals: dict[str, Tensor]
    steps: Tensor
    accepted: Tensor
    weight: Tensor
    finite: Tensor


class Results(NamedTuple):
    """What some tasks returned.

    Attributes:
        tasks: The tasks, of one phase.
        costs: What each client spent.
        nbytes: The bytes of one reply on the wire.
        values: The replies as a stack, after the encoders of their stages.
        sums: The sum of the replies instead of `values`, where the server needs nothing else.
    """

    tasks: Sequence[Task]
    costs: Sequence[TaskCost]
    nbytes: int
    values: Values
    sums: Sums | None = None

    def select(self, indices: Sequence[int]) -> Results:
        """The results of some of the tasks."""
        if len(indices) == len(self.tasks):
            return self
        return self._replace(
            tasks=[self.tasks[j] for j in indices],
            costs=[self.costs[j] for j in indices],
            values=pytree.tree_map(lambda t: t[list(indices)], self.values),
        )


def concurrent_groups(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    """Groups of tasks such that those within a group may run side by side.

    Where clients remember, two tasks of one client must run one after the other: the k-th task of
    each client is in the k-th group. Otherwise there is a single group.
    """
    if not tasks or not tasks[0].broadcast.remembers:
        return [tasks]
    groups: dict[int, list[Task]] = defaultdict(list)
    earlier: Counter[int] = Counter()
    for task in tasks:
        groups[earlier[task.client]].append(task)
        earlier[task.client] += 1
    return list(groups.values())


def group_by_broadcast(tasks: Sequence[Task]) -> dict[Broadcast, list[Task]]:
    """The tasks of each broadcast, in the order given."""
    groups: dict[Broadcast, list[Task]] = defaultdict(list)
    for task in tasks:
        groups[task.broadcast].append(task)
    return groups


def shape_key(values: Mapping[str, Any]) -> str:
    """A text that is equal for nested values whose tensors have equal names and shapes."""
    if not values:
        return ""
    shapes: list[Hashable] = []
    for name, value in values.items():
        if isinstance(value, Tree):  # the common case, faster than a walk over the nest
            shapes.append((name, *((key, tensor.shape) for key, tensor in value.items())))
        else:
            leaves, spec = pytree.tree_flatten(value)
            shapes.append((name, repr(spec), *(getattr(leaf, "shape", ()) for leaf in leaves)))
    return _digest(tuple(shapes))


@functools.lru_cache(maxsize=1024)
def _digest(shapes: Hashable) -> str:
    """A short text for names and shapes, the same in every process."""
    return blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


class on_client:  # noqa: N801  (it reads as a phrase: with on_client(3, "round 1"))
    """A context in which an error of a client's code or data names the client.

    A `ValueError` or a `TypeError` keeps its type; anything else becomes a `ClientError`. An error
    that already names its client passes unchanged, and so does an interrupt.

    Args:
        client: The client at work.
        when: The moment in words, such as a `Broadcast`: phase and round.

    Examples:
        >>> with on_client(3, "round 1"):
        ...     raise KeyError("images")
        Traceback (most recent call last):
        fedbilevel.federation.task.ClientError: client 3, round 1: KeyError: 'images'
    """

    # A class with slots: entered once per task, and a generator would be slower.
    __slots__ = ("client", "when")

    def __init__(self, client: int, when: object) -> None:
        self.client = client
        self.when = when

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ClientError):
            return
        where = f"client {self.client}, {self.when}"
        if type(error) in (ValueError, TypeError):
            raise type(error)(f"{where}: {first_line(error)}") from error
        # A subclass may take other arguments than a message: its base class is raised instead.
        cause = f"{where}: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, ValueError):
            raise ValueError(cause) from error
        if isinstance(error, TypeError):
            raise TypeError(cause) from error
        raise ClientError(cause) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().split("\n")[0] or "no message"
