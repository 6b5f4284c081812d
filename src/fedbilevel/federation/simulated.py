"""A federation on one machine, with a virtual clock: who is asked what, when it ends, and what becomes of it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import checks
from fedbilevel.environment import Environment
from fedbilevel.federation.base import Each, Ledger, QuorumError, Replies, Reply, Values, join, row, wrong
from fedbilevel.federation.clients import Assignment, Clients, Exchange, Took, on_client
from fedbilevel.problem import ClientData, Problem, client_weights
from fedbilevel.rng import fold_in, integers, root, subset
from fedbilevel.submodels import Submodel, units
from fedbilevel.tree import Tree, nbytes

if TYPE_CHECKING:
    from fedbilevel.algorithms.base import Algorithm

AHEAD = 1024  # posted tasks that are evaluated together, because one of them is due

Submodels = Sequence[Submodel | None] | None
Ready = tuple[Values, *tuple[int, ...]]  # a reply, and what it took


class Ending(NamedTuple):
    """When a task ends and how. Ties go by the task's number; `copy` 1 is a second answer to the same task."""

    due: float
    number: int
    copy: int
    client: int
    lost: bool


KEPT = (
    *("cohorts", "draws", "assignments", "recorded", "heard"),
    *("flying", "pending", "ready", "endings", "free_at"),
)


