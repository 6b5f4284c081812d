"""The server's side of every federation: who is asked, with which draws, what is accepted, counted and recorded."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import checks
from fedbilevel.environment import Environment
from fedbilevel.federation.base import Each, QuorumError, Replies, Reply
from fedbilevel.federation.batches import passes
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.stacks import Values
from fedbilevel.federation.work import Assignment, Exchange, Took
from fedbilevel.problem import Problem
from fedbilevel.rng import fold_in, integers, root, subset
from fedbilevel.submodels import Submodel
from fedbilevel.tree import Tree, nbytes

if TYPE_CHECKING:
    from fedbilevel.algorithms.base import Algorithm

Submodels = Sequence[Submodel | None] | None


class Runtime(ABC):
    """What a simulation and a real federation have in common: with the same seed both ask the same clients for the same
    tasks with the same draws, and treat the replies alike. How messages reach the clients is theirs."""

    KEPT: ClassVar[tuple[str, ...]] = ("cohorts", "draws", "assignments", "recorded", "heard", "missed")
    weights: Sequence[float]

    def __init__(
        self,
        problem: Problem,
        clients: int,
        algorithm: Algorithm,
        environment: Environment | None,
        seed: int,
        device: str,
    ) -> None:
        if clients == 0:
            raise ValueError("clients is empty; a federation needs at least one")
        self.problem, self.n = problem, clients
        self.algorithm = algorithm
        self.environment = environment or Environment()
        self.environment.check(clients)
        self.seed, self.device = checks.integer("seed", seed, least=0), device
        algorithm.check(problem)
        if self.environment.submodels and not (algorithm.submodels and problem.axes):
            why = (
                "this problem names no axes to cut" if algorithm.submodels else f"{algorithm.name} trains whole models"
            )
            raise ValueError(f"capacity is {self.environment.capacity}, but {why}; it must be 1")
        self.ledger = Ledger()
        self.cohorts = 0
        self.draws = 0
        self.assignments = 0
        self.recorded: dict[str, tuple[float | Tensor, int]] = {}  # sums (maxima) and counts
        self.heard: set[int] = set()
        self.trusted: tuple[int, Replies] | None = None  # how many were asked, and what they said
        self.missed = ""  # the quorum that was

    def __len__(self) -> int:
        return self.n

    @property
    def iteration(self) -> int:
        return self.ledger.iterations

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def sample(self) -> list[int]: ...

    @abstractmethod
    def ask(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> Replies: ...

    @abstractmethod
    def post(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> None: ...

    @abstractmethod
    def collect(self, count: int | None = None) -> Replies: ...

    @abstractmethod
    def uncharged(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        """The upper and lower loss over the clients; it costs nothing."""

    @abstractmethod
    def _samples(self, client: int, exchange: Exchange) -> int:
        """How many training samples a client holds."""

    def _cohort(self, away: Collection[int], spare: int) -> list[int]:
        """The next cohort, drawn uniformly among those who are not away; at most `spare` are."""
        key = fold_in(root(self.seed, "cohort"), self.cohorts)
        self.cohorts += 1
        size = self.environment.cohort(len(self))
        if not spare:
            return subset(key, len(self), size)
        some = subset(key, len(self), size + spare)  # at a cost that does not depend on the number of clients
        present = [client for client in some if client not in away]
        return [present[place] for place in subset(fold_in(key, 1), len(present), size)]

    def draw(self, count: int) -> int:
        key = fold_in(root(self.seed, "server"), self.draws)
        self.draws += 1
        return int(integers(key, 0, count - 1))

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        return self.environment.capacities(clients)

    def record(self, **values: float | Tensor) -> None:
        for name, value in values.items():
            total, count = self.recorded.get(name, (0.0, 0))
            if (extreme := extreme_of(name)) and count:
                self.recorded[name] = (extreme(float(total), float(value)), count + 1)
            else:  # where it is, on a GPU that is not waited for
                self.recorded[name] = (total + (value.double() if isinstance(value, Tensor) else value), count + 1)

    def records(self) -> dict[str, float]:
        """What was recorded since the last call: extremes of what is called max_... or min_..., means of the rest."""
        recorded = self._recorded().items()
        found = {name: total if extreme_of(name) else total / count for name, (total, count) in recorded}
        if self.heard:
            found["participants"] = len(self.heard)
        self.recorded, self.heard = {}, set()
        return found

    def _recorded(self) -> dict[str, tuple[float, int]]:
        return {name: (float(total), count) for name, (total, count) in self.recorded.items()}

    def mark(self) -> dict[str, Any]:
        """Everything but the state that the next iteration depends on or adds to, to go `back` to until the next."""
        return {"ledger": self.ledger.mark(), "trusted": self.trusted, **self._kept()}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.ledger.back(mark["ledger"])
        self.trusted = mark["trusted"]
        self._keep(mark)

    def _kept(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.KEPT}

    def _keep(self, kept: Mapping[str, Any]) -> None:
        for name in self.KEPT:
            setattr(self, name, copy(kept[name]))

    def snapshot(self) -> dict[str, Any]:
        """The same as plain values and tensors, for a file."""
        self._judge()
        own = {"recorded": self._recorded(), "heard": sorted(self.heard)}
        return {"ledger": asdict(self.ledger), **self._kept(), **own}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.ledger = Ledger.load(snapshot["ledger"])
        self._keep({**snapshot, "heard": set(snapshot["heard"])})

    def keep_in(self, folder: Path) -> None:  # noqa: B027  (there may be nothing to put there)
        """Where to put, from now on, what would make every checkpoint large."""

    def _assign(
        self, phase: Phase, clients: Sequence[int], each: Each, submodels: Submodels, shared: Mapping[str, Any]
    ) -> tuple[Exchange, list[Assignment]]:
        """Key the draws of each task and say how many steps it takes."""
        last = len(self) - 1
        for client in clients:
            checks.integer("client", client, least=0, most=last)
        if each is not None and len(each) != len(clients):
            raise ValueError(f"each has {len(each)} entries; it must have one for each of {len(clients)} clients")
        if submodels is not None and len(submodels) != len(clients):
            raise ValueError(f"submodels has {len(submodels)} entries; it must have one for each of {len(clients)}")
        now = self.ledger.rounds + 1, self.ledger.iterations
        exchange = Exchange(phase, shared, *now)
        exchanges = {part: Exchange(phase, _cut(shared, part), *now, part) for part in submodels or () if part}
        numbers = torch.arange(self.assignments, self.assignments + len(clients))
        self.assignments += len(clients)
        keys = fold_in(fold_in(root(self.seed, phase.name), numbers), torch.tensor(clients))
        taus = self._steps(exchange, keys, clients)
        own = each or [{}] * len(clients)
        held = [exchanges[part] if part else exchange for part in submodels or [None] * len(clients)]
        parts = zip(
            *(held, numbers.tolist(), itertools.count(), clients, taus, own, fold_in(keys, 1).tolist()), strict=False
        )
        return exchange, [Assignment(*part) for part in parts]

    def _steps(self, exchange: Exchange, keys: Tensor, clients: Sequence[int]) -> list[int]:
        """How many steps each client will take."""
        steps = exchange.role.steps
        if steps == "local":
            return self.environment.steps(fold_in(keys, 0), clients)
        if (epochs := exchange.role.epochs) is not None:
            size = exchange.batch_size(self.environment)
            return [passes(self._samples(i, exchange), size, epochs) for i in clients]
        return [int(steps)] * len(clients)

    def _accept(self, work: list[Assignment], values: Values, replies: Replies) -> None:
        sent = [nbytes(values) // len(work)] * len(work) if work else []
        self.ledger.charge(replies.phase, [w.client for w in work], bytes_up=sent)
        self._add(work, values, replies)

    def _add(self, work: list[Assignment], values: Values, replies: Replies) -> None:
        for group in by_submodel(work):
            alike, part = chosen(work, values, group)
            replies.add(self._replies(alike), part, alike[0].exchange.submodel)

    def _replies(self, work: list[Assignment]) -> list[Reply]:
        """Who replies, without what they say."""
        now, nothing, weights = self.ledger.iterations, dict[str, Any](), self._weigh([w.client for w in work])
        return [
            Reply(w.place, w.client, w.steps, weight, now - w.exchange.iteration, nothing)
            for w, weight in zip(work, weights, strict=True)
        ]

    def _weigh(self, clients: Sequence[int]) -> list[float]:
        n, weights = len(self), self.weights
        return [n * weights[client] for client in clients]

    def _count(self, work: list[Assignment], took: Sequence[Sequence[int]], **more: Sequence[int]) -> None:
        amounts = dict(zip(Took._fields, map(list, zip(*took, strict=True)), strict=True))
        self.ledger.charge(work[0].exchange.phase, [w.client for w in work], **amounts, **more)

    def _quorum(self, asked: int, replies: Replies) -> Replies:
        """The end of an `ask`. Replies that were taken on trust are judged when the next are there: a GPU is then busy
        with those."""
        self.settle()
        self.trusted = asked, replies
        if not replies.open:
            self.settle()
        self.record(**replies.coverage())
        return replies

    def settle(self) -> None:
        """Judge the replies that were taken on trust, if any."""
        self._judge()
        if self.missed:
            raise QuorumError(self.missed)

    def _judge(self) -> None:
        if self.trusted is None:
            return
        (asked, replies), self.trusted = self.trusted, None
        replies.settle()
        self.ledger.refused_replies += len(replies.refused)
        needed = min(self.environment.min_replies, asked)
        if len(replies) < needed:
            why = f" ({replies.refused[0]})" if replies.refused else ""
            accepted = f"{len(replies)} of {asked} replies were accepted"
            self.missed = f"{replies.place}: {accepted}, at least {needed} needed{why}"

    def _collected(self, replies: Replies) -> Replies:
        """The end of a `collect`."""
        self.ledger.refused_replies += len(replies.refused)
        self.record(**replies.coverage())
        if staleness := [reply.staleness for reply in replies]:
            self.record(staleness=sum(staleness) / len(staleness), max_staleness=max(staleness))
            self.heard |= {reply.client for reply in replies}
        return replies


def by_submodel(work: list[Assignment]) -> Iterable[list[int]]:
    """The places of tasks on one submodel."""
    groups: dict[int, list[int]] = defaultdict(list)
    for j, w in enumerate(work):
        groups[id(w.exchange.submodel)].append(j)
    return groups.values()


def _cut(shared: Mapping[str, Any], part: Submodel) -> dict[str, Any]:
    return {name: part.cut(value) if isinstance(value, Tree) else value for name, value in shared.items()}


def extreme_of(name: str) -> Callable[..., float] | None:
    return {"max": max, "min": min}.get(name.split("_")[0])


def chosen(work: list[Assignment], values: Values, places: list[int]) -> tuple[list[Assignment], Values]:
    if len(places) == len(work):
        return work, values
    return [work[j] for j in places], pytree.tree_map(lambda t: t[places], values)
