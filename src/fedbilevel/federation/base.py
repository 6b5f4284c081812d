"""What an algorithm sees of a federation: `ask`, `post`, `collect`, and the replies."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.devices import fetched
from fedbilevel.federation import ranks
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stacks import Sums, Values, row, weighted_sum
from fedbilevel.problem import Problem
from fedbilevel.submodels import Submodel
from fedbilevel.tree import Tree, flatten, is_finite

log = logging.getLogger("fedbilevel")

Each = Sequence[Mapping[str, Any]] | None  # what every client is sent for itself


class ClientError(RuntimeError):
    """A client's own code failed; the message names the client, the phase and the round."""


class QuorumError(RuntimeError):
    """An exchange ended with fewer accepted replies than the environment's `min_replies`."""


class Reply(NamedTuple):
    """One client's answer.

    `place` is its place among those asked, `weight` is n p_i (1 for uniform weights), `staleness` counts the server's
    iterations between its fetch and its arrival. `values` is empty where the phase's replies are only summed.
    """

    place: int
    client: int
    steps: int
    weight: float
    staleness: int
    values: Mapping[str, Any]


class Federation(Protocol):
    """`ask` is a barrier and one communication round; `post` and `collect` are the same without the barrier.

    A client has at most one posted task at a time, and posted tasks are of one phase at a time.
    """

    problem: Problem
    ledger: Ledger

    @property
    def iteration(self) -> int:
        """The number of iterations the algorithm has completed."""
        ...

    def __len__(self) -> int:
        """The number of registered clients."""
        ...

    @property
    def now(self) -> float:
        """Virtual seconds."""
        ...

    def sample(self) -> list[int]:
        """The cohort of a round: distinct clients, drawn uniformly among those that are neither busy nor away.

        If there are fewer than `min_replies` of them, time passes until there are so many.
        """
        ...

    def draw(self, count: int) -> int:
        """A choice of the server's own among 0 .. count - 1, uniform and keyed."""
        ...

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        """The width ratios of the submodels that these clients can hold: of x, and of what is in y alone."""
        ...

    def ask(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: Each = None,
        submodels: Sequence[Submodel | None] | None = None,
        **shared: Any,
    ) -> Replies:
        """Send `shared` to everyone and `each[j]` to `clients[j]`, wait for all replies.

        With `submodels`, one a client, the trees in `shared` are cut to the client's, and so is what it replies.
        """
        ...

    def post(
        self,
        phase: Phase,
        clients: Sequence[int],
        *,
        each: Each = None,
        submodels: Sequence[Submodel | None] | None = None,
        **shared: Any,
    ) -> None:
        """Send without waiting."""
        ...

    def collect(self, count: int | None = None) -> Replies:
        """The next `count` arrivals that are accepted (the environment's participation if None), or all there are."""
        ...

    def uncharged(self) -> AbstractContextManager[None]:
        """Within, exchanges cost nothing and take no time: only to simulate what a paper takes to be free."""
        ...

    def record(self, **values: float | Tensor) -> None:
        """An algorithm's own numbers for the metrics; averaged between evaluations."""
        ...


def wrong(
    values: Mapping[str, Any], declared: Mapping[str, str], problem: Problem, submodel: Submodel | None, *stack: int
) -> str | None:
    """What is wrong with the form of a reply, or of a stack of replies: it must be as its phase declares."""
    if values.keys() != declared.keys():
        return f"replied with {sorted(values)}; it declares {sorted(declared)}"
    for name, kind in declared.items():
        model = torch.zeros(()) if kind == "scalar" else getattr(problem, kind)
        shapes = _shapes(model) if submodel is None or isinstance(model, Tensor) else submodel.shapes(model)
        alike = isinstance(values[name], Tensor) == isinstance(model, Tensor)
        if not alike or _shapes(values[name]) != {key: (*stack, *shape) for key, shape in shapes.items()}:
            return f"replied with {name!r} of another shape than {kind!r}, which it declares"
    return None


