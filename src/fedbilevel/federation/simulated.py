"""A federation on one machine, with a virtual clock: who is asked what, when it ends, and what becomes of it."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel import checks, devices
from fedbilevel.environment import Environment
from fedbilevel.federation import ranks
from fedbilevel.federation.base import Each, Replies, wrong
from fedbilevel.federation.clients import Clients
from fedbilevel.federation.losses import Losses
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.runtime import Runtime, Submodels, by_submodel, chosen
from fedbilevel.federation.stacks import Packing, Values, join, packed, row
from fedbilevel.federation.work import Assignment, Exchange, Part, Took, on_client
from fedbilevel.problem import ClientData, Problem, client_weights
from fedbilevel.rng import fold_in, root, subset
from fedbilevel.submodels import Submodel, units
from fedbilevel.tree import Tree, nbytes

if TYPE_CHECKING:
    from fedbilevel.algorithms.base import Algorithm

AHEAD = 1024  # posted tasks that are evaluated together, because one of them is due

Ready = tuple[Tensor, Packing, Took]  # a reply, as bytes, and what it took


class Ending(NamedTuple):
    """When a task ends and how. Ties go by the task's number; `copy` 1 is a second answer to the same task."""

    due: float
    number: int
    copy: int
    client: int
    lost: bool


