"""Run and measure the steps of a stack of clients; trace steps that run often.

The parts of a task are start, first, step and finish. What a part costs one client is measured
once, and kept by the shapes of its inputs. A step that has run often is traced and replayed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.nests import Form, flatten, unflatten
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs, signature
from fedbilevel.execution.stacked._trace import FlatFunction, compile_trace, trace
from fedbilevel.execution.vectorize import ApplyToStack, Nested, apply_to_one, vectorized
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.task import TaskCost, first_line

log = logging.getLogger("fedbilevel")

TRACE_FROM = 50  # uses of a step before it is traced: a trace costs about what it saves in so many
# Steps that are larger than this gain nothing from a trace.
TRACE_BELOW = 8e9  # floating-point operations of a stack, on a CPU
TRACE_CALLS = 1000  # PyTorch operations, on a GPU: each takes milliseconds to trace

Flat = tuple[list[Tensor], Form]  # nested values, flattened


class TracedStep(NamedTuple):
    """A traced function, the form of its result, and the gradients that it takes."""

    run: FlatFunction
    result_form: Form
    gradients: int


class KnownStep(NamedTuple):
    """What is known of steps whose inputs have the same shapes: what is found out only once."""

    name: str  # the same in every process
    cost: TaskCost  # of one client
    calls: int  # PyTorch operations


class Start(NamedTuple):
    """What the carry of a first step is made of, where that is part of the step.

    Attributes:
        shared: What all clients received, flat and with its form; tensors only.
        own: What each client received and remembers, and its number of steps, as a stack.
        run: Makes the carry of one client: (phase, shared, own) -> carry.
    """

    shared: Flat
    own: Flat
    run: Callable[[Phase, Nested, Nested], Nested]


class StackedStep:
    """One step of a stack of clients, as a function of flat tensors.

    Args:
        problem: What is solved.
        phase: Whose step it is.
        part: "first", "step", or "only": the single step of a task together with its `finish`, so
            that a trace leaves out what the reply does not need.
        origin: The carry, or what it is made of.
        batch: A batch, or a tuple of batches.
        apply: Applies a function of one client to the stack.
        finish: Turns the phase and the last carry of one client into what the task returns.

    Attributes:
        inputs: The tensors that all clients share, then those of the stack: of the carry, or of
            what it is made of, and of the batch.
        result_form: The form of the result, once the step has run.
    """

    def __init__(
        self,
        problem: Problem,
        phase: Phase,
        part: str,
        origin: Start | Flat,
        batch: Nested,
        apply: ApplyToStack,
        finish: Callable[[Phase, Nested], Nested],
    ) -> None:
        self.finish = finish
        self.oracle = Oracle(problem)
        self.phase = phase
        self.part = part
        self.apply = apply
        self.start: Start | None = None
        shared: Flat = flatten({})
        if isinstance(origin, Start):
            self.start = origin
            shared, stacks, _ = origin
        else:
            stacks = origin
        batch_tensors, batch_form = flatten(batch)
        self.shared_count = len(shared[0])
        self.stack_count = len(stacks[0])
        self.inputs = [*shared[0], *stacks[0], *batch_tensors]
        self.forms = shared[1], stacks[1], batch_form
        self.result_form: Form = None

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Take the step for the whole stack.

        Args:
            *tensors: In the order of `inputs`, then the numbers of the phase.

        Returns:
            The tensors of the next carry, or of the reply if `part` is "only".
        """
        self.oracle.gradients = 0
        shared = tensors[: self.shared_count]
        stacks = tensors[self.shared_count : len(self.inputs)]
        numbers = tensors[len(self.inputs) :]
        for_one = functools.partial(self._run_one, self.phase.with_numbers(numbers), shared)
        result, self.result_form = flatten(self.apply(for_one, stacks))
        return result

    def _run_one(self, phase: Phase, shared: Sequence[Tensor], *inputs: Tensor) -> Nested:
        shared_form, stack_form, batch_form = self.forms
        carry = unflatten(inputs[: self.stack_count], stack_form)
        if self.start:
            carry = self.start.run(phase, unflatten(shared, shared_form), carry)
        batch = unflatten(inputs[self.stack_count :], batch_form)
        carry = self.step_one(phase, carry, batch)
        if self.part == "only":
            return self.finish(phase, carry)
        return carry

    def nested_inputs(self) -> tuple[Nested, Nested, Nested]:
        """Return what all clients share, and the stacks: the carry, or its origin; the batch."""
        shared = self.inputs[: self.shared_count]
        stacks = self.inputs[self.shared_count :]
        shared_form, stack_form, batch_form = self.forms
        return (
            unflatten(shared, shared_form),
            unflatten(stacks, stack_form),
            unflatten(stacks[self.stack_count :], batch_form),
        )

    def step_one(self, phase: Phase, carry: Nested, batch: Nested) -> Nested:
        """Take the step for one client, without `start` and without the `finish` of an "only"."""
        if self.part == "step":
            return phase.step(carry, self.oracle, batch)
        return phase.first(carry, self.oracle, batch)


