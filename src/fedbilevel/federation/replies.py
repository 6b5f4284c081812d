"""Replies: what clients answered, checked, weighted and averaged."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.devices import fetched
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, flatten, is_finite
from fedbilevel.federation.phase import Kind, Phase
from fedbilevel.federation.stages import decoded
from fedbilevel.federation.task import Broadcast, Results, Sums, Values

log = logging.getLogger("fedbilevel")


class QuorumError(RuntimeError):
    """An exchange ended with fewer accepted replies than the environment's `min_replies`."""


class Reply(NamedTuple):
    """One client's answer.

    `position` is its place among those asked or, without a barrier, among those that ended. `weight` is n p_i (1 for
    uniform weights), `staleness` counts the server's iterations between the task and the reply. `values` is empty
    where replies are only summed.
    """

    position: int
    client: int
    steps: int
    weight: float
    staleness: int
    values: Mapping[str, Any]


def wrong_form(
    values: Mapping[str, Any],
    declared: Mapping[str, Kind],
    problem: Problem,
    submodel: Submodel | None,
    *stack: int,
) -> str | None:
    """What is wrong with the form of a reply, or of a stack of replies; None if it is as declared."""
    if values.keys() != declared.keys():
        return f"replied with {sorted(values)}; it declares {sorted(declared)}"
    dtype = next(iter(problem.x.values())).dtype
    for name, kind in declared.items():
        expected = {
            key: (*stack, *shape) for key, shape in declared_shapes(kind, problem, submodel).items()
        }
        alike = isinstance(values[name], Tensor if kind == "scalar" else Tree)
        if not alike or _shapes(values[name]) != expected:
            what = repr(kind) if isinstance(kind, str) else "the tree"
            return f"replied with {name!r} of another shape than {what}, which it declares"
        if kind in ("x", "y") and any(tensor.dtype != dtype for tensor in values[name].values()):
            return f"replied with {name!r} of another dtype than {dtype}"
    return None


