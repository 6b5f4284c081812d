"""What clients compute: tasks on data held in memory, as one stack under `vmap`, in chunks, or one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.devices import sent
from fedbilevel.environment import Environment
from fedbilevel.federation import ranks
from fedbilevel.federation.base import ClientError, wrong
from fedbilevel.federation.batches import SIDES, Batches, Extent, Take, extents, shape
from fedbilevel.federation.features import Tables, embedded, look_up
from fedbilevel.federation.graphs import Graphs, Program, kinds
from fedbilevel.federation.memories import Memories
from fedbilevel.federation.meter import Meter
from fedbilevel.federation.phase import Message
from fedbilevel.federation.pool import Apart, Pool, Pools
from fedbilevel.federation.stacks import Sums, summed
from fedbilevel.federation.steps import Known, Lift, Steps, single, stacked
from fedbilevel.federation.work import (
    Assignment,
    Exchange,
    Part,
    Took,
    by_exchange,
    first_line,
    form_of,
    on_client,
    turns,
)
from fedbilevel.oracle import Features
from fedbilevel.problem import ClientData, Data, Problem, leaves, like
from fedbilevel.tree import Tree, nbytes

Weigh = Callable[[Sequence[int]], list[float]]

RECORD_FROM = 2  # uses of a task
STACK_BELOW = 1e7  # operations of a client's largest convolution


class Clients:
    """Runs tasks of one phase. mode: "stack" runs those of equal batch shape together, in chunks that stay under
    `memory` bytes (on a CPU one by one if their convolutions are large); "loop" runs them one by one and as they are
    written, for debugging and for losses that `vmap` cannot take."""

    def __init__(
        self,
        problem: Problem,
        data: Sequence[ClientData],
        environment: Environment,
        device: str,
        mode: str,
        memory: int,
        compile_: bool = False,
    ) -> None:
        self.problem, self.data, self.environment = problem, data, environment
        self.device, self.mode, self.memory = device, mode, memory
        self.memories = Memories(device, memory)  # what clients keep for themselves
        self.footprints: dict[str, int] = {}
        self.held: dict[int, ClientData] = {}  # what the clients hold that are at work
        self.weigh: Weigh | None = None  # and with which weights their replies are added up
        self.on_gpu = device != "cpu"
        self.pools = Pools(memory if self.on_gpu else 0, device)
        self.graphs = Graphs()
        self.steps = Steps(problem, mode, self.graphs if self.on_gpu else None, compile_)
        self.tables = Tables(problem)

    def mark(self) -> dict[str, Any]:
        # Chunks round differently: a resumed run must cut the same ones.
        return {"memories": self.memories.mark(), "footprints": dict(self.footprints), **self.steps.mark()}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.memories.back(mark["memories"])
        self.footprints = dict(mark["footprints"])
        self.steps.back(mark)

    def snapshot(self) -> dict[str, Any]:
        return {**self.mark(), "memories": self.memories.save()}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Of every rank; other ranks than then stack other clients, and so measure anew what the first had not."""
        self.memories.restore([snapshot["memories"] for snapshot in snapshots])
        own = snapshots[ranks.rank() if len(snapshots) == ranks.size() else 0]
        self.back({**own, "memories": self.memories.mark()})

    def run(self, work: list[Assignment], weigh: Weigh | None = None) -> Iterator[Part]:
        """The replies to tasks of one phase, in stacks, as they are computed. weigh: the clients' weights, where
        replies that are only summed are to be so on the device, without a look at them."""
        self.held = {w.client: self.client(w.exchange, w.client) for w in work}
        self.weigh = weigh
        for turn in turns(work):
            for chunk in self._chunks(turn):
                part = self._run(chunk)
                exchange = part.work[0].exchange
                if exchange.role.remembers:
                    self._remember(part)
                values, stack = (part.sums.totals, ()) if part.sums else (part.values, (len(part.work),))
                if text := wrong(values, exchange.role.reply, self.problem, exchange.submodel, *stack):
                    raise TypeError(f"phase {exchange.phase!r} {text}")
                yield part

    def client(self, exchange: Exchange, client: int) -> ClientData:
        found = on_client(client, exchange, lambda: self.problem.paired(self.data[client]))
        return cast(ClientData, found)

    def _recall(self, w: Assignment) -> dict[str, Any]:
        return self.memories.get(w.client, {}) if w.exchange.role.remembers else {}

    def _remember(self, part: Part) -> None:
        if "memory" not in part.values:
            phase = part.work[0].exchange.phase
            raise TypeError(f"phase {phase!r} remembers; its finish must return a memory beside its reply")
        memory = part.values.pop("memory")
        for j, w in enumerate(part.work):
            self.memories[w.client] = pytree.tree_map(lambda t, j=j: t[j].clone(), memory)

    def _chunks(self, work: list[Assignment]) -> Iterator[list[Assignment]]:
        """Tasks that can be stacked, as many as the memory allows; longest first, so that the stack can shrink."""
        groups: dict[tuple[Hashable, Hashable], list[Assignment]] = defaultdict(list)
        for exchange, alike in by_exchange(work).items():
            role, size = exchange.role, exchange.batch_size(self.environment)
            sides, epochs = SIDES[role.batch], role.epochs is not None
            same = (exchange.form, "", "")
            for w in alike:
                mine = w.each or role.remembers
                letter = (exchange.form, form_of(w.each), form_of(self._recall(w))) if mine else same
                form = (exchange.phase, shape(self.held[w.client], sides, size, epochs), letter)
                groups[form, exchange.role].append(w)  # a stack has one phase, numbers included
        for (kind, _), group in groups.items():
            alone = self.mode == "loop" or len(group) == 1
            size = 1 if alone else max(1, self.memory // self._footprint(repr(kind), group))
            group.sort(key=lambda w: -w.steps)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _footprint(self, kind: str, group: list[Assignment]) -> int:
        """Bytes that a client takes in a stack: two steps of the two largest ones are run and measured."""
        if kind not in self.footprints:
            group = sorted(group, key=lambda w: self.held[w.client].size("train") + self.held[w.client].size("val"))
            steps = min(2, max(w.steps for w in group))
            with Meter() as meter:
                self._run([w._replace(steps=steps) for w in group[-2:]])
            # A stack turns convolutions into grouped ones, which are slower on a CPU: there large ones are not stacked.
            apart = not self.on_gpu and meter.convolution // 2 > STACK_BELOW
            self.footprints[kind] = self.memory if apart else max(meter.peak_bytes // 2, 1)
        return self.footprints[kind]

    def _run(self, work: list[Assignment]) -> Part:
        """Run a chunk; if it fails as a stack, its members run one by one to name the one that does."""
        if len(work) == 1:
            return self._alone(work[0])
        try:
            return self._run_stack(work, stacked)
        except Exception as error:
            for w in work:
                self._alone(w)
            raise ClientError(
                f"{work[0].exchange}: every client runs by itself but not in a stack, because of "
                f"{type(error).__name__}: {first_line(error)} (mode='loop' runs them one by one)"
            ) from error

    def _alone(self, w: Assignment) -> Part:
        return cast(Part, on_client(w.client, w.exchange, lambda: self._run_stack([w], single)))

    def _run_stack(self, work: list[Assignment], lift: Lift) -> Part:
        """start, step, finish for a stack, whose longest tasks come first."""
        exchange, role = work[0].exchange, work[0].exchange.role
        data, lengths = [self.held[w.client] for w in work], [w.steps for w in work]
        dtype = next(iter(self.problem.x.values())).dtype

        def tensor(value: Any) -> Tensor:
            return sent(value, self.device, dtype if isinstance(value, float) else None)

        def stack(*values: Any) -> Tensor:
            return torch.stack([tensor(value) for value in values])

        def here(value: Any) -> Any:
            return pytree.tree_map(lambda v: tensor(v) if isinstance(v, float) else v, value)

        shared = {name: value if isinstance(value, Tree) else here(value) for name, value in exchange.shared.items()}
        own = _stacked([dict(w.each) for w in work], stack)
        places = {e: place for place, e in enumerate(by_exchange(work))}
        if len(places) > 1:  # not everyone was sent the same
            letters, rows = _stacked([dict(e.shared) for e in places], stack), [places[w.exchange] for w in work]
            shared, own = {}, {**pytree.tree_map(lambda t: t[rows], letters), **own}
        held = extents(data, role.batch, exchange.batch_size(self.environment), self.device)
        numbers = [w.client for w in work]
        features, embedding = self._features(work, held) if self._embeds(exchange) else ({}, Took())
        drawn = {side: extent for side, extent in held.items() if side not in features}
        found = {
            side: self._pool(side, data, numbers, lengths[0] * role.draws, extent) for side, extent in drawn.items()
        }
        pools = {side: place for side, place in found.items() if place}
        inputs = {
            "shared": shared,
            "own": own,
            "memory": _stacked([self._recall(w) for w in work], stack),
            "steps": sent(lengths, self.device, dtype),
            "weights": self._weights(work),
            "keys": sent([w.key for w in work], self.device),
            "extents": held,
            "starts": {side: starts for side, (_, starts) in pools.items()},
            "lengths": [lengths[0], lengths[0] if len(set(lengths)) == 1 else 1] if self.on_gpu else lengths,
            "features": features,
            "numbers": sent(list(role.numbers.values()), self.device, dtype),
        }
        others = {side: Apart([getattr(d, side) for d in data]) for side in drawn if side not in pools}

        def program(given: Any) -> tuple[Any, Any]:
            def take(side: str, indices: Tensor | None) -> Any:
                if side in given["features"]:
                    return look_up(given["features"][side], indices)
                if side in others:
                    return others[side].take(indices)
                return pools[side][0].take(indices, given["starts"][side], given["extents"][side].most)

            return self._program(exchange, lift, given, take)

        replies, (spent, size) = self._recorded(exchange, program, inputs) if self.on_gpu else program(inputs)
        table = nbytes(features) // len(work)
        whole = [took._replace(peak_bytes=took.peak_bytes + table).then(embedding) for took in spent]
        values, sums = ({}, replies) if isinstance(replies, Sums) else (replies, None)
        return Part(work, [whole[length] for length in lengths], size, values, sums)

    def _weights(self, work: list[Assignment]) -> Tensor | tuple[()]:
        """With which replies are added up; none if they are looked at one by one."""
        exchange, role = work[0].exchange, work[0].exchange.role
        if self.weigh is None or not role.summed or role.remembers or exchange.submodel:
            return ()
        return sent(self.weigh([w.client for w in work]), self.device, torch.float64)

    def _pool(
        self, side: str, data: Sequence[ClientData], numbers: list[int], batches: int, extent: Extent
    ) -> tuple[Pool, Tensor] | None:
        """One place in which the samples of a stack lie, and where each client's begin; None if it does not pay."""
        if not self.on_gpu and (found := self.pools.together(side, data)):
            return found
        # In memory it costs a copy of all samples: it pays if as many are drawn, a few at a time.
        if self.on_gpu or extent.batch < extent.most <= batches * extent.batch:
            return self.pools.bring(side, numbers, data)
        return None

    def _recorded(self, exchange: Exchange, program: Program, inputs: Any) -> Any:
        """Run a program of a GPU, from its third use on from a recording. Uses are in the checkpoint, as of steps."""
        leaves, form = pytree.tree_flatten(inputs)
        name = self.steps.name((exchange.role.structure, "task", form, kinds(leaves)))
        if self.steps.used(name) <= RECORD_FROM:
            return program(inputs)
        where = tuple(tensor.data_ptr() for pool in self.pools.pools.values() for tensor in pool.tensors)
        return self.graphs.run(name, where, program, leaves, form)

    def _embeds(self, exchange: Exchange) -> bool:
        """Whether every sample is embedded once beforehand: where x stays and every sample is looked at."""
        role = exchange.role
        all_of_them = exchange.batch_size(self.environment) is None or role.epochs is not None
        return role.fixed_x and all_of_them and self.problem.embeds_samples and "x" in exchange.shared

    def _features(self, work: list[Assignment], held: Mapping[str, Extent]) -> tuple[dict[str, Data], Took]:
        """The features of a stack of clients, and what it takes a client to find its own, in every task anew."""
        at, numbers = [w.exchange.shared["x"] for w in work], [w.client for w in work]
        found, took = {}, Took()
        for side, (batch, _, _) in held.items():
            data = self._here(side, numbers)
            kind = self.steps.name(("embed", work[0].exchange.form, batch, side, form_of({"": data[0]})))
            if kind not in self.steps.measured:
                with Meter() as meter:
                    embedded(self.problem, at[0], data[0], batch)
                piece = [tensor[:batch] for _, tensor in leaves(data[0])]
                self.steps.measured[kind] = (meter.flops, nbytes([at[0], piece]) + meter.peak_bytes)
            flops, peak_bytes = self.steps.measured[kind]
            took = took.then(Took(flops=flops, peak_bytes=peak_bytes))
            found[side] = self.tables.find(side, at, numbers, data, batch)
        return found, took

    def _here(self, side: str, numbers: list[int]) -> list[Data]:
        """These clients' samples on the device."""
        held = [self.held[number] for number in numbers]
        data: list[Data] = [getattr(client, side) for client in held]
        if not self.on_gpu:
            return data
        pool, _ = self.pools.bring(side, numbers, held)  # all at once: what comes in later may take their place
        starts = [pool.starts[number] for number in numbers]
        return [
            like(each, [tensor[start : start + client.size(side)] for tensor in pool.tensors])
            for each, client, start in zip(data, held, starts, strict=True)
        ]

    def _program(self, exchange: Exchange, lift: Lift, given: Any, take: Take) -> tuple[Any, tuple[list[Took], int]]:
        """The replies of a stack or the sums of it, what tasks of 0, 1, 2, ... steps took, and the bytes of a reply."""
        replies, took = self._stack(exchange, lift, given, take)
        said = {name: value for name, value in replies.items() if name in exchange.role.reply}  # not what it remembers
        size, weights = nbytes(said) // len(given["keys"]), given["weights"]
        if isinstance(weights, Tensor):
            replies = self.steps.fused("sums", summed, replies, weights, given["steps"])
        return replies, (took, size)

    def _stack(self, exchange: Exchange, lift: Lift, given: Any, take: Take) -> tuple[Any, list[Took]]:
        """The replies of a stack, and what tasks of 0, 1, 2, ... steps took.

        Step k runs on the clients that take more than k steps: on the first of the stack, or, on a GPU, on all, and
        those who are done stay where they are. There a stack of one size is worth more than the work that is saved.
        """
        lengths, numbers = given["lengths"], given["numbers"].unbind()
        role = exchange.role.with_numbers(dict(zip(exchange.role.numbers, numbers, strict=True)))
        batches = Batches(
            *(given["keys"], given["extents"], take, self.steps.fused),
            steps=lengths[0],
            draws=role.draws,
            epochs=role.epochs is not None,
            paired=self.problem.lower_level == "private",
        )

        def start(own: Any, memory: Any, steps: Tensor) -> Any:
            remembered = {"memory": memory} if role.remembers else {}
            return role.start(Message(**given["shared"], **own, **remembered, steps=steps))

        each = given["own"], given["memory"], given["steps"]
        letter = [leaf.unsqueeze(0) for leaf in pytree.tree_leaves(given["shared"]) if isinstance(leaf, Tensor)]
        spent = [self.steps.took(exchange, "start", lambda _, *args: start(*args), letter, *each)]
        carry, form = pytree.tree_flatten(lift(start)(*each))  # flat, because it comes through every step
        known: Known = {}
        done = []
        for k in range(lengths[0]):
            if not self.on_gpu and (still := sum(length > k for length in lengths)) < len(carry[0]):
                done.append(([t[still:] for t in carry], form))
                carry = [t[:still] for t in carry]
            batch = batches.at(k, len(carry[0]))
            if given["features"]:
                batch = Features(*batch) if role.draws == 1 else tuple(Features(*part) for part in batch)
            place = "step" if k else "first" if lengths[0] > 1 else "only"
            stepped, form, more = self.steps.step(exchange, place, carry, form, batch, numbers, lift, known)
            carry = stepped if not self.on_gpu or k < lengths[-1] else _moved(given["steps"] > k, stepped, carry)
            spent.append(spent[-1].then(more)._replace(samples=batches.samples))
        if lengths[0] == 1:
            return pytree.tree_unflatten(carry, form), spent
        carries = [pytree.tree_unflatten(*final) for final in [(carry, form), *reversed(done)]]
        last = self.steps.took(exchange, "finish", role.finish, carries[0])
        replies = [lift(role.finish)(final) for final in carries]
        whole = pytree.tree_map(lambda *parts: torch.cat(parts), *replies) if done else replies[0]
        return whole, [took.then(last) for took in spent]


def _stacked(values: list[dict[str, Any]], stack: Callable[..., Tensor]) -> dict[str, Any]:
    """Values of one form as one, with a leading axis."""
    return pytree.tree_map(stack, *values) if values[0] else {}


def _moved(which: Tensor, new: Any, old: Any) -> Any:
    """The new values of those clients, the old ones of the others."""
    return pytree.tree_map(lambda n, o: torch.where(which.view(-1, *[1] * (n.ndim - 1)), n, o), new, old)
