"""A client's task: what it is given, what it replies, what it takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from fedbilevel.environment import Environment
from fedbilevel.federation.base import ClientError
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stacks import Sums, Values
from fedbilevel.submodels import Submodel
from fedbilevel.tree import Tree


class Exchange:
    """What the tasks of one `ask` or `post` have in common; those on different submodels are exchanges of their own."""

    def __init__(
        self,
        phase: Phase,
        shared: Mapping[str, Any],
        round_: int,
        iteration: int,
        submodel: Submodel | None = None,
    ) -> None:
        self.role, self.phase, self.shared = phase, phase.name, shared
        self.round, self.iteration, self.submodel = round_, iteration, submodel
        self.form = form_of(shared)

    def batch_size(self, environment: Environment) -> int | None:
        return None if self.role.full else environment.batch_size

    def __str__(self) -> str:
        return f"phase {self.phase!r}, round {self.round}"


class Assignment(NamedTuple):
    """One client's task. `number` is unique in the run, and `key`, the root of the client's draws, comes from it."""

    exchange: Exchange
    number: int
    place: int
    client: int
    steps: int
    each: Mapping[str, Any]
    key: int


class Took(NamedTuple):
    """What a client spent on a task, or on a part of one; `peak_bytes` is the most it held at once."""

    samples: int = 0
    gradients: int = 0
    flops: int = 0
    peak_bytes: int = 0

    def then(self, other: Took) -> Took:
        samples, gradients, flops, _ = (a + b for a, b in zip(self, other, strict=True))
        return Took(samples, gradients, flops, max(self.peak_bytes, other.peak_bytes))


class Part(NamedTuple):
    """Some tasks, what each of them took, the bytes of a reply, and the stack of replies or the sums of it."""

    work: list[Assignment]
    took: list[Took]
    nbytes: int
    values: Values
    sums: Sums | None = None


def turns(work: list[Assignment]) -> Iterable[list[Assignment]]:
    """Where clients remember, their tasks follow each other: each may leave a memory for the next."""
    if not work or not work[0].exchange.role.remembers:
        return [work]
    turns: dict[int, list[Assignment]] = defaultdict(list)
    before: Counter[int] = Counter()
    for w in work:
        turns[before[w.client]].append(w)
        before[w.client] += 1
    return turns.values()


def by_exchange(work: list[Assignment]) -> dict[Exchange, list[Assignment]]:
    groups: dict[Exchange, list[Assignment]] = defaultdict(list)
    for w in work:
        groups[w.exchange].append(w)
    return groups


def form_of(values: Mapping[str, Any]) -> str:
    """What can be stacked has the same form."""

    def shapes(value: Any) -> Any:
        if isinstance(value, Tree):  # nearly all that is sent, and every time
            return {name: tensor.shape for name, tensor in value.items()}
        return pytree.tree_map(lambda t: getattr(t, "shape", ()), value)

    return repr({name: shapes(value) for name, value in values.items()}) if values else ""


def on_client(client: int, place: Any, run: Callable[[], Any]) -> Any:
    """Run something of a client's; its error names the client and the place."""
    try:
        return run()
    except ClientError:
        raise
    except (ValueError, TypeError) as error:
        raise type(error)(f"client {client}, {place}: {first_line(error)}") from error
    except Exception as error:
        raise ClientError(f"client {client}, {place}: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or "no message"
