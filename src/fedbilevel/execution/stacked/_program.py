"""What a stack of clients computes: from its inputs to its replies, or to their sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, Data
from fedbilevel.core.embedding import FeatureBatch
from fedbilevel.core.nests import flatten, unflatten
from fedbilevel.core.tree import nbytes
from fedbilevel.execution.client_memory import finish_task, join_message
from fedbilevel.execution.stacked._batches import SelectSamples, StackBatches
from fedbilevel.execution.stacked._feature_cache import select_features
from fedbilevel.execution.stacked._inputs import StackInputs
from fedbilevel.execution.stacked._samples import StackSamples
from fedbilevel.execution.stacked._steps import Flat, StackedStep, Start, StepRunner
from fedbilevel.execution.vectorize import ApplyToStack, Nested, vectorized
from fedbilevel.federation.kinds import reply_mismatch
from fedbilevel.federation.phase import Message, Phase
from fedbilevel.federation.stacks import sum_finite
from fedbilevel.federation.task import Broadcast, Sums, TaskCost, Values


class ProgramCosts(NamedTuple):
    """What the tasks of a stack cost, and what is wrong with replies that were summed."""

    by_steps: list[TaskCost]  # of a task with 0, 1, 2, ... steps
    reply_bytes: int
    mismatch: str | None = None


class StackProgram:
    """The program of a stack: a function of its inputs alone, so that a GPU can capture it.

    On a CPU the stack shrinks: step k runs on the clients that take more than k steps, who are the
    first of the stack. On a GPU a step runs on all clients, and those that are done keep their
    carry: a stack of constant size is worth more there than the work that shrinking saves.

    Args:
        step_runner: Runs and measures the steps.
        broadcast: That of any task; all have the same phase.
        apply: Applies a function of one client to the stack.
        samples: What batches are selected from.
        shrink: Whether the stack shrinks.
    """

    def __init__(
        self,
        step_runner: StepRunner,
        broadcast: Broadcast,
        apply: ApplyToStack,
        samples: StackSamples,
        shrink: bool,
    ) -> None:
        self.step_runner = step_runner
        self.broadcast = broadcast
        self.apply = apply
        self.samples = samples
        self.shrink = shrink

    def __call__(self, inputs: StackInputs) -> tuple[Values | Sums, ProgramCosts]:
        """Return the replies of the stack, or their sums, and what the tasks cost."""
        numbers = inputs.numbers.unbind()
        phase = self.broadcast.phase
        problem = self.step_runner.problem
        clients = inputs.keys.shape[0]
        batches = self._batches(phase, inputs)
        origin, cost = self._origin(numbers, inputs)
        costs = [cost]
        finished: list[Flat] = []
        longest = inputs.lengths[0]
        shortest = inputs.lengths[-1]
        carry: Flat = ([], None)
        for k in range(longest):
            active = clients
            if k > 0:
                if self.shrink:
                    carry = _set_aside_finished(carry, inputs.lengths, k, finished)
                origin = carry
                active = carry[0][0].shape[0]
            batch = batches.at(k, active)
            if inputs.features:
                batch = _as_features(batch)
            part = _part(k, longest)
            step = StackedStep(problem, phase, part, origin, batch, self.apply, self._finish_one)
            result, cost = self.step_runner.run_step(step, numbers)
            if not self.shrink and k >= shortest:
                result = _update_where(inputs.steps > k, result, carry[0])
            carry = result, step.result_form
            costs.append(costs[-1].then(cost)._replace(samples=batches.samples))
        if longest == 1:
            replies = unflatten(*carry)
        else:
            replies, finish_cost = self._finish(numbers, [carry, *reversed(finished)])
            costs = [cost.then(finish_cost) for cost in costs]
        program_costs = ProgramCosts(costs, self._reply_bytes(replies, clients))
        if not isinstance(inputs.weights, Tensor):
            return replies, program_costs
        mismatch = reply_mismatch(replies, phase.reply, problem, self.broadcast.submodel, clients)
        sums = self.step_runner.run_fused("sums", sum_finite, replies, inputs.weights, inputs.steps)
        return sums, program_costs._replace(mismatch=mismatch)

    def _batches(self, phase: Phase, inputs: StackInputs) -> StackBatches:
        return StackBatches(
            inputs.keys,
            inputs.sizes,
            self._selector(inputs),
            self.step_runner.run_fused,
            steps=inputs.lengths[0],
            draws=phase.draws,
            epochs=phase.epochs is not None,
            paired=self.step_runner.problem.lower_level == "private",
        )

    def _selector(self, inputs: StackInputs) -> SelectSamples:
        """Return a function that selects samples by side and indices."""

        def select(side: str, indices: Tensor | None) -> Data:
            if side in inputs.features:
                return select_features(inputs.features[side], indices)
            if side in self.samples.separate:
                return self.samples.separate[side].select(indices)
            pool, _ = self.samples.pools[side]
            return pool.select(indices, inputs.starts[side], inputs.sizes[side].largest)

        return select

    def _origin(
        self, numbers: Sequence[Tensor], inputs: StackInputs
    ) -> tuple[Start | Flat, TaskCost]:
        """Return what the first step starts from, and what it has cost a client.

        It is the message, so that the carry is made within the step, or the carry if the message
        has values other than tensors, which may be different each time.
        """

        problem = self.step_runner.problem

        def start(phase: Phase, shared: Values, stacked: tuple[Any, ...]) -> Nested:
            own, memory, client_part, steps = stacked
            remembered = {"memory": memory} if phase.remembers else {}
            values = join_message({**shared, **own}, client_part, self.broadcast, problem)
            return phase.start(Message(**values, **remembered, steps=steps))

        stacked = inputs.own, inputs.memory, inputs.client_part, inputs.steps
        leaves, form = flatten(inputs.shared)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) == len(leaves):
            return Start((leaves, form), flatten(stacked), start), TaskCost()
        # The shared message is an argument too, so that its bytes are counted.
        counted = [tensor.unsqueeze(0) for tensor in tensors]
        phase = self.broadcast.phase.with_numbers(numbers)
        run = functools.partial(start, phase, inputs.shared)
        cost, _ = self.step_runner.part_cost(
            phase, "start", lambda _, stacked: run(stacked), counted, stacked
        )
        return flatten(vectorized(run, self.apply)(stacked)), cost

    def _finish(self, numbers: Sequence[Tensor], carries: list[Flat]) -> tuple[Values, TaskCost]:
        """Return the replies to the final carries, joined, and what one of them costs."""
        phase = self.broadcast.phase.with_numbers(numbers)
        nested = [unflatten(*carry) for carry in carries]
        finish = functools.partial(self._finish_one, phase)
        cost, _ = self.step_runner.part_cost(phase, "finish", finish, nested[0])
        replies = [vectorized(finish, self.apply)(carry) for carry in nested]
        if len(replies) == 1:
            return replies[0], cost
        return pytree.tree_map(lambda *stacks: torch.cat(stacks), *replies), cost

    def _finish_one(self, phase: Phase, carry: Nested) -> Values:
        """Return the reply of one client, and what the client keeps."""
        return finish_task(phase, carry, self.broadcast, self.step_runner.problem)

    def _reply_bytes(self, replies: Values, clients: int) -> int:
        """Return the bytes of one reply, without the memory that stays with the client."""
        declared = self.broadcast.phase.reply
        sent = {name: value for name, value in replies.items() if name in declared}
        return nbytes(sent) // clients


def _set_aside_finished(carry: Flat, lengths: list[int], step: int, finished: list[Flat]) -> Flat:
    """Move the carries of clients that are done to `finished`; return those of the others."""
    tensors, form = carry
    active = sum(length > step for length in lengths)
    if active == tensors[0].shape[0]:
        return carry
    finished.append(([tensor[active:] for tensor in tensors], form))
    return [tensor[:active] for tensor in tensors], form


def _part(step: int, steps: int) -> str:
    if step > 0:
        return "step"
    if steps > 1:
        return "first"
    return "only"


def _as_features(batch: Batch | tuple[Batch, ...]) -> FeatureBatch | tuple[FeatureBatch, ...]:
    """Mark batches of embedded samples as such."""
    if isinstance(batch, Batch):
        return FeatureBatch(*batch)
    return tuple(FeatureBatch(*each) for each in batch)


def _update_where(active: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """Return the new values of active clients and the old ones of the others."""
    updated = []
    for new_tensor, old_tensor in zip(new, old, strict=True):
        mask = active.view(-1, *[1] * (new_tensor.ndim - 1))
        updated.append(torch.where(mask, new_tensor, old_tensor))
    return updated
