"""The parts of tasks as they run: each kind is measured once, and a step that is used often is traced."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.lift import Lift, single
from fedbilevel.execution.stacked._graphs import Graphs, kinds
from fedbilevel.execution.stacked._trace import Flat, compiled, trace
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.task import TaskCost, first_line

log = logging.getLogger("fedbilevel")

TRACE_FROM = 50  # uses of a step; a trace costs about as much as it saves in that many
TRACE_BELOW = (
    8e9  # operations of a stack on a CPU: a step of more spends its time on those, traced or not
)

Traced = tuple[
    Flat, pytree.TreeSpec, int
]  # with the form of its result, and how many gradients it takes
Known = dict[Hashable, tuple[pytree.TreeSpec, str, TaskCost]]


class StepCall:
    """One step of a stack as a function of flat tensors: those of the carry, of the batch, then the phase's numbers.

    part: "first" or "step", or "only", the first step of a task of one step with its finish, so that a trace leaves
    out what no reply needs.
    """

    def __init__(
        self,
        problem: Problem,
        phase: Phase,
        part: str,
        carry: Sequence[Tensor],
        form: pytree.TreeSpec,
        batch: Any,
        lift: Lift,
    ) -> None:
        self.oracle = Oracle(problem)
        self.phase = phase
        self.part = part
        self.form = form
        self.lift = lift
        self.carried = len(carry)
        drawn, self.batch_form = pytree.tree_flatten(batch)
        self.values = [*carry, *drawn]
        self.after = form  # the form of the result, once it has run

    def flat(self, *values: Tensor) -> list[Tensor]:
        """The whole stack."""
        self.oracle.gradients = 0  # a trace may take two passes
        stacked = values[: len(self.values)]
        numbers = values[len(self.values) :]
        leaves, after = pytree.tree_flatten(
            self.lift(functools.partial(self.one, self.bound(numbers)), stacked)
        )
        self.after = self.form if after == self.form else after
        return leaves

    def bound(self, numbers: Sequence[Tensor]) -> Phase:
        return self.phase.with_numbers(dict(zip(self.phase.numbers, numbers, strict=True)))

    def one(self, phase: Phase, *values: Tensor) -> Any:
        """One client."""
        stepped = self.one_step(phase, *values)
        return phase.finish(stepped) if self.part == "only" else stepped

    def one_step(self, phase: Phase, *values: Tensor) -> Any:
        """One client, without the finish that an "only" step ends with."""
        carry = pytree.tree_unflatten(values[: self.carried], self.form)
        batch = pytree.tree_unflatten(values[self.carried :], self.batch_form)
        step = phase.step if self.part == "step" else phase.first
        return step(carry, self.oracle, batch)


class Parts:
    """Runs and measures the parts of tasks.

    graphs: of a GPU, where a step is traced while it is recorded and runs as it is written otherwise; None on a CPU.
    """

    def __init__(self, problem: Problem, graphs: Graphs | None, compile_: bool) -> None:
        self.problem = problem
        self.graphs = graphs
        self.compile = compile_
        self.trace = compiled if compile_ else trace
        self.measured: dict[
            str, tuple[int, int]
        ] = {}  # operations and bytes of each kind of part, for one client
        self.uses: dict[str, int] = {}  # of each kind of part, by a stack of one size
        self.names: dict[Hashable, str] = {}
        self.parts: dict[
            Hashable, tuple[str, str]
        ] = {}  # the names of a part: of a stack's, of a client's
        self.finishes: dict[str, TaskCost] = {}  # what a finish takes after a step
        self.traces: dict[str, Traced | None] = {}  # None: it cannot be traced

    def mark(self) -> dict[str, Any]:
        # Traces round differently: a resumed run must trace the same steps.
        return {"measured": dict(self.measured), "uses": dict(self.uses)}

    def back(self, mark: Mapping[str, Any]) -> None:
        self.measured = dict(mark.get("measured", {}))
        self.uses = dict(mark.get("uses", {}))
        self.finishes = {}

    def used(self, name: str) -> int:
        """How often, this time included."""
        self.uses[name] = self.uses.get(name, 0) + 1
        return self.uses[name]

    def name(self, key: Hashable) -> str:
        """A short name, the same in every process."""
        if key not in self.names:
            self.names[key] = blake2b(repr(key).encode(), digest_size=8).hexdigest()
        return self.names[key]

    def cost(self, phase: Phase, part: str, fn: Callable[..., Any], *args: Any) -> TaskCost:
        """What a part of a task costs one client of a stack."""
        values, form = pytree.tree_flatten(args)

        def flat(*values: Tensor) -> Any:
            return fn(*pytree.tree_unflatten(values, form))

        return self._identify(phase, part, flat, values, form)[1]

    def _identify(
        self, phase: Phase, part: str, fn: Callable[..., Any], values: list[Tensor], form: Hashable
    ) -> tuple[str, TaskCost]:
        """The name of a part of a task, by its shapes, and what it costs one client.

        The cost is measured once, by running the first client of the stack alone: a stack holds more than its clients
        would, and a trace leaves out what is computed for nothing.
        """
        shapes = tuple((value.shape, value.stride(), value.dtype) for value in values)
        key = (phase.structure, part, form, shapes)
        if key not in self.parts:
            one = (*key[:3], tuple((value.shape[1:], value.dtype) for value in values))
            self.parts[key] = self.name(key), self.name(one)
        name, kind = self.parts[key]
        if kind not in self.measured:
            alone = [value[:1] for value in values]
            with Meter() as meter:
                single(fn, alone)
            self.measured[kind] = (meter.flops, nbytes(alone) + meter.peak_bytes)
        flops, peak_bytes = self.measured[kind]
        return name, TaskCost(flops=flops, peak_bytes=peak_bytes)

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
        found = self._traced(name, str(what), lambda: (compiled(flat, values), after, 0))
        if found is None:
            return fn(*args)
        return pytree.tree_unflatten(list(found[0](*values)), found[1])

    def _traced(self, name: str, what: str, make: Callable[[], Traced]) -> Traced | None:
        """What was traced under this name, or is now."""
        if name not in self.traces:
            try:
                self.traces[name] = make()
            except (
                Exception
            ) as error:  # what vmap takes and a trace does not: a choice by the values, say
                log.info("%s is not traced: %s", what, first_line(error))
                self.traces[name] = None
        return self.traces[name]

    def step(
        self, call: StepCall, numbers: Sequence[Tensor], known: Known
    ) -> tuple[list[Tensor], TaskCost]:
        """One step of a stack, and what each client spent on it. known: steps of this task, by what is quick to tell.

        Once it has been used often the step is traced, and replayed from then on. How often is in the checkpoint: a
        resumed run makes the same choice, and so the same bits, as one that was never stopped.
        """
        name, cost = self._step_cost(call, numbers, known)
        found = self._replay(call, numbers, name) if self._replays(name, call, cost) else None
        if found is None:
            stepped = call.flat(*call.values, *numbers)
            return stepped, cost._replace(gradients=call.oracle.gradients)
        run, call.after, gradients = found
        return list(run()), cost._replace(gradients=gradients)

    def _step_cost(
        self, call: StepCall, numbers: Sequence[Tensor], known: Known
    ) -> tuple[str, TaskCost]:
        key = (
            call.part,
            id(call.form),
            tuple((value.shape, value.stride()) for value in call.values),
        )
        if key not in known:
            phase = call.bound(numbers)
            one = functools.partial(call.one_step, phase)
            name, cost = self._identify(
                phase, call.part, one, call.values, (call.form, call.batch_form)
            )
            if call.part == "only":
                if name not in self.finishes:
                    stepped = single(one, [value[:1] for value in call.values])
                    self.finishes[name] = self.cost(phase, "finish", phase.finish, stepped)
                cost = cost.then(self.finishes[name])
            known[key] = call.form, name, cost  # with its form, so that no other gets that id
        _, name, cost = known[key]
        return name, cost

    def _replays(self, name: str, call: StepCall, cost: TaskCost) -> bool:
        """Whether this use of a step is to be a replayed one."""
        if self.graphs:
            return self.graphs.recording
        if cost.flops * len(call.values[0]) > TRACE_BELOW:
            return False
        return self.used(name) > TRACE_FROM

    def _replay(self, call: StepCall, numbers: Sequence[Tensor], name: str) -> Any:
        """A trace of the step, ready to run; None if it cannot be traced."""
        blank: list[int] = []
        if not self.graphs and call.part != "step":
            blank = [j for j in range(call.carried) if _is_blank(call.values[j])]
        given = [*(value for j, value in enumerate(call.values) if j not in blank), *numbers]

        def filled(*given: Tensor) -> list[Tensor]:
            rest = iter(given)
            whole = [
                torch.zeros(v.shape, dtype=v.dtype) if j in blank else next(rest)
                for j, v in enumerate(call.values)
            ]
            return call.flat(*whole, *rest)

        def make() -> Traced:
            return self.trace(filled, given), call.after, call.oracle.gradients

        found = self._traced(f"{name}{blank or ''}", f"phase {call.phase.name!r}", make)
        if found is None:
            return None
        run, after, gradients = found
        return functools.partial(run, *given), after, gradients


def _is_blank(value: Tensor) -> bool:
    """Whether everyone starts with the same zeros, as of a sum: a trace then need not add to them."""
    return value.stride(0) == 0 and not bool(value[0].any())
