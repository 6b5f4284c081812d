"""The parts of tasks, as they run: each kind is measured once, and a step that is used often is traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedbilevel.federation.base import log
from fedbilevel.federation.graphs import Graphs, kinds
from fedbilevel.federation.meter import Meter
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.work import Exchange, Took, first_line
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem
from fedbilevel.trace import Flat, compiled, trace
from fedbilevel.tree import nbytes

TRACE_FROM = 50  # uses of a step; a trace costs about as much as it saves in that many
TRACE_BELOW = 8e9  # operations of a stack on a CPU: a step of more spends its time on those, traced or not

Lift = Callable[[Callable[..., Any]], Callable[..., Any]]
Traced = tuple[Flat, pytree.TreeSpec, int]  # the form of its result, and how many gradients it takes
Known = dict[Hashable, tuple[pytree.TreeSpec, str, Took]]


class Steps:
    """Runs and measures the parts of an algorithm's tasks. graphs: of a GPU, where a step is traced while it is
    recorded and runs as it is written otherwise; None on a CPU."""

    def __init__(self, problem: Problem, mode: str, graphs: Graphs | None, compile_: bool) -> None:
        self.problem, self.mode, self.graphs = problem, mode, graphs
        self.compile, self.trace = compile_, compiled if compile_ else trace
        self.measured: dict[str, tuple[int, int]] = {}  # operations and bytes of each kind of part, for one client
        self.uses: dict[str, int] = {}  # of each kind of part, by a stack of one size
        self.names: dict[Hashable, str] = {}
        self.parts: dict[Hashable, tuple[str, str]] = {}  # the names of a part: of a stack's, of a client's
        self.finishes: dict[str, Took] = {}  # what a finish takes after a step
        self.traces: dict[str, Traced | None] = {}  # None: it cannot be

    def mark(self) -> dict[str, Any]:
        # Traces round differently: a resumed run must trace the same steps.
        return {"measured": dict(self.measured), "uses": dict(self.uses)}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.measured, self.uses, self.finishes = dict(mark["measured"]), dict(mark["uses"]), {}

    def used(self, name: str) -> int:
        """How often, this time included."""
        self.uses[name] = self.uses.get(name, 0) + 1
        return self.uses[name]

    def name(self, key: Hashable) -> str:
        """A short name, the same in every process."""
        if key not in self.names:
            self.names[key] = blake2b(repr(key).encode(), digest_size=8).hexdigest()
        return self.names[key]

    def took(self, exchange: Exchange, place: str, fn: Callable[..., Any], *args: Any) -> Took:
        values, form = pytree.tree_flatten(args)
        return self._use(exchange, place, lambda *values: fn(*pytree.tree_unflatten(values, form)), values, form)[1]

    def _use(
        self, exchange: Exchange, place: str, fn: Callable[..., Any], values: list[Tensor], form: Hashable
    ) -> tuple[str, Took]:
        """The name of a part of a task, by its shapes, and what it takes of one client.

        That is measured once, by running the first client of the stack alone: a stack holds more than its clients
        would, and a trace leaves out what is computed for nothing.
        """
        key = (
            exchange.role.structure,
            place,
            form,
            tuple((value.shape, value.stride(), value.dtype) for value in values),
        )
        if key not in self.parts:
            one = (*key[:3], tuple((value.shape[1:], value.dtype) for value in values))
            self.parts[key] = self.name(key), self.name(one)
        name, kind = self.parts[key]
        if kind not in self.measured:
            alone = [value[:1] for value in values]
            with Meter() as meter:
                single(fn)(*alone)
            self.measured[kind] = (meter.flops, nbytes(alone) + meter.peak_bytes)
        flops, peak_bytes = self.measured[kind]
        return name, Took(flops=flops, peak_bytes=peak_bytes)

    def fused(self, what: Hashable, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), which depends on tensors and on `what`: compiled where a task is recorded that is to be compiled,
        because many small kernels take longer than one that does their work."""
        if not (self.compile and self.graphs and self.graphs.recording):
            return fn(*args)
        values, form = pytree.tree_flatten(args)
        after = form

        def flat(*values: Tensor) -> list[Tensor]:
            nonlocal after
            leaves, after = pytree.tree_flatten(fn(*pytree.tree_unflatten(values, form)))
            return leaves

        name = self.name((what, form, kinds(values)))
        if (found := self._traced(name, str(what), lambda: (compiled(flat, values), after, 0))) is None:
            return fn(*args)
        return pytree.tree_unflatten(list(found[0](*values)), found[1])

    def _traced(self, name: str, what: str, make: Callable[[], Traced]) -> Traced | None:
        """What was traced under this name, or is now."""
        if name not in self.traces:
            try:
                self.traces[name] = make()
            except Exception as error:  # what vmap takes and a trace does not: a choice by the values, say
                log.info("%s is not traced: %s", what, first_line(error))
                self.traces[name] = None
        return self.traces[name]

    def step(
        self,
        exchange: Exchange,
        place: str,
        carry: list[Tensor],
        form: pytree.TreeSpec,
        batch: Any,
        numbers: Sequence[Tensor],
        lift: Lift,
        known: Known,
    ) -> tuple[list[Tensor], pytree.TreeSpec, Took]:
        """One step of a stack, and what each client spent on it. `known`: steps of this task, by what is quick to tell.
        The "only" step of a task is its first with its finish: a trace then leaves out what no reply needs.

        Once it has been used often the step is traced, and replayed from then on. How often is in the checkpoint: a
        resumed run makes the same choice, and so the same bits, as one that was never stopped.
        """
        drawn, drawn_form = pytree.tree_flatten(batch)
        values, oracle, after = [*carry, *drawn], Oracle(self.problem), form
        names = list(exchange.role.numbers)

        def bound(numbers: Sequence[Tensor]) -> tuple[Phase, Callable[..., Any]]:
            """The phase with its numbers, and the function of one client that is to be run."""
            role = exchange.role.with_numbers(dict(zip(names, numbers, strict=True)))
            step = role.step if place == "step" else role.first

            def one(*values: Tensor) -> Any:
                c, b = values[: len(carry)], values[len(carry) :]
                return step(pytree.tree_unflatten(c, form), oracle, pytree.tree_unflatten(b, drawn_form))

            return role, one

        def flat(*values: Tensor) -> list[Tensor]:
            nonlocal after
            oracle.gradients = 0  # a trace may take two passes
            role, one = bound(values[len(carry) + len(drawn) :])
            whole = (lambda *values: role.finish(one(*values))) if place == "only" else one
            leaves, after = pytree.tree_flatten(lift(whole)(*values[: len(carry) + len(drawn)]))
            return leaves

        def plainly() -> tuple[list[Tensor], pytree.TreeSpec, Took]:
            stepped = flat(*values, *numbers)
            return stepped, form if after == form else after, took._replace(gradients=oracle.gradients)

        key = (place, id(form), tuple((value.shape, value.stride()) for value in values))
        if key not in known:  # with its form, so that no other gets that id
            role, one = bound(numbers)
            name, took = self._use(exchange, place, one, values, (form, drawn_form))
            if place == "only":
                if name not in self.finishes:
                    stepped = single(one)(*(value[:1] for value in values))
                    self.finishes[name] = self.took(exchange, "finish", role.finish, stepped)
                took = took.then(self.finishes[name])
            known[key] = form, name, took
        _, name, took = known[key]
        large = not self.graphs and took.flops * len(values[0]) > TRACE_BELOW
        if self.mode == "loop" or large or (self.graphs and not self.graphs.recording):
            return plainly()
        if self.used(name) <= TRACE_FROM and not self.graphs:
            return plainly()
        blank = [] if self.graphs or place == "step" else [j for j, value in enumerate(carry) if _is_blank(value)]
        given = [*(value for j, value in enumerate(values) if j not in blank), *numbers]

        def filled(*given: Tensor) -> list[Tensor]:
            rest = iter(given)
            zeros = [torch.zeros(v.shape, dtype=v.dtype) if j in blank else next(rest) for j, v in enumerate(values)]
            return flat(*zeros, *rest)

        what, kind = f"phase {exchange.phase!r}", f"{name}{blank or ''}"
        if (found := self._traced(kind, what, lambda: (self.trace(filled, given), after, oracle.gradients))) is None:
            return plainly()
        run, after, gradients = found
        return list(run(*given)), after, took._replace(gradients=gradients)


def _is_blank(value: Tensor) -> bool:
    """Whether everyone starts with the same zeros, as of a sum: a trace then need not add to them."""
    return value.stride(0) == 0 and not bool(value[0].any())


def stacked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn, written for one client, over the leading axis of every tensor of its arguments."""

    def run(*args: Any) -> Any:
        values, form = pytree.tree_flatten(args)
        return vmap(lambda *values: fn(*pytree.tree_unflatten(values, form)))(*values)

    return run


def single(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a stack of one, without vmap."""

    def run(*args: Any) -> Any:
        return pytree.tree_map(lambda t: t.unsqueeze(0), fn(*pytree.tree_map(lambda t: t[0], args)))

    return run