class SimulatedFederation:
    """Runs an algorithm's phases on clients held in memory (any sequence; a lazy one is asked only for the cohort).

    mode: "stack" runs clients of equal batch shape together, in chunks that stay under `memory` bytes; "loop" runs them
    one by one, for debugging and for losses that `vmap` cannot take. Both see the same draws and agree to rounding.

    The clock is virtual: an `ask` takes as long as its slowest client, a posted task is due when its client's delay is
    over. What a posted task computes depends only on what was sent, so it is evaluated when it is first needed,
    together with others that are under way.
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData],
        algorithm: Algorithm,
        environment: Environment | None = None,
        *,
        weights: str | Sequence[float] = "uniform",
        seed: int = 0,
        device: str = "cpu",
        mode: Literal["stack", "loop"] = "stack",
        memory: int = 2**31,
    ) -> None:
        if len(clients) == 0:
            raise ValueError("clients is empty; a federation needs at least one")
        self.problem, self.clients = problem, clients
        self.algorithm = self.settings = algorithm
        self.environment = environment or Environment()
        self.environment.check(len(clients))
        self.weights = client_weights(weights, clients)
        self.seed, self.device = checks.integer("seed", seed, least=0), device
        self.mode = checks.one_of("mode", mode, ("stack", "loop"))
        algorithm.check(problem)
        if self.environment.submodels and not (algorithm.submodels and problem.axes):
            why = (
                "this problem names no axes to cut" if algorithm.submodels else f"{algorithm.name} trains whole models"
            )
            raise ValueError(f"capacity is {self.environment.capacity}, but {why}; it must be 1")
        episode = self.environment.batch_size if problem.lower_level == "private" else None
        on_client(0, "before round 1", lambda: problem.check(clients[0], device, episode))
        self.engine = Clients(problem, clients, algorithm, self.environment, device, self.mode, memory)
        self.ledger = Ledger()
        self.cohorts = 0
        self.draws = 0
        self.assignments = 0
        self.flying: dict[int, Assignment] = {}  # posted tasks that have not ended, by client
        self.pending: dict[int, Assignment] = {}  # those of them that are yet to be evaluated
        self.ready: dict[int, Ready] = {}  # what the others have computed
        self.endings: list[Ending] = []  # a heap
        self.free_at: dict[int, float] = {}  # when a client that is busy or away can begin the next task
        slow = self.environment.stragglers
        self.slow = frozenset(subset(root(self.seed, "stragglers"), len(clients), slow.clients) if slow else ())
        self.recorded: dict[str, tuple[float, int]] = {}  # sums (maxima) and counts
        self.heard: set[int] = set()

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def now(self) -> float:
        return self.ledger.virtual_s

    def sample(self) -> list[int]:
        key = fold_in(root(self.seed, "cohort"), self.cohorts)
        self.cohorts += 1
        size = self.environment.cohort(len(self))
        self.free_at = away = {client: time for client, time in self.free_at.items() if time > self.now}
        if not away:
            return subset(key, len(self), size)
        if (absent := self.environment.min_replies - len(self) + len(away)) > 0:
            self.ledger.virtual_s = sorted(away.values())[absent - 1]
        some = subset(key, len(self), size + len(away))  # at a cost that does not depend on the number of clients
        present = [client for client in some if away.get(client, 0.0) <= self.now]
        return [present[place] for place in subset(fold_in(key, 1), len(present), size)]

    def draw(self, count: int) -> int:
        key = fold_in(root(self.seed, "server"), self.draws)
        self.draws += 1
        return int(integers(key, 0, count - 1))

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        return self.environment.capacities(clients)

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        ledger, free_at = self.ledger, self.free_at
        self.ledger, self.free_at = deepcopy(ledger), dict(free_at)
        try:
            yield
        finally:
            self.ledger, self.free_at = ledger, free_at

    def record(self, **values: float | Tensor) -> None:
        for name, value in values.items():
            total, count = self.recorded.get(name, (0.0, 0))
            extreme = _extreme(name)
            so_far = extreme(total, float(value)) if extreme and count else total + float(value)
            self.recorded[name] = (so_far, count + 1)

    def records(self) -> dict[str, float]:
        """What was recorded since the last call: extremes of what is called max_... or min_..., means of the rest."""
        found = {name: total if _extreme(name) else total / count for name, (total, count) in self.recorded.items()}
        if self.heard:
            found["participants"] = len(self.heard)
        self.recorded, self.heard = {}, set()
        return found

    def mark(self) -> dict[str, Any]:
        """Everything but the state that the next iteration depends on or adds to, to go `back` to."""
        kept = {name: copy(getattr(self, name)) for name in KEPT}
        return {"ledger": asdict(self.ledger), **kept, **self.engine.snapshot()}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.ledger = Ledger.load(mark["ledger"])
        for name in KEPT:
            setattr(self, name, copy(mark[name]))
        self.engine.restore(mark)

    def snapshot(self) -> dict[str, Any]:
        """The same as plain values and tensors, for a file."""
        exchanges = list({id(w.exchange): w.exchange for w in self.flying.values()}.values())
        places = {id(exchange): place for place, exchange in enumerate(exchanges)}
        return {
            **self.mark(),
            "exchanges": [
                (e.phase, dict(e.shared), e.round, e.iteration, dict(e.submodel.kept) if e.submodel else None)
                for e in exchanges
            ],
            "flying": [(places[id(w.exchange)], *w[1:5], dict(w.each), w.key) for w in self.flying.values()],
            "pending": list(self.pending),
            "endings": [tuple(ending) for ending in self.endings],
            "heard": sorted(self.heard),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        def here(value: Any) -> Any:
            return pytree.tree_map(lambda t: t.to(self.device) if isinstance(t, Tensor) else t, value)

        settings = {iteration: self.algorithm.at(iteration) for *_, iteration, _ in snapshot["exchanges"]}
        axes, total = self.problem.axes, units(self.problem.axes, {**self.problem.x, **self.problem.y})
        exchanges = [
            Exchange(phase, settings[iteration], here(shared), round_, iteration, kept and Submodel(axes, total, kept))
            for phase, shared, round_, iteration, kept in snapshot["exchanges"]
        ]
        work = [
            Assignment(exchanges[exchange], number, place, client, steps, here(each), key)
            for exchange, number, place, client, steps, each, key in snapshot["flying"]
        ]
        flying = {w.client: w for w in work}
        self.back(
            {
                **snapshot,
                "flying": flying,
                "pending": {client: flying[client] for client in snapshot["pending"]},
                "ready": here(snapshot["ready"]),
                "endings": [Ending(*ending) for ending in snapshot["endings"]],
                "heard": set(snapshot["heard"]),
            }
        )

    def ask(
        self, phase: str, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> Replies:
        exchange, work = self._assign(phase, clients, each, submodels, shared)
        self.ledger.phase(phase).rounds += 1
        replies = Replies(phase, str(exchange), exchange.role, self.problem)
        endings = self._send(work, self.now + (self.environment.deadline or float("inf")))
        lost = {ending.number for ending in endings if ending.lost}
        if exchange.role.remembers:  # what was posted before comes before
            self._evaluate([w for w in map(self.pending.get, clients) if w])
        for part in self.engine.run(_computed(work, lost)):
            self._count(part.work, [part.took] * len(part.work))
            kept = [j for j, w in enumerate(part.work) if w.number not in lost]
            self._accept(*_chosen(part.work, part.values, kept), replies)
        for ending in sorted(endings):
            self._end(ending, replies)
        self.ledger.refused_replies += len(replies.refused)
        needed = min(self.environment.min_replies, len(work))
        if len(replies) < needed:
            why = f" ({replies.refused[0]})" if replies.refused else ""
            raise QuorumError(
                f"{exchange}: {len(replies)} of {len(work)} replies were accepted, at least {needed} needed{why}"
            )
        self.record(**replies.coverage())
        return replies

    def post(
        self, phase: str, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> None:
        for client, times in Counter(clients).items():
            if client in self.flying or times > 1:
                raise RuntimeError(f"client {client} would have two tasks in flight; it can have one at a time")
        for other in itertools.islice(self.flying.values(), 1):
            if other.exchange.phase != phase:
                raise RuntimeError(f"phase {phase!r} must wait: tasks of {other.exchange.phase!r} are in flight")
        _, work = self._assign(phase, clients, each, submodels, shared)
        endings = self._send(work, float("inf"))
        lost = {ending.number for ending in endings if ending.lost}
        self.flying |= {w.client: w for w in work}
        self.pending |= {w.client: w for w in _computed(work, lost)}
        for ending in endings:
            heapq.heappush(self.endings, ending)

    def collect(self, count: int | None = None) -> Replies:
        if not self.flying:
            raise RuntimeError("nothing is in flight, so nothing can be collected; post a task first")
        count = self.environment.cohort(len(self)) if count is None else checks.integer("count", count, least=1)
        first = next(iter(self.flying.values())).exchange
        self.ledger.phase(first.phase).rounds += 1
        place = f"phase {first.phase!r}, round {self.ledger.rounds}"
        replies = Replies(first.phase, place, first.role, self.problem)
        while self.endings and len(replies) < count:
            arrived: list[Assignment] = []
            while self.endings and len(replies) + len(arrived) < count:
                ending = heapq.heappop(self.endings)
                self._end(ending, replies)
                if ending.copy:
                    continue
                w = self.flying.pop(ending.client)
                if not ending.lost:
                    arrived.append(w._replace(place=len(replies.idle) - 1))
                elif w.exchange.role.remembers:
                    self._take([w])
            for group in _by_submodel(arrived):
                alike = [arrived[j] for j in group]
                self._accept(alike, self._take(alike), replies)
        self.ledger.refused_replies += len(replies.refused)
        self.record(**replies.coverage())
        if staleness := [reply.staleness for reply in replies]:
            self.record(staleness=sum(staleness) / len(staleness), max_staleness=max(staleness))
            self.heard |= {reply.client for reply in replies}
        return replies

    def _assign(
        self, phase: str, clients: Sequence[int], each: Each, submodels: Submodels, shared: Mapping[str, Any]
    ) -> tuple[Exchange, list[Assignment]]:
        """Key the draws of each task and say how many steps it takes."""
        for client in clients:
            checks.integer("client", client, least=0, most=len(self) - 1)
        if each is not None and len(each) != len(clients):
            raise ValueError(f"each has {len(each)} entries; it must have one for each of {len(clients)} clients")
        if submodels is not None and len(submodels) != len(clients):
            raise ValueError(f"submodels has {len(submodels)} entries; it must have one for each of {len(clients)}")
        now = self.ledger.rounds + 1, self.ledger.iterations
        exchange = Exchange(phase, self.settings, shared, *now)
        exchanges = {
            part: Exchange(phase, self.settings, _cut(shared, part), *now, part) for part in submodels or () if part
        }
        numbers = torch.arange(self.assignments, self.assignments + len(clients))
        self.assignments += len(clients)
        keys = fold_in(fold_in(root(self.seed, phase), numbers), torch.tensor(clients))
        taus = self.engine.steps(exchange, fold_in(keys, 0), clients)
        own = each or [{}] * len(clients)
        held = [exchanges[part] if part else exchange for part in submodels or [None] * len(clients)]
        parts = zip(
            *(held, numbers.tolist(), itertools.count(), clients, taus, own, fold_in(keys, 1).tolist()), strict=False
        )
        return exchange, [Assignment(*part) for part in parts]

    def _send(self, work: list[Assignment], latest: float) -> list[Ending]:
        """Decide when and how these tasks end; what would come after `latest` is lost."""
        conditions, faults = self.environment, self.environment.faults
        if not work:
            return []
        shared = {exchange: nbytes(exchange.shared) for exchange in {w.exchange for w in work}}
        sent = [shared[w.exchange] + nbytes(dict(w.each)) for w in work]
        self.ledger.charge(work[0].exchange.phase, [w.client for w in work], bytes_down=sent)
        if conditions.delay is None and faults is None:
            return [Ending(self.now, w.number, 0, w.client, False) for w in work]
        keys, clients = torch.tensor([w.key for w in work]), [w.client for w in work]
        seconds = conditions.delay.seconds(fold_in(keys, 3), clients) if conditions.delay else [0.0] * len(work)
        happens = {
            name: faults.happen(fold_in(keys, 4), name) if faults else [False] * len(work)
            for name in ("drop", "duplicate", "leave")
        }
        endings = []
        for w, second, drop, duplicate, leave in zip(work, seconds, *happens.values(), strict=True):
            slowdown = conditions.stragglers.slowdown if conditions.stragglers and w.client in self.slow else 1.0
            due = max(self.now, self.free_at.get(w.client, 0.0)) + slowdown * second
            endings.append(Ending(min(due, latest), w.number, 0, w.client, drop or due > latest))
            if duplicate and not drop and due <= latest:
                endings.append(Ending(due, w.number, 1, w.client, False))
            self.free_at[w.client] = due + (faults.away_s if faults and leave else 0.0)
        return endings

    def _end(self, ending: Ending, replies: Replies) -> None:
        self.ledger.virtual_s = max(self.ledger.virtual_s, ending.due)
        if ending.copy:
            replies.refuse(ending.client, "answered twice")
        else:
            replies.idle.append(ending.client)
            self.ledger.lost_tasks += ending.lost

    def _take(self, work: list[Assignment]) -> Values:
        """What these posted tasks have computed, as a stack."""
        self._evaluate(work)
        ready = [self.ready.pop(w.client) for w in work]
        self._count(work, [took for _, *took in ready])
        return join([values for values, *_ in ready])

    def _count(self, work: list[Assignment], took: Sequence[Sequence[int]]) -> None:
        amounts = dict(zip(Took._fields, map(list, zip(*took, strict=True)), strict=True))
        self.ledger.charge(work[0].exchange.phase, [w.client for w in work], **amounts)

    def _evaluate(self, needed: list[Assignment]) -> None:
        """Compute the replies of these posted tasks, and of more of those under way while at it."""
        missing = {w.client: w for w in needed if w.client not in self.ready}
        if not missing:
            return
        missing |= dict(itertools.islice(self.pending.items(), AHEAD))
        for part in self.engine.run(list(missing.values())):
            for j, w in enumerate(part.work):
                self.ready[w.client] = (row(part.values, j), *part.took)
                self.pending.pop(w.client, None)

    def _accept(self, work: list[Assignment], values: Values, replies: Replies) -> None:
        sent = [nbytes(values) // len(work)] * len(work) if work else []
        self.ledger.charge(replies.phase, [w.client for w in work], bytes_up=sent)
        if work and self.environment.faults and self.environment.faults.corrupt:
            work, values = self._corrupt(work, values, replies)
        for group in _by_submodel(work):
            alike, part = _chosen(work, values, group)
            replies.add([self._reply(w) for w in alike], part, alike[0].exchange.submodel)

    def _reply(self, w: Assignment) -> Reply:
        staleness = self.ledger.iterations - w.exchange.iteration
        return Reply(w.place, w.client, w.steps, len(self) * self.weights[w.client], staleness, values={})

    def _corrupt(self, work: list[Assignment], values: Values, replies: Replies) -> tuple[list[Assignment], Values]:
        """Spoil some replies, as lying clients would: half of them are not finite, half have another shape."""
        assert self.environment.faults
        keys = fold_in(torch.tensor([w.key for w in work]), 5)
        spoilt, cut = self.environment.faults.happen(keys, "corrupt"), (keys % 2 == 0).tolist()
        values = pytree.tree_map(torch.clone, values)
        floats = [leaf for leaf in pytree.tree_leaves(values) if leaf.is_floating_point()]
        keep = []
        for j, w in enumerate(work):
            if spoilt[j] and (cut[j] or not floats):
                nonsense = pytree.tree_map(lambda t, j=j: t[j].reshape(-1)[:0], values)
                why = wrong(nonsense, w.exchange.role.reply, self.problem, w.exchange.submodel)
                replies.refuse(w.client, str(why))
                continue
            if spoilt[j]:
                for leaf in floats:
                    leaf[j] = float("nan")
            keep.append(j)
        return _chosen(work, values, keep)


def _computed(work: list[Assignment], lost: set[int]) -> list[Assignment]:
    """The tasks whose result matters: of a lost one only what the client remembers does."""
    return [w for w in work if w.number not in lost or w.exchange.role.remembers]


def _by_submodel(work: list[Assignment]) -> Iterable[list[int]]:
    """The places of tasks on one submodel."""
    groups: dict[int, list[int]] = defaultdict(list)
    for j, w in enumerate(work):
        groups[id(w.exchange.submodel)].append(j)
    return groups.values()


def _cut(shared: Mapping[str, Any], part: Submodel) -> dict[str, Any]:
    return {name: part.cut(value) if isinstance(value, Tree) else value for name, value in shared.items()}


def _extreme(name: str) -> Callable[..., float] | None:
    return {"max": max, "min": min}.get(name.split("_")[0])


def _chosen(work: list[Assignment], values: Values, places: list[int]) -> tuple[list[Assignment], Values]:
    if len(places) == len(work):
        return work, values
    return [work[j] for j in places], pytree.tree_map(lambda t: t[places], values)
