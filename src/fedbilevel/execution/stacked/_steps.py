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

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs, signature
from fedbilevel.execution.stacked._trace import FlatFunction, compile_trace, trace
from fedbilevel.execution.vectorize import ApplyToStack, Nested, apply_to_one
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.task import TaskCost, first_line

log = logging.getLogger("fedbilevel")

TRACE_FROM = 50  # uses of a step before it is traced: a trace costs about what it saves in so many
# Steps that are larger than this gain nothing from a trace.
TRACE_BELOW = 8e9  # floating-point operations of a stack, on a CPU
TRACE_CALLS = 1000  # PyTorch operations, on a GPU: each takes milliseconds to trace

# The name and cost of each step of one task, by what is quick to compare. The structure of the
# carry is kept too, so that its id is not reused.
KnownSteps = dict[Hashable, tuple[pytree.TreeSpec, str, TaskCost]]


class TracedStep(NamedTuple):
    """A traced function, the structure of its result, and the gradients that it takes."""

    run: FlatFunction
    result_spec: pytree.TreeSpec
    gradients: int


class StackedStep:
    """One step of a stack of clients, as a function of flat tensors.

    Args:
        problem: What is solved.
        phase: Whose step it is.
        part: "first", "step", or "only": the single step of a task together with its `finish`, so
            that a trace leaves out what the reply does not need.
        carry: The tensors of the carry.
        carry_spec: The structure of the carry.
        batch: A batch, or a tuple of batches.
        apply: Applies a function of one client to the stack.
        finish: Turns the phase and the last carry of one client into what the task returns.

    Attributes:
        inputs: The tensors of the carry, then those of the batch.
        result_spec: The structure of the result, once the step has run.
    """

    def __init__(
        self,
        problem: Problem,
        phase: Phase,
        part: str,
        carry: Sequence[Tensor],
        carry_spec: pytree.TreeSpec,
        batch: Nested,
        apply: ApplyToStack,
        finish: Callable[[Phase, Nested], Nested],
    ) -> None:
        self.finish = finish
        self.oracle = Oracle(problem)
        self.phase = phase
        self.part = part
        self.carry_spec = carry_spec
        self.apply = apply
        self.carry_count = len(carry)
        batch_tensors, self.batch_spec = pytree.tree_flatten(batch)
        self.inputs = [*carry, *batch_tensors]
        self.result_spec = carry_spec

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Take the step for the whole stack.

        Args:
            *tensors: In the order of `inputs`, then the numbers of the phase.

        Returns:
            The tensors of the next carry, or of the reply if `part` is "only".
        """
        self.oracle.gradients = 0  # tracing may run the function twice
        inputs = tensors[: len(self.inputs)]
        numbers = tensors[len(self.inputs) :]
        for_one = functools.partial(self._run_one, self.with_numbers(numbers))
        result, spec = pytree.tree_flatten(self.apply(for_one, inputs))
        # An equal structure is replaced by the same object, because objects are compared by id.
        self.result_spec = self.carry_spec if spec == self.carry_spec else spec
        return result

    def with_numbers(self, numbers: Sequence[Tensor]) -> Phase:
        """Return the phase with tensors in place of its numbers."""
        return self.phase.with_numbers(dict(zip(self.phase.numbers, numbers, strict=True)))

    def _run_one(self, phase: Phase, *inputs: Tensor) -> Nested:
        carry = self.step_one(phase, *inputs)
        if self.part == "only":
            return self.finish(phase, carry)
        return carry

    def step_one(self, phase: Phase, *inputs: Tensor) -> Nested:
        """Take the step for one client, without the `finish` of an "only" step."""
        carry = pytree.tree_unflatten(inputs[: self.carry_count], self.carry_spec)
        batch = pytree.tree_unflatten(inputs[self.carry_count :], self.batch_spec)
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
        self._part_names: dict[Hashable, tuple[str, str]] = {}  # for a stack, for one client
        self._finish_costs: dict[str, TaskCost] = {}  # of the finish after an "only" step

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
        self._finish_costs = {}

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
    ) -> TaskCost:
        """Return what a part of a task, fn(*args), costs one client of a stack."""
        tensors, spec = pytree.tree_flatten(args)

        def flat(*tensors: Tensor) -> Nested:
            return fn(*pytree.tree_unflatten(tensors, spec))

        _, cost = self._name_and_cost(phase, part, flat, tensors, spec)
        return cost

    def _name_and_cost(
        self,
        phase: Phase,
        part: str,
        fn: Callable[..., Nested],
        inputs: list[Tensor],
        spec: Hashable,
    ) -> tuple[str, TaskCost]:
        """Return a name for a part with inputs of these shapes, and what it costs one client.

        The cost is measured on the first client of the stack alone, once. A stack holds more than
        its clients would, and a trace leaves out what is computed for nothing.
        """
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        key = (phase.structure, part, spec, shapes)
        if key not in self._part_names:
            client_shapes = tuple((tensor.shape[1:], tensor.dtype) for tensor in inputs)
            client_key = (phase.structure, part, spec, client_shapes)
            self._part_names[key] = self.name(key), self.name(client_key)
        name, client_name = self._part_names[key]
        if client_name not in self.measured:
            first_client = [tensor[:1] for tensor in inputs]
            with Meter() as meter:
                apply_to_one(fn, first_client)
            self.measured[client_name] = (meter.flops, nbytes(first_client) + meter.peak_bytes)
            self.calls[name] = meter.calls
        flops, peak_bytes = self.measured[client_name]
        return name, TaskCost(flops=flops, peak_bytes=peak_bytes)

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
        tensors, spec = pytree.tree_flatten(args)
        result_spec = spec

        def flat(*tensors: Tensor) -> list[Tensor]:
            nonlocal result_spec
            result, result_spec = pytree.tree_flatten(fn(*pytree.tree_unflatten(tensors, spec)))
            return result

        def compile_flat() -> TracedStep:
            run = self._trace(flat, tensors)
            return TracedStep(run, result_spec, gradients=0)

        name = self.name((label, spec, signature(tensors)))
        traced = self._find_or_trace(name, str(label), compile_flat)
        if traced is None:
            return fn(*args)
        return pytree.tree_unflatten(list(traced.run(*tensors)), traced.result_spec)

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
        self, step: StackedStep, numbers: Sequence[Tensor], known: KnownSteps
    ) -> tuple[list[Tensor], TaskCost]:
        """Take one step of a stack.

        A step that has been used often is traced, and replayed from then on. The uses are in the
        checkpoint, so that a resumed run traces the same steps and computes the same bits.

        Args:
            step: The step.
            numbers: The numbers of its phase.
            known: Names and costs of steps of this task; new ones are added.

        Returns:
            The tensors of the result, and what each client spent.
        """
        name, cost = self._step_cost(step, numbers, known)
        replayed = None
        if self._is_replayed(name, step, cost):
            replayed = self._replay(step, numbers, name)
        if replayed is None:
            result = step.run(*step.inputs, *numbers)
            return result, cost._replace(gradients=step.oracle.gradients)
        result, gradients = replayed
        return result, cost._replace(gradients=gradients)

    def _step_cost(
        self, step: StackedStep, numbers: Sequence[Tensor], known: KnownSteps
    ) -> tuple[str, TaskCost]:
        shapes = tuple((tensor.shape, tensor.stride()) for tensor in step.inputs)
        key = (step.part, id(step.carry_spec), shapes)
        if key not in known:
            phase = step.with_numbers(numbers)
            for_one = functools.partial(step.step_one, phase)
            specs = (step.carry_spec, step.batch_spec)
            name, cost = self._name_and_cost(phase, step.part, for_one, step.inputs, specs)
            if step.part == "only":
                if name not in self._finish_costs:
                    carry = apply_to_one(for_one, [tensor[:1] for tensor in step.inputs])
                    finish = functools.partial(step.finish, phase)
                    finish_cost = self.part_cost(phase, "finish", finish, carry)
                    self._finish_costs[name] = finish_cost
                cost = cost.then(self._finish_costs[name])
            known[key] = step.carry_spec, name, cost
        _, name, cost = known[key]
        return name, cost

    def _is_replayed(self, name: str, step: StackedStep, cost: TaskCost) -> bool:
        """Tell whether a step runs from a trace this time."""
        if self.graphs:
            return self.graphs.capturing and self.calls.get(name, 0) <= TRACE_CALLS
        clients = len(step.inputs[0])
        if cost.flops * clients > TRACE_BELOW:
            return False
        return self.count_use(name) > TRACE_FROM

    def _replay(
        self, step: StackedStep, numbers: Sequence[Tensor], name: str
    ) -> tuple[list[Tensor], int] | None:
        """Run a step from its trace; return its result and gradients, or None if it has no trace.

        On a CPU, the first step's carry often contains sums that start from 0. Those zeros are part
        of the trace instead of inputs, so that nothing is added to them.
        """
        zeros: list[int] = []
        if not self.graphs and step.part != "step":
            zeros = [j for j in range(step.carry_count) if _is_shared_zero(step.inputs[j])]
        inputs = [tensor for j, tensor in enumerate(step.inputs) if j not in zeros]
        inputs.extend(numbers)

        def run(*inputs: Tensor) -> list[Tensor]:
            remaining = iter(inputs)
            tensors = []
            for j, tensor in enumerate(step.inputs):
                if j in zeros:
                    tensors.append(torch.zeros(tensor.shape, dtype=tensor.dtype))
                else:
                    tensors.append(next(remaining))
            return step.run(*tensors, *remaining)

        def make() -> TracedStep:
            traced = self._trace(run, inputs)
            return TracedStep(traced, step.result_spec, step.oracle.gradients)

        traced = self._find_or_trace(f"{name}{zeros or ''}", f"phase {step.phase.name!r}", make)
        if traced is None:
            return None
        step.result_spec = traced.result_spec
        return list(traced.run(*inputs)), traced.gradients


def _is_shared_zero(tensor: Tensor) -> bool:
    """Tell whether all clients start with the same zeros, as `expand` makes them."""
    return tensor.stride(0) == 0 and not bool(tensor[0].any())