def declared_shapes(
    kind: Kind, problem: Problem, submodel: Submodel | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of one declared value: like x, like y, a scalar, or a tree of shapes."""
    if not isinstance(kind, str):
        return {name: tuple(shape) for name, shape in kind.items()}
    if kind == "scalar":
        return {"": ()}
    whole = problem.x if kind == "x" else problem.y
    if submodel is None:
        return _shapes(whole)
    return submodel.shapes(whole)


def like(kinds: Mapping[str, Kind], problem: Problem, submodel: Submodel | None) -> dict[str, Tree]:
    """For each of these values that is a tree, a tree of its shapes and of the problem's dtype."""
    found = {}
    for name, kind in kinds.items():
        if kind == "scalar":
            continue
        if isinstance(kind, str):
            whole = Tree(problem.x if kind == "x" else problem.y)
            found[name] = submodel.cut(whole) if submodel else whole
        else:
            some = next(iter(problem.x.values()))
            found[name] = Tree({key: some.new_zeros(shape) for key, shape in kind.items()})
    return found


def kinds_of(message: Mapping[str, Any], problem: Problem) -> dict[str, Kind]:
    """The values of a message that have the names of x or of y."""
    found: dict[str, Kind] = {}
    for name, value in message.items():
        if isinstance(value, Tree) and value.keys() == problem.x.keys():
            found[name] = "x"
        elif isinstance(value, Tree) and value.keys() == problem.y.keys():
            found[name] = "y"
    return found


def _shapes(value: Tensor | Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    items = {"": value} if isinstance(value, Tensor) else value
    return {key: tuple(tensor.shape) for key, tensor in items.items()}


class Replies:
    """The accepted replies of one exchange: their weighted means and, where the phase allows, each by itself.

    `mean` applies p~_i = (n / |C|) p_i, where |C| counts accepted replies: it is for directions and displacements,
    whose expectation over cohorts it gets right, never for iterates (p~ sums to 1 only when the weights are uniform).
    `coverage_mean` is for submodels: in every coordinate the weighted mean over those who hold it, 0 where nobody does.

    Attributes:
        idle: the clients whose tasks have ended, with or without a reply, in the order in which they ended.
        refused: for each refused reply, the client and why.
    """

    def __init__(self, label: str, phase: Phase, problem: Problem) -> None:
        self.label = label
        self.phase = phase
        self.problem = problem
        self.idle: list[int] = []
        self.refused: list[str] = []
        self.refused_clients: list[int] = []
        # Replies whose sums were taken before anybody looked whether they are finite.
        self._unchecked: list[tuple[Sequence[Reply], list[str], Callable[[], Tensor]]] = []
        self._count: int | Tensor = 0
        self._replies: list[Reply] = []
        self._sums: dict[str, Any] = {}
        self._from_submodels: list[Reply] = []
        self._held: dict[str, Tree] = {}  # how many of these hold each coordinate of x and of y
        self._held_weights: dict[str, Tree] = {}  # and the sum of their weights

    def accept(self, results: Results, iteration: int) -> None:
        """Take replies of the declared form, and refuse the others."""
        groups: dict[Submodel | None, list[int]] = defaultdict(list)
        for place, task in enumerate(results.tasks):
            groups[task.broadcast.submodel].append(place)
        for places in groups.values():
            self._accept_alike(results.chosen(places), iteration)

    def _accept_alike(self, results: Results, iteration: int) -> None:
        """The same for replies that come from one submodel."""
        broadcast = results.tasks[0].broadcast
        found = [
            Reply(
                task.position,
                task.client,
                task.steps,
                task.weight,
                iteration - task.broadcast.iteration,
                {},
            )
            for task in results.tasks
        ]
        if results.sums:
            self.add_sums(found, results.sums, broadcast.submodel)
            return
        values, why = results.values, None
        if broadcast.stages:
            values, why = self._decoded(values, broadcast)
        why = why or wrong_form(
            values, self.phase.reply, self.problem, broadcast.submodel, len(found)
        )
        if why:
            for reply in found:
                self.refuse(reply.client, why)
        else:
            self.add(found, values, broadcast.submodel)

    def _decoded(self, payload: Values, broadcast: Broadcast) -> tuple[Values, str | None]:
        """A stack of replies after its stages, or why there is none."""
        kinds = self.phase.reply
        whole = like(kinds, self.problem, broadcast.submodel)

        def decode(payload: Values) -> Values:
            return decoded(broadcast.stages, payload, kinds, whole)

        try:
            return torch.func.vmap(decode)(payload), None
        except Exception as error:  # a client can send anything
            return payload, f"replied with what its stages cannot decode ({type(error).__name__})"

    def add(
        self, replies: Sequence[Reply], stack: Values, submodel: Submodel | None = None
    ) -> None:
        """Take a stack of values (leading axis: clients), one for each of `replies`; refuse those not finite."""
        stack = {
            **stack,
            "steps": torch.tensor([reply.steps for reply in replies], dtype=torch.float64),
        }
        sums = weighted_sum(stack, _weights(replies))
        if not is_finite(sums):
            keep = [
                j for j, reply in enumerate(replies) if self._is_finite(reply.client, row(stack, j))
            ]
            if not keep:
                return
            replies = [replies[j] for j in keep]
            stack = pytree.tree_map(lambda t: t[keep], stack)
            sums = weighted_sum(stack, _weights(replies))
        self._add_sums(sums, len(replies), submodel)
        if submodel:
            self._hold(replies, submodel)
        if self.phase.summed:
            self._replies += replies
        else:
            self._replies += [
                reply._replace(values=row(stack, j)) for j, reply in enumerate(replies)
            ]

    def add_sums(
        self, replies: Sequence[Reply], sums: Sums, submodel: Submodel | None = None
    ) -> None:
        """Take replies that were added up where they were computed; on a GPU, without waiting for it."""
        if submodel:
            self.settle()
        checked = len(self._replies)
        self._add_sums({**sums.totals, "steps": sums.steps}, sums.accepted, submodel)
        self._unchecked.append((replies, sums.names, fetched(sums.finite)))
        if submodel or not sums.finite.is_cuda:
            self.settle()
        if submodel:
            self._hold(self._replies[checked:], submodel)

    def _add_sums(self, sums: Values, count: int | Tensor, submodel: Submodel | None) -> None:
        if submodel:
            whole = {name: getattr(self.problem, kind) for name, kind in self._variables().items()}
            sums = sums | {name: submodel.spread(sums[name], like) for name, like in whole.items()}
        self._count = self._count + count
        self._sums = pytree.tree_map(torch.add, self._sums, sums) if self._sums else sums

    def _variables(self) -> dict[str, str]:
        """The declared values that are shaped like x or like y."""
        return {name: str(kind) for name, kind in self.phase.reply.items() if kind in ("x", "y")}

    @property
    def unchecked(self) -> bool:
        """Whether sums were taken of replies that are yet to be looked at."""
        return bool(self._unchecked)

    def settle(self) -> None:
        """Look at replies that were taken unchecked, and name those that are not finite."""
        for replies, names, finite in self._unchecked:
            for reply, each in zip(replies, finite().T.tolist(), strict=True):
                if all(each):
                    self._replies.append(reply)
                else:
                    self.refuse(reply.client, f"{names[each.index(False)]} is not finite")
        self._unchecked = []

    def _hold(self, replies: Sequence[Reply], submodel: Submodel) -> None:
        for kind in dict.fromkeys(self._variables().values()):
            whole = Tree(getattr(self.problem, kind)).map(torch.ones_like)
            part = submodel.spread(submodel.cut(whole), whole)
            for sums, amount in (
                (self._held, len(replies)),
                (self._held_weights, _weight(replies)),
            ):
                sums[kind] = sums[kind] + part * amount if kind in sums else part * amount
        self._from_submodels += replies

    def _is_finite(self, client: int, values: Mapping[str, Any]) -> bool:
        wrong = [name for name, value in values.items() if not is_finite(value)]
        if wrong:
            self.refuse(client, f"{wrong[0]} is not finite")
        return not wrong

    def refuse(self, client: int, why: str) -> None:
        self.refused_clients.append(client)
        self.refused.append(f"client {client}: {why}")
        log.warning("%s: reply refused, %s", self.label, self.refused[-1])

    def mean(self, name: str) -> Any:
        """sum over C of p~_i value_i: a tree, or a number for scalars and "steps"."""
        if not self._unchecked and not self._replies:
            raise QuorumError(f"{self.label}: no reply was accepted")
        if name not in self._sums:
            raise KeyError(
                f"phase {self.phase.name!r} replies with {', '.join(self._sums)}, not {name!r}"
            )
        if self._from_submodels and name in self._variables():
            raise RuntimeError(
                f"{self.label}: {name!r} comes from submodels; it has a coverage_mean, no mean"
            )
        total = self._sums[name] / (self._count if self._unchecked else len(self))
        return total if isinstance(total, Tree) or self._unchecked else float(total)

    def coverage_mean(self, name: str) -> Tree:
        """In every coordinate k, sum p_i value_i / sum p_i over those i in C that hold k; 0 where that is 0/0."""
        self.settle()
        if not self._from_submodels:
            total = _weight(self._replies)
            return self.mean(name) * (len(self) / total if total else 0.0)  # type: ignore[no-any-return]
        whole = _weight(self._replies) - _weight(self._from_submodels)
        parts = self._held_weights[self._variables()[name]]
        mean: Tree = self._sums[name].map(
            lambda t, w: torch.where(w + whole > 0, t / (w + whole), 0.0), parts
        )
        return mean

    def coverage(self) -> dict[str, float]:
        """Of x and of y, where they come from submodels."""
        found: dict[str, float] = {}
        for kind, tree in self._held.items():
            found |= coverage(kind, flatten(tree) + (len(self) - len(self._from_submodels)))
        return found

    def __len__(self) -> int:
        self.settle()
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        self.settle()
        return iter(sorted(self._replies, key=lambda reply: reply.position))


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


def add_up(stack: Values, weights: Tensor, steps: Tensor) -> Sums:
    """The weighted sums of the finite replies of a stack, without a look at it from the host."""
    largest = [
        torch.linalg.vector_norm(_rows(t), torch.inf, 1).double() for t in pytree.tree_leaves(stack)
    ]
    finite = torch.stack(largest).isfinite()
    good = finite.all(0)
    mine = weights.where(good, 0.0)
    return Sums(weighted_sum(stack, weights, good), mine @ steps.double(), good.sum(), finite)


def weighted_sum(stack: Values, weights: Tensor, good: Tensor | None = None) -> Values:
    """Over all replies of a stack, or over those that are good."""
    there = functools.cache(weights.to)  # once for each device and dtype

    def total(values: Tensor) -> Tensor:
        rows = _rows(values)
        if good is not None:
            rows = rows.where(good.unsqueeze(1), 0.0)
        return (there(rows.device, rows.dtype) @ rows).reshape(values.shape[1:])

    return pytree.tree_map(total, stack)  # type: ignore[no-any-return]


def _rows(values: Tensor) -> Tensor:
    return (values if values.is_floating_point() else values.double()).reshape(len(values), -1)


def row(stack: Values, j: int) -> Values:
    """The reply of one client; a copy, because a view would keep the whole stack in memory."""

    def one(t: Tensor) -> Tensor:
        return t[j].clone()

    return {
        name: value.map(one) if isinstance(value, Tree) else pytree.tree_map(one, value)
        for name, value in stack.items()
    }


def join(rows: Sequence[Values]) -> Values:
    """The replies of several clients as a stack."""

    return pytree.tree_map(lambda *values: torch.stack(values), *rows)  # type: ignore[no-any-return]
