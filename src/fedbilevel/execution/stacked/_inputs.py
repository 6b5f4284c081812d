"""What the program of a stack is given: messages, memories, keys and numbers as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.devices import constant, sent
from fedbilevel.core.problem import ClientData, Problem
from fedbilevel.core.tree import Tree
from fedbilevel.execution._features import embeds_beforehand
from fedbilevel.execution.stacked._batches import extents
from fedbilevel.execution.stacked._program import Given
from fedbilevel.execution.stacked._samples import Samples, Source
from fedbilevel.federation.task import Task, by_broadcast


class Inputs:
    """Gathers the inputs of stacks. storage: where their samples lie."""

    def __init__(
        self, problem: Problem, storage: Samples, batch_size: int | None, device: str
    ) -> None:
        self.problem = problem
        self.storage = storage
        self.batch_size = batch_size
        self.device = device
        self.on_gpu = device != "cpu"
        self.dtype = next(iter(problem.x.values())).dtype

    def gather(
        self,
        tasks: list[Task],
        data: Sequence[ClientData],
        memory: list[dict[str, Any]],
        sums: bool,
    ) -> tuple[Given, Source]:
        """What the program of a stack is given, and where it finds its samples."""
        broadcast = tasks[0].broadcast
        phase = broadcast.phase
        lengths = [task.steps for task in tasks]
        shared, own = self._messages(tasks)
        held = extents(data, phase.batch, None if phase.full else self.batch_size, self.device)
        embed = embeds_beforehand(self.problem, broadcast, self.batch_size)
        source = self.storage.source(tasks, data, held, lengths[0] * phase.draws, embed)
        if self.on_gpu:  # a recording holds for all stacks of one longest task
            lengths = [lengths[0], lengths[0] if len(set(lengths)) == 1 else 1]
        given = {
            "shared": shared,
            "own": own,
            "memory": stacked_values(memory, self.tensor),
            "steps": constant(tuple(task.steps for task in tasks), self.device, self.dtype),
            "weights": self._weights(tasks) if sums else (),
            "keys": sent([task.key for task in tasks], self.device),
            "extents": held,
            "starts": {side: starts for side, (_, starts) in source.pools.items()},
            "lengths": lengths,
            "features": source.features,
            "numbers": constant(tuple(phase.numbers.values()), self.device, self.dtype),
        }
        return given, source

    def _messages(self, tasks: list[Task]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What everyone was sent, and what each client alone was, as a stack."""
        own = stacked_values([dict(task.own) for task in tasks], self.tensor)
        places = {broadcast: place for place, broadcast in enumerate(by_broadcast(tasks))}
        if len(places) > 1:  # not everyone was sent the same
            messages = stacked_values(
                [dict(broadcast.message) for broadcast in places], self.tensor
            )
            rows = [places[task.broadcast] for task in tasks]
            return {}, {**pytree.tree_map(lambda t: t[rows], messages), **own}
        shared = {}
        for name, value in tasks[0].broadcast.message.items():
            shared[name] = (
                value
                if isinstance(value, Tree)
                else pytree.tree_map_only(float, self.tensor, value)
            )
        return shared, own

    def tensor(self, value: Any) -> Tensor:
        return sent(value, self.device, self.dtype if isinstance(value, float) else None)

    def _weights(self, tasks: list[Task]) -> Tensor | tuple[()]:
        """With which replies are added up on a GPU; none if they are looked at one by one."""
        broadcast = tasks[0].broadcast
        if not self.on_gpu or broadcast.remembers or broadcast.submodel:
            return ()
        return constant(tuple(task.weight for task in tasks), self.device, torch.float64)


def stacked_values(values: list[dict[str, Any]], tensor: Callable[[Any], Tensor]) -> dict[str, Any]:
    """Values of one form as one, with a leading axis."""
    if not values[0]:
        return {}
    return pytree.tree_map(lambda *each: torch.stack([tensor(value) for value in each]), *values)  # type: ignore[no-any-return]