class SimulatedFederation(Runtime):
    """Runs an algorithm's phases on clients held in memory (any sequence; a lazy one is asked only for the cohort).

    mode: "stack" runs clients of equal batch shape together, in chunks that stay under `memory` bytes (by default two
    gigabytes, or a quarter of a GPU); "loop" runs them one by one, for debugging and for losses that `vmap` cannot
    take. Both see the same draws and agree to rounding. Of what clients remember as many bytes are held in memory,
    the rest in a file.

    The clock is virtual: an `ask` takes as long as its slowest client, a posted task is due when its client's delay is
    over. What a posted task computes depends only on what was sent, so it is evaluated when it is first needed,
    together with others that are under way.
    """

    KEPT: ClassVar = (*Runtime.KEPT, "flying", "pending", "ready", "endings", "free_at")

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
        memory: int | None = None,
        precision: Literal["fp32", "bf16"] = "fp32",
        compile: bool = False,
    ) -> None:
        super().__init__(problem, len(clients), algorithm, environment, seed, device)
        self.clients = clients
        self.weights = client_weights(weights, clients)
        self.mode = checks.one_of("mode", mode, ("stack", "loop"))
        episode = self.environment.batch_size if problem.lower_level == "private" else None
        on_client(0, "before round 1", lambda: problem.check(clients[0], device, episode))
        room = devices.stack_bytes(device) if memory is None else memory
        coarse = problem.rounded(precision)
        if compile and device == "cpu":
            raise ValueError(
                "compile is True, but device is 'cpu', where a compiled step is no faster; it must be False"
            )
        self.engine = Clients(coarse, clients, self.environment, device, self.mode, room, compile)
        self.trusting = device != "cpu" and ranks.size() == 1
        self.flying: dict[int, Assignment] = {}  # posted tasks that have not ended, by client
        self.pending: dict[int, Assignment] = {}  # those of them that are yet to be evaluated
        self.ready: dict[int, Ready] = {}  # what the others have computed
        self.endings: list[Ending] = []  # a heap
        self.free_at: dict[int, float] = {}  # when a client that is busy or away can begin the next task
        slow = self.environment.stragglers
        self.slow = frozenset(subset(root(self.seed, "stragglers"), len(clients), slow.clients) if slow else ())

    @property
    def now(self) -> float:
        return self.ledger.virtual_s

    def sample(self) -> list[int]:
        self.free_at = away = {client: time for client, time in self.free_at.items() if time > self.now}
        if (absent := self.environment.min_replies - len(self) + len(away)) > 0:
            self.ledger.virtual_s = sorted(away.values())[absent - 1]
        return self._cohort([client for client, time in away.items() if time > self.now], spare=len(away))

    @functools.cached_property
    def _losses(self) -> Losses:
        return Losses(self)

    def losses(self, x: Tree, y: Tree) -> dict[str, float]:
        return self._losses(x, y)

    def _samples(self, client: int, exchange: Exchange) -> int:
        return self.engine.client(exchange, client).size("train")

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        self.settle()  # what was taken on trust is counted where it was spent
        ledger, free_at = self.ledger, self.free_at
        self.ledger, self.free_at = deepcopy(ledger), dict(free_at)
        try:
            yield
            self.settle()
        finally:
            self.ledger, self.free_at = ledger, free_at

    def mark(self) -> dict[str, Any]:
        return {**super().mark(), "engine": self.engine.mark()}

    def back(self, mark: Mapping[str, Any]) -> None:
        super().back(mark)
        self.engine.back(mark["engine"])

    def keep_in(self, folder: Path) -> None:
        self.engine.memories.folder = folder

    def snapshot(self) -> dict[str, Any]:
        exchanges = list({id(w.exchange): w.exchange for w in self.flying.values()}.values())
        places = {id(exchange): place for place, exchange in enumerate(exchanges)}
        return {
            **super().snapshot(),
            "engines": ranks.gather(self.engine.snapshot()),
            "exchanges": [
                (e.role.plain(), dict(e.shared), e.round, e.iteration, dict(e.submodel.kept) if e.submodel else None)
                for e in exchanges
            ],
            "flying": [(places[id(w.exchange)], *w[1:5], dict(w.each), w.key) for w in self.flying.values()],
            "pending": list(self.pending),
            "endings": [tuple(ending) for ending in self.endings],
            "ready": {i: (row(packing.stack(reply), 0), *took) for i, (reply, packing, took) in self.ready.items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        def here(value: Any) -> Any:
            return pytree.tree_map(lambda t: t.to(self.device) if isinstance(t, Tensor) else t, value)

        axes, total = self.problem.axes, units(self.problem.axes, {**self.problem.x, **self.problem.y})
        exchanges = [
            Exchange(Phase.load(phase), here(shared), round_, iteration, kept and Submodel(axes, total, kept))
            for phase, shared, round_, iteration, kept in snapshot["exchanges"]
        ]
        work = [
            Assignment(exchanges[exchange], number, place, client, steps, here(each), key)
            for exchange, number, place, client, steps, each, key in snapshot["flying"]
        ]
        flying, ready = {w.client: w for w in work}, here(snapshot["ready"])
        super().restore(
            {
                **snapshot,
                "flying": flying,
                "pending": {client: flying[client] for client in snapshot["pending"]},
                "ready": {i: (*packed(join([values])), Took(*took)) for i, (values, *took) in ready.items()},
                "endings": [Ending(*ending) for ending in snapshot["endings"]],
            }
        )
        self.engine.restore(snapshot["engines"])

    def ask(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> Replies:
        exchange, work = self._assign(phase, clients, each, submodels, shared)
        self.ledger.phase(phase.name).rounds += 1
        replies = Replies(str(exchange), exchange.role, self.problem)
        self._send(work)
        endings = self._endings(work, self.now + (self.environment.deadline or float("inf")))
        lost = {ending.number for ending in endings if ending.lost}
        if exchange.role.remembers:  # what was posted before comes before
            self._evaluate([w for w in map(self.pending.get, clients) if w])
        self._answer(_computed(work, lost), lost, replies)
        for ending in sorted(endings):
            self._end(ending, replies)
        replies.idle = replies.idle or list(clients)
        return self._quorum(len(work), replies)

    def _answer(self, work: list[Assignment], lost: set[int], replies: Replies) -> None:
        """Compute these tasks and take the replies of those that are not lost.

        Where replies are only summed, every rank takes those of its own clients, and the sums are added up; otherwise
        every rank takes them all.
        """

        def take(part: Part) -> tuple[list[int], list[Took], int]:
            if part.sums:  # without lost ones: those are computed for what they leave in a memory alone
                replies.trust(self._replies(part.work), part.sums)
            else:
                kept = [j for j, w in enumerate(part.work) if w.number not in lost]
                self._add(*chosen(part.work, part.values, kept), replies)
            return [w.number for w in part.work], part.took, part.nbytes

        if replies.role.summed:
            own, spoilt = _own(work), bool(self.environment.faults and self.environment.faults.corrupt)
            weigh = self._weigh if self.trusting and not spoilt else None
            notes = list(itertools.chain(*ranks.agree(lambda: [take(part) for part in self.engine.run(own, weigh)])))
            replies.merge()
        else:
            notes = [take(part) for part in self._run(work)]
        tasks = {w.number: w for w in work}
        for numbers, took, sent in notes:
            up = [0 if number in lost else sent for number in numbers]
            self._count([tasks[number] for number in numbers], took, bytes_up=up)

    def _run(self, work: list[Assignment]) -> Iterator[Part]:
        """What all ranks compute, each of its own clients."""
        if ranks.size() == 1:
            yield from self.engine.run(work)
            return
        own, tasks = _own(work), {w.number: w for w in work}

        def compute() -> list[tuple[list[int], list[Took], int, Values]]:
            parts = self.engine.run(own)
            return [([w.number for w in p.work], p.took, p.nbytes, ranks.sent(p.values, "cpu")) for p in parts]

        for numbers, took, size, values in itertools.chain(*ranks.agree(compute)):
            yield Part([tasks[number] for number in numbers], took, size, ranks.sent(values, self.device))

    def post(
        self, phase: Phase, clients: Sequence[int], *, each: Each = None, submodels: Submodels = None, **shared: Any
    ) -> None:
        for client, times in Counter(clients).items():
            if client in self.flying or times > 1:
                raise RuntimeError(f"client {client} would have two tasks in flight; it can have one at a time")
        for other in itertools.islice(self.flying.values(), 1):
            if other.exchange.phase != phase.name:
                raise RuntimeError(f"phase {phase.name!r} must wait: tasks of {other.exchange.phase!r} are in flight")
        _, work = self._assign(phase, clients, each, submodels, shared)
        self._send(work)
        now = [Ending(self.now, w.number, 0, w.client, False) for w in work]
        endings = self._endings(work, float("inf")) or now
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
        replies = Replies(place, first.role, self.problem)
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
            for group in by_submodel(arrived):
                alike = [arrived[j] for j in group]
                self._accept(alike, self._take(alike), replies)
        return self._collected(replies)

    def _send(self, work: list[Assignment]) -> None:
        if not work:
            return
        shared = {exchange: nbytes(exchange.shared) for exchange in {w.exchange for w in work}}
        sent = [shared[w.exchange] + (nbytes(dict(w.each)) if w.each else 0) for w in work]
        self.ledger.charge(work[0].exchange.phase, [w.client for w in work], bytes_down=sent)

    def _endings(self, work: list[Assignment], latest: float) -> list[Ending]:
        """When and how these tasks end, what would come after `latest` being lost; none where all end well and now."""
        conditions, faults = self.environment, self.environment.faults
        if not work or (conditions.delay is None and faults is None):
            return []
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
        self._count(work, [took for *_, took in ready])
        packing, *others = {id(packing): packing for _, packing, _ in ready}.values()
        if any(other != packing for other in others):  # of another dtype, because a number was sent as another
            return join([row(other.stack(reply), 0) for reply, other, _ in ready])
        return packing.stack(torch.cat([reply for reply, *_ in ready]))

    def _evaluate(self, needed: list[Assignment]) -> None:
        """Compute the replies of these posted tasks, and of more of those under way while at it."""
        missing = {w.client: w for w in needed if w.client not in self.ready}
        if not missing:
            return
        missing |= dict(itertools.islice(self.pending.items(), AHEAD))
        for part in self._run(list(missing.values())):
            rows, packing = packed(part.values)
            for w, took, reply in zip(part.work, part.took, rows.split(1), strict=True):
                # A copy: a view would keep the whole stack for as long as the reply of a straggler is waited for.
                self.ready[w.client] = (reply.clone(), packing, took)
                self.pending.pop(w.client, None)

    def _add(self, work: list[Assignment], values: Values, replies: Replies) -> None:
        if work and self.environment.faults and self.environment.faults.corrupt:
            work, values = self._corrupt(work, values, replies)
        super()._add(work, values, replies)

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
        return chosen(work, values, keep)


def _computed(work: list[Assignment], lost: set[int]) -> list[Assignment]:
    """The tasks whose result matters: of a lost one only what the client remembers does."""
    return [w for w in work if w.number not in lost or w.exchange.role.remembers] if lost else work


def _own(work: list[Assignment]) -> list[Assignment]:
    """Those that this rank computes."""
    return work if ranks.size() == 1 else [w for w in work if ranks.mine(w.client)]
