"""What happens to simulated tasks: how long they take, which are lost, doubled or spoilt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.rng import fold_in, root, subset
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import Results, Task


class Ending(NamedTuple):
    """When a task ends and how. Ties go by the task's number; `copy` 1 is a second reply to the same task."""

    due: float
    number: int
    copy: int
    client: int
    lost: bool


class Fates:
    """Draws what becomes of tasks, keyed by the task.

    Args:
        environment: delays, stragglers and faults.
        clients: how many there are.
        seed: of the choice of stragglers.
    """

    def __init__(self, environment: Environment, clients: int, seed: int) -> None:
        self.delay = environment.delay
        self.stragglers = environment.stragglers
        self.faults = environment.faults
        self.slow: frozenset[int] = frozenset()
        if self.stragglers:
            self.slow = frozenset(
                subset(root(seed, "stragglers"), clients, self.stragglers.clients)
            )

    def endings(
        self, tasks: Sequence[Task], now: float, latest: float, free_at: dict[int, float]
    ) -> list[Ending]:
        """When and how tasks end, what would come after `latest` being lost; none where all end well and now.

        free_at: when each client that is busy or away can begin; it is brought up to date.
        """
        if not tasks or (self.delay is None and self.faults is None):
            return []
        keys = torch.tensor([task.key for task in tasks])
        seconds = self._durations(tasks, keys)
        dropped = self._happens("drop", keys)
        doubled = self._happens("duplicate", keys)
        leaving = self._happens("leave", keys)
        endings = []
        for j, task in enumerate(tasks):
            due = max(now, free_at.get(task.client, 0.0)) + seconds[j]
            lost = dropped[j] or due > latest
            endings.append(Ending(min(due, latest), task.number, 0, task.client, lost))
            if doubled[j] and not lost:
                endings.append(Ending(due, task.number, 1, task.client, False))
            free_at[task.client] = due + (self.faults.away_s if self.faults and leaving[j] else 0.0)
        return endings

    def _happens(self, fault: str, keys: Tensor) -> list[bool]:
        return self.faults.happen(fold_in(keys, 4), fault) if self.faults else [False] * len(keys)

    def _durations(self, tasks: Sequence[Task], keys: Tensor) -> list[float]:
        if self.delay is None:
            return [0.0] * len(tasks)
        seconds = self.delay.seconds(fold_in(keys, 3), [task.client for task in tasks])
        if self.stragglers is None:
            return seconds
        slowdown = {True: self.stragglers.slowdown, False: 1.0}
        return [
            slowdown[task.client in self.slow] * second
            for task, second in zip(tasks, seconds, strict=True)
        ]

    @property
    def corrupt(self) -> bool:
        """Whether some replies are spoilt."""
        return bool(self.faults and self.faults.corrupt)

    def arriving(self, results: Results) -> Iterator[Results]:
        """Replies as they arrive: some are spoilt, as lying clients would, half not finite, half of another shape."""
        if not self.corrupt or self.faults is None:
            yield results
            return
        keys = fold_in(torch.tensor([task.key for task in results.tasks]), 5)
        spoilt = self.faults.happen(keys, "corrupt")
        values = pytree.tree_map(torch.clone, results.values)
        floats = [leaf for leaf in pytree.tree_leaves(values) if leaf.is_floating_point()]
        kept = []
        for j, misshapen in enumerate((keys % 2 == 0).tolist()):
            if spoilt[j] and (misshapen or not floats):
                nothing = pytree.tree_map(lambda t, j=j: t[j].reshape(1, -1)[:, :0], values)
                yield results.chosen([j])._replace(values=nothing)
                continue
            if spoilt[j]:
                for leaf in floats:
                    leaf[j] = float("nan")
            kept.append(j)
        if kept:
            yield results._replace(values=values).chosen(kept)