class StepRunner:
    """Runs and measures the parts of tasks.

    On a CPU, a step is traced once it has run `TRACE_FROM` times. On a GPU, a step is traced while
    its task is captured as a CUDA graph, and otherwise runs as it is written.

    Args:
        problem: What is solved.
        graphs: The CUDA graphs of a GPU; None on a CPU.

    Attributes:
        measured: floating-point operations and peak bytes of each part for one client, by name.
        calls: The number of PyTorch operations of each part, by name.
        uses: How often each step or task ran, by name.
        traces: Traced functions, by name; None for one that cannot be traced.
        compiling: Whether the present task goes through PyTorch's compiler.
    """

    def __init__(self, problem: Problem, graphs: CudaGraphs | None) -> None:
        self.problem = problem
        self.graphs = graphs
        self.compiling = False
        self.measured: dict[str, tuple[int, int]] = {}
        self.calls: dict[str, int] = {}
        self.uses: dict[str, int] = {}
        self.traces: dict[str, TracedStep | None] = {}
        self._names: dict[Hashable, str] = {}
        self._known: dict[Hashable, KnownStep] = {}

    def mark(self) -> dict[str, Any]:
        """Return what determines which steps are traced: a traced step rounds differently."""
        return {
            "measured": dict(self.measured),
            "calls": dict(self.calls),
            "uses": dict(self.uses),
        }

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Return to the state at the mark; traces are kept."""
        self.measured = dict(mark.get("measured", {}))
        self.calls = dict(mark.get("calls", {}))
        self.uses = dict(mark.get("uses", {}))
        self._known = {}

    def count_use(self, name: str) -> int:
        """Count one more use; return the uses so far."""
        self.uses[name] = self.uses.get(name, 0) + 1
        return self.uses[name]

    def name(self, key: Hashable) -> str:
        """Return a short name for a key, the same in every process."""
        if key not in self._names:
            self._names[key] = blake2b(repr(key).encode(), digest_size=8).hexdigest()
        return self._names[key]

    def part_cost(
        self, phase: Phase, part: str, fn: Callable[..., Nested], *args: Nested
    ) -> tuple[TaskCost, int]:
        """Return what a part of a task, fn(*args), costs one client of a stack.

        It is measured once, on the first client of the stack alone: a stack holds more than its
        clients would, and a trace leaves out what is computed for nothing.

        Returns:
            The cost, and the number of PyTorch operations.
        """
        tensors, form = flatten(args)
        shapes = tuple([(tensor.shape[1:], tensor.dtype) for tensor in tensors])
        name = self.name((phase.structure, part, form, shapes))
        if name not in self.measured:
            first_client = [tensor[:1] for tensor in tensors]
            with Meter() as meter:
                apply_to_one(lambda *tensors: fn(*unflatten(tensors, form)), first_client)
            self.measured[name] = (meter.flops, nbytes(first_client) + meter.peak_bytes)
            self.calls[name] = meter.calls
        flops, peak_bytes = self.measured[name]
        return TaskCost(flops=flops, peak_bytes=peak_bytes), self.calls.get(name, 0)

    def run_fused(self, label: Hashable, fn: Callable[..., Nested], *args: Nested) -> Nested:
        """Return fn(*args), compiled if the task is being captured for a compiled run.

        Compiling merges many small kernels into few.

        Args:
            label: Identifies fn; it must depend on nothing but the label and its arguments.
            fn: A function of nested tensors.
            *args: Its arguments.
        """
        if not (self.compiling and self.graphs and self.graphs.capturing):
            return fn(*args)
        tensors, form = flatten(args)
        result_form = form

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result_form
            result, result_form = flatten(fn(*unflatten(tensors, form)))
            return result

        def compile_flat() -> TracedStep:
            run = self._trace(flat, tensors)
            return TracedStep(run, result_form, gradients=0)

        name = self.name((label, form, signature(tensors)))
        traced = self._find_or_trace(name, str(label), compile_flat)
        if traced is None:
            return fn(*args)
        return unflatten(traced.run(*tensors), traced.result_form)

    def _find_or_trace(
        self, name: str, what: str, make: Callable[[], TracedStep]
    ) -> TracedStep | None:
        """Return the trace of this name, which is made if there is none; None if it cannot be."""
        if self.compiling:
            name = f"compiled {name}"
        if name not in self.traces:
            try:
                self.traces[name] = make()
            except Exception as error:  # such as a branch on a value, which `vmap` may allow
                log.info("%s is not traced: %s", what, first_line(error))
                self.traces[name] = None
        return self.traces[name]

    def _trace(self, fn: FlatFunction, args: Sequence[Tensor]) -> FlatFunction:
        if self.compiling:
            try:
                return compile_trace(fn, args)
            except Exception as error:  # such as a compiler that finds no C compiler
                log.warning("steps run without PyTorch's compiler: %s", first_line(error))
        return trace(fn, args)

    def run_step(
        self, step: StackedStep, numbers: Sequence[Tensor]
    ) -> tuple[list[Tensor], TaskCost]:
        """Take one step of a stack.

        A step that has been used often is traced, and replayed from then on. The uses are in the
        checkpoint, so that a resumed run traces the same steps and computes the same bits.

        Args:
            step: The step.
            numbers: The numbers of its phase.

        Returns:
            The tensors of the result, and what each client spent.
        """
        known = self._known_step(step, numbers)
        traced = None
        if self._is_replayed(known, clients=step.inputs[-1].shape[0]):
            traced = self._find_or_trace(
                known.name, f"phase {step.phase.name!r}", lambda: self._trace_step(step, numbers)
            )
        if traced is None:
            result = step.run(*step.inputs, *numbers)
            return result, known.cost._replace(gradients=step.oracle.gradients)
        step.result_form = traced.result_form
        result = list(traced.run(*step.inputs, *numbers))
        return result, known.cost._replace(gradients=traced.gradients)

    def _known_step(self, step: StackedStep, numbers: Sequence[Tensor]) -> KnownStep:
        """Return what is known of steps with inputs of these shapes."""
        shapes = tuple([(each.shape, each.stride(), each.dtype) for each in step.inputs])
        key = (step.phase.structure, step.part, step.forms, shapes)
        if key not in self._known:
            self._known[key] = KnownStep(self.name(key), *self._step_cost(step, numbers))
        return self._known[key]

    def _step_cost(self, step: StackedStep, numbers: Sequence[Tensor]) -> tuple[TaskCost, int]:
        """Return the cost of a step, as `part_cost` does; each of its parts is measured alone."""
        phase = step.phase.with_numbers(numbers)
        cost = TaskCost()
        shared, carry, batch = step.nested_inputs()
        if step.start:
            start = functools.partial(step.start.run, phase)
            args = pytree.tree_map(lambda tensor: tensor.unsqueeze(0), shared), carry
            cost, _ = self.part_cost(phase, "start", start, *args)
            carry = vectorized(start, apply_to_one)(*args)
        take_step = functools.partial(step.step_one, phase)
        step_cost, calls = self.part_cost(phase, step.part, take_step, carry, batch)
        cost = cost.then(step_cost)
        if step.part == "only":
            carry = vectorized(take_step, apply_to_one)(carry, batch)
            finish = functools.partial(step.finish, phase)
            finish_cost, _ = self.part_cost(phase, "finish", finish, carry)
            cost = cost.then(finish_cost)
        return cost, calls

    def _is_replayed(self, known: KnownStep, clients: int) -> bool:
        """Tell whether a step of so many clients runs from a trace this time."""
        if self.graphs:
            return self.graphs.capturing and known.calls <= TRACE_CALLS
        if known.cost.flops * clients > TRACE_BELOW:
            return False
        return self.count_use(known.name) > TRACE_FROM

    def _trace_step(self, step: StackedStep, numbers: Sequence[Tensor]) -> TracedStep:
        traced = self._trace(step.run, [*step.inputs, *numbers])
        return TracedStep(traced, step.result_form, step.oracle.gradients)
