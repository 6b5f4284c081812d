"""Gather the inputs of a stack's program: messages, memories, keys and numbers as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import ClientData, Data
from fedbilevel.core.devices import constant, to_device
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.execution._batches import phase_batch_size
from fedbilevel.execution._features import embeds_before_steps
from fedbilevel.execution.client_memory import Memory
from fedbilevel.execution.stacked._batches import SideSizes, side_sizes
from fedbilevel.execution.stacked._samples import SampleStore, StackSamples
from fedbilevel.federation.task import Task, Values, group_by_broadcast


class StackInputs(NamedTuple):
    """The inputs of a stack's program: nested tensors and plain values.

    A program captured on a GPU is replayed with other tensors; everything else must be equal.
    """

    shared: Values  # the message that all clients received
    own: Values  # what each client alone received, stacked
    memory: Values  # what each client's phases remember, stacked
    client_part: Values  # of the values of the message, what each client owns, stacked
    steps: Tensor  # the number of steps of each client
    weights: Tensor | tuple[()]  # of the replies, if they are summed on the device
    keys: Tensor  # of each client's draws
    sizes: dict[str, SideSizes]
    starts: dict[str, Tensor]  # the row of a pool at which each client's samples begin
    lengths: list[int]  # numbers of steps, longest first
    features: dict[str, Data]
    numbers: Tensor  # the values of the phase's `Number` fields


class InputBuilder:
    """Builds the inputs of stacks.

    Args:
        problem: What is solved.
        sample_store: Finds the clients' samples.
        batch_size: Samples per mini-batch; None for the full batch.
        device: Where clients compute.
    """

    def __init__(
        self, problem: Problem, sample_store: SampleStore, batch_size: int | None, device: str
    ) -> None:
        self.problem = problem
        self.sample_store = sample_store
        self.batch_size = batch_size
        self.device = device
        self.on_gpu = device != "cpu"
        self.dtype = next(iter(problem.x.values())).dtype

    def build(
        self,
        tasks: list[Task],
        data: Sequence[ClientData],
        memories: Sequence[Memory],
        client_parts: Sequence[Values],
        sums: bool,
    ) -> tuple[StackInputs, StackSamples]:
        """Return the inputs of a stack's program, and the samples that it selects batches from.

        Args:
            tasks: The tasks of the stack, longest first.
            data: The data of each task's client.
            memories: What the phases of each client remember.
            client_parts: What each client owns of the values of the message.
            sums: Whether the server needs only the sum of the replies.
        """
        broadcast = tasks[0].broadcast
        phase = broadcast.phase
        steps = [task.steps for task in tasks]
        shared, own = self._messages(tasks)
        batch_size = phase_batch_size(phase, self.batch_size)
        sizes = side_sizes(data, phase.batch, batch_size, self.device)
        embed = embeds_before_steps(self.problem, broadcast, self.batch_size)
        samples = self.sample_store.find(tasks, data, sizes, steps[0] * phase.draws, embed)
        inputs = StackInputs(
            shared=shared,
            own=own,
            memory=stack_values(memories, self.tensor),
            client_part=stack_values(client_parts, self.tensor),
            steps=constant(tuple(steps), self.device, self.dtype),
            weights=self._weights(tasks) if sums else (),
            keys=to_device([task.key for task in tasks], self.device),
            sizes=sizes,
            starts={side: starts for side, (_, starts) in samples.pools.items()},
            lengths=self._lengths(steps),
            features=samples.features,
            numbers=constant(phase.numbers, self.device, self.dtype),
        )
        return inputs, samples

    def _lengths(self, steps: list[int]) -> list[int]:
        """Return the numbers of steps that a program depends on.

        On a GPU only the longest matters, and whether any is shorter, so that one captured program
        serves all stacks with the same longest task.
        """
        if not self.on_gpu:
            return steps
        longest = steps[0]
        shortest = longest if len(set(steps)) == 1 else 1
        return [longest, shortest]

    def _messages(self, tasks: list[Task]) -> tuple[Values, Values]:
        """Return what all clients were sent, and what each client alone was sent, stacked."""
        own = stack_values([dict(task.client_message) for task in tasks], self.tensor)
        rows = {broadcast: row for row, broadcast in enumerate(group_by_broadcast(tasks))}
        if len(rows) > 1:  # clients were sent different messages
            messages = stack_values([dict(broadcast.message) for broadcast in rows], self.tensor)
            row_of_task = [rows[task.broadcast] for task in tasks]
            return {}, {**pytree.tree_map(lambda tensor: tensor[row_of_task], messages), **own}
        shared = {}
        for name, value in tasks[0].broadcast.message.items():
            if isinstance(value, Tree):
                shared[name] = value
            else:
                shared[name] = pytree.tree_map_only(float, self.tensor, value)
        return shared, own

    def tensor(self, value: Tensor | float) -> Tensor:
        """Return a value as a tensor on the device; floats take the dtype of x."""
        if isinstance(value, float):
            return to_device(value, self.device, self.dtype)
        return to_device(value, self.device)

    def _weights(self, tasks: list[Task]) -> Tensor | tuple[()]:
        """Return the weights with which a GPU sums replies, or () if single replies are needed.

        They are needed where clients with different submodels of one size share a stack.
        """
        if not self.on_gpu or tasks[0].broadcast.remembers:
            return ()
        if len({task.broadcast.submodel for task in tasks}) > 1:
            return ()
        return constant(tuple(task.weight for task in tasks), self.device, torch.float64)


def stack_values(values: Sequence[Values], tensor: Callable[[Any], Tensor]) -> Values:
    """Stack nested values of equal structure and shapes along a new leading axis.

    Args:
        values: The values of each client.
        tensor: Turns a leaf into a tensor.
    """
    if not values[0]:
        return {}
    stacked: Values = pytree.tree_map(
        lambda *leaves: torch.stack([tensor(leaf) for leaf in leaves]), *values
    )
    return stacked
