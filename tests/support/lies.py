"""Simulated clients that lie: what they reply is changed after it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fedbilevel.federation import Federation
from fedbilevel.federation.stacks import reply_at, stack_replies
from fedbilevel.federation.task import Results, Task

Values = dict[str, Any]
Lie = Callable[[Values], Values]


def scaled(factor: float) -> Lie:
    """A lie: every direction is this many times what it is."""

    def lie(values: Values) -> Values:
        def scale(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * factor if tensor.is_floating_point() else tensor

        return pytree.tree_map(scale, values)  # type: ignore[no-any-return]

    return lie


def let_lie(fed: Federation, client: int, lie: Lie) -> Federation:
    """Let a client of a simulation change what it replies."""
    executor = fed.transport.executor
    honest = executor.run

    def run(tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        for results in honest(tasks, sums=False):
            replies = [reply_at(results.values, j) for j in range(len(results.tasks))]
            for j, task in enumerate(results.tasks):
                if task.client == client:
                    replies[j] = lie(replies[j])
            yield results._replace(values=stack_replies(replies))

    executor.run = run
    return fed