def _shapes(value: Tensor | Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    items = {"": value} if isinstance(value, Tensor) else value
    return {key: tuple(tensor.shape) for key, tensor in items.items()}


class Replies:
    """The accepted replies of one exchange: their weighted means and, where the phase allows, each by itself.

    `mean` applies p~_i = (n / |C|) p_i, where |C| counts accepted replies: it is for directions and displacements,
    whose expectation over cohorts it gets right, never for iterates (p~ sums to 1 only when the weights are uniform).
    `coverage_mean` is for submodels: in every coordinate the weighted mean over those who hold it, 0 where nobody does.
    """

    def __init__(self, place: str, role: Phase, problem: Problem) -> None:
        self.phase, self.place, self.role, self.problem = role.name, place, role, problem
        self.idle: list[int] = []  # clients whose task has ended, well or not: whom to send the next one
        self.refused: list[str] = []
        self._open: list[tuple[Sequence[Reply], list[str], Callable[[], Tensor]]] = []  # and which values are finite
        self._count: int | Tensor = 0  # of accepted replies, those included
        self._replies: list[Reply] = []
        self._sums: dict[str, Any] = {}
        self._parts: list[Reply] = []  # those that come from submodels
        self._held: dict[str, Tree] = {}  # how many of them hold a coordinate of x and of y
        self._weights: dict[str, Tree] = {}  # and the sum of their weights

    def add(self, replies: Sequence[Reply], stack: dict[str, Any], submodel: Submodel | None = None) -> None:
        """Take a stack of values (leading axis: clients), one for each of `replies`; those not finite are refused."""
        stack = {**stack, "steps": torch.tensor([reply.steps for reply in replies], dtype=torch.float64)}
        sums = weighted_sum(stack, _weights(replies))
        if not is_finite(sums):
            keep = [j for j, reply in enumerate(replies) if self._check(reply.client, row(stack, j))]
            if not keep:
                return
            replies, stack = [replies[j] for j in keep], pytree.tree_map(lambda t: t[keep], stack)
            sums = weighted_sum(stack, _weights(replies))
        if submodel:
            like = {name: getattr(self.problem, kind) for name, kind in self.role.reply.items() if kind != "scalar"}
            sums |= {name: submodel.spread(sums[name], whole) for name, whole in like.items()}
            self._hold(replies, submodel)
        self._add(sums, len(replies))
        if self.role.summed:
            self._replies += replies
        else:
            self._replies += [reply._replace(values=row(stack, j)) for j, reply in enumerate(replies)]

    def _add(self, sums: Values, count: int | Tensor) -> None:
        self._count = self._count + count
        self._sums = pytree.tree_map(torch.add, self._sums, sums) if self._sums else sums

    def trust(self, replies: Sequence[Reply], sums: Sums) -> None:
        """Take what was added up on a GPU, which is not waited for, until somebody asks who they are."""
        self._add({**sums.totals, "steps": sums.steps}, sums.accepted)
        self._open.append((replies, sums.names, fetched(sums.finite)))

    @property
    def open(self) -> bool:
        """Whether replies were taken on trust that are yet to be looked at."""
        return bool(self._open)

    def settle(self) -> None:
        """Look at them, and name those that are not finite."""
        for replies, names, finite in self._open:
            for reply, each in zip(replies, finite().T.tolist(), strict=True):
                if all(each):
                    self._replies.append(reply)
                else:
                    self.refuse(reply.client, f"{names[each.index(False)]} is not finite")
        self._open = []

    def _hold(self, replies: Sequence[Reply], submodel: Submodel) -> None:
        for kind in dict.fromkeys(kind for kind in self.role.reply.values() if kind != "scalar"):
            whole = Tree(getattr(self.problem, kind)).map(torch.ones_like)
            part = submodel.spread(submodel.cut(whole), whole)
            for sums, amount in ((self._held, len(replies)), (self._weights, _weight(replies))):
                sums[kind] = sums[kind] + part * amount if kind in sums else part * amount
        self._parts += replies

    def merge(self) -> None:
        """With several ranks, each of which has added replies of its own: all have then added all of them."""
        if ranks.size() == 1:
            return
        sums = {"sums": self._sums, "held": self._held, "weights": self._weights}
        everyone = ranks.gather((self._replies, self._parts, self.refused, ranks.sent(sums, "meta")))
        replies, parts, refused, forms = zip(*everyone, strict=True)
        like = {name: {key: value for form in forms for key, value in form[name].items()} for name in sums}
        here = next(iter(self.problem.x.values())).device

        def zeros(form: Tensor) -> Tensor:
            return torch.zeros(form.shape, dtype=form.dtype, device=here)

        own = {name: {**pytree.tree_map(zeros, like[name]), **sums[name]} for name in sums}
        own["sums"].pop("steps", None)  # known to all, and of another dtype
        self._sums, self._held, self._weights = ranks.total(own).values()
        self._replies, self._parts = (list(itertools.chain(*lists)) for lists in (replies, parts))
        if self._replies:
            steps = sum(reply.weight * reply.steps for reply in self._replies)
            self._sums["steps"] = torch.tensor(steps, dtype=torch.float64)
        for text in itertools.chain(*refused):
            if text not in self.refused:
                log.warning("%s: reply refused, %s", self.place, text)
        self.refused = list(itertools.chain(*refused))

    def _check(self, client: int, values: Mapping[str, Any]) -> bool:
        wrong = [name for name, value in values.items() if not is_finite(value)]
        if wrong:
            self.refuse(client, f"{wrong[0]} is not finite")
        return not wrong

    def refuse(self, client: int, why: str) -> None:
        self.refused.append(f"client {client}: {why}")
        log.warning("%s: reply refused, %s", self.place, self.refused[-1])

    def mean(self, name: str) -> Any:
        """sum over C of p~_i value_i: a tree, or a number for scalars and "steps"."""
        if not self._open and not self._replies:
            raise QuorumError(f"{self.place}: no reply was accepted")
        if name not in self._sums:
            raise KeyError(f"phase {self.phase!r} replies with {', '.join(self._sums)}, not {name!r}")
        if self._parts and self.role.reply.get(name, "scalar") != "scalar":
            raise RuntimeError(f"{self.place}: {name!r} comes from submodels; it has a coverage_mean, no mean")
        total = self._sums[name] / (self._count if self._open else len(self))
        return total if isinstance(total, Tree) or self._open else float(total)

    def coverage_mean(self, name: str) -> Tree:
        """In every coordinate k, sum p_i value_i / sum p_i over those i in C that hold k; 0 where that is 0/0."""
        self.settle()
        if not self._parts:
            total = _weight(self._replies)
            return self.mean(name) * (len(self) / total if total else 0.0)  # type: ignore[no-any-return]
        whole, parts = _weight(self._replies) - _weight(self._parts), self._weights[self.role.reply[name]]
        return self._sums[name].map(lambda t, w: torch.where(w + whole > 0, t / (w + whole), 0.0), parts)  # type: ignore[no-any-return]

    def coverage(self) -> dict[str, float]:
        """Of x and of y, where they come from submodels."""
        found: dict[str, float] = {}
        for kind, tree in self._held.items():
            found |= coverage(kind, flatten(tree) + (len(self) - len(self._parts)))
        return found

    def __len__(self) -> int:
        self.settle()
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        self.settle()
        return iter(sorted(self._replies, key=lambda reply: reply.place))


def coverage(kind: str, counts: Tensor) -> dict[str, float]:
    """The least number of clients that hold a coordinate somebody holds (C*), and the share that somebody does."""
    held = counts[counts > 0]
    return {
        f"min_coverage_{kind}": float(held.min()) if len(held) else 0.0,
        f"covered_{kind}": len(held) / len(counts),
    }


def _weight(replies: Sequence[Reply]) -> float:
    return sum(reply.weight for reply in replies)


def _weights(replies: Sequence[Reply]) -> Tensor:
    return torch.tensor([reply.weight for reply in replies], dtype=torch.float64)
