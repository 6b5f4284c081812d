"""Outcomes of simulated tasks: how long each takes, and whether it is lost, doubled or corrupted.

A task that would end after the deadline of an `ask` is lost: `OutcomeSampler.draw_outcomes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.rng import fold_in, root, subset
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import Results, Task


class Outcome(NamedTuple):
    """When and how a task ends. The order of fields is the order of events.

    Attributes:
        due: When it happens, in virtual seconds.
        number: The task's number, which breaks ties.
        copy: 1 for a second reply to the same task, 0 for the end of the task.
        client: Whose task it is.
        lost: Whether the server gets no reply.
    """

    due: float
    number: int
    copy: int
    client: int
    lost: bool


class OutcomeSampler:
    """Draws what becomes of tasks. Draws are keyed by the task.

    Args:
        environment: Delays, stragglers and faults.
        clients: How many clients are registered.
        seed: The root of the draw of stragglers.

    Attributes:
        slow_clients: The stragglers.
    """

    def __init__(self, environment: Environment, clients: int, seed: int) -> None:
        self.delay = environment.delay
        self.inner_delay = environment.inner_delay
        self.stragglers = environment.stragglers
        self.faults = environment.faults
        self.slow_clients: frozenset[int] = frozenset()
        if self.stragglers:
            drawn = subset(root(seed, "stragglers"), clients, self.stragglers.clients)
            self.slow_clients = frozenset(drawn)

    def draw_outcomes(
        self, tasks: Sequence[Task], now: float, deadline: float, free_at: dict[int, float]
    ) -> list[Outcome]:
        """Draw when and how tasks end.

        Args:
            tasks: Tasks that are sent now.
            now: The virtual time.
            deadline: The virtual time after which the server waits no longer: a task that would end
                later is lost at this time.
            free_at: When each client that is busy or away can begin a task; it is updated.

        Returns:
            One outcome per task, and one more per second reply. Without delays and faults there are
            none: every task ends well and at once.
        """
        if not tasks or (self.delay is None and self.faults is None):
            return []
        keys = torch.tensor([task.key for task in tasks])
        seconds = self._durations(tasks, keys)
        dropped = self._draw_fault("drop", keys)
        doubled = self._draw_fault("duplicate", keys)
        leaving = self._draw_fault("leave", keys)
        outcomes = []
        for j, task in enumerate(tasks):
            due = max(now, free_at.get(task.client, 0.0)) + seconds[j]
            lost = dropped[j] or due > deadline
            outcomes.append(Outcome(min(due, deadline), task.number, 0, task.client, lost))
            if doubled[j] and not lost:
                outcomes.append(Outcome(due, task.number, 1, task.client, False))
            free_at[task.client] = due
            if self.faults and leaving[j]:
                free_at[task.client] += self.faults.away_s
        return outcomes

    def _draw_fault(self, fault: str, keys: Tensor) -> list[bool]:
        if self.faults is None:
            return [False] * len(keys)
        return self.faults.draw(fold_in(keys, 4), fault)

    def _durations(self, tasks: Sequence[Task], keys: Tensor) -> list[float]:
        if self.delay is None:
            return [0.0] * len(tasks)
        keys = fold_in(keys, 3)
        clients = [task.client for task in tasks]
        seconds = self.delay.seconds(keys, clients)
        if self.inner_delay is not None:
            inner = self.inner_delay.seconds(keys, clients)
            for j, task in enumerate(tasks):
                if task.broadcast.phase.is_inner:
                    seconds[j] = inner[j]
        if self.stragglers is None:
            return seconds
        slowdown = {True: self.stragglers.slowdown, False: 1.0}
        return [
            slowdown[task.client in self.slow_clients] * second
            for task, second in zip(tasks, seconds, strict=True)
        ]

    @property
    def corrupts(self) -> bool:
        """Whether some replies are corrupted."""
        return bool(self.faults and self.faults.corrupt)

    def corrupt(self, results: Results) -> Iterator[Results]:
        """Replies as they arrive, some of them corrupted.

        Of those that are, about half are not finite and half are empty, which is a wrong shape;
        replies without floating-point numbers are always emptied.

        Args:
            results: Replies as they were computed.

        Returns:
            The same replies; those of a wrong shape come one by one, the others as one stack.
        """
        if not self.corrupts or self.faults is None:
            yield results
            return
        keys = fold_in(torch.tensor([task.key for task in results.tasks]), 5)
        corrupted = self.faults.draw(keys, "corrupt")
        values = pytree.tree_map(torch.clone, results.values)
        floats = [leaf for leaf in pytree.tree_leaves(values) if leaf.is_floating_point()]
        kept = []
        for j, emptied in enumerate((keys % 2 == 0).tolist()):
            if corrupted[j] and (emptied or not floats):
                empty = pytree.tree_map(lambda t, j=j: t[j].reshape(1, -1)[:, :0], values)
                yield results.select([j])._replace(values=empty)
                continue
            if corrupted[j]:
                for leaf in floats:
                    leaf[j] = float("nan")
            kept.append(j)
        if kept:
            yield results._replace(values=values).select(kept)
