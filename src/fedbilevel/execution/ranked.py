"""Several processes, one run: every rank computes the tasks of its own clients, and all learn all results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.execution.executor import Executor
from fedbilevel.federation.replies import add_up
from fedbilevel.federation.task import Results, Sums, Task, by_broadcast


class RankedExecutor(Executor):
    """An executor that shares tasks out over the ranks of `torch.distributed`.

    Every rank runs the same server program. Client i computes on rank i mod the number of ranks, always, so that its
    data and what it remembers stay there. Where the server needs only sums, ranks add up their own clients' replies and
    one all-reduce per broadcast does the rest; otherwise all replies travel to all ranks.
    """

    def __init__(self, executor: Executor, device: str) -> None:
        self.executor = executor
        self.device = device

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        own = [task for task in tasks if ranks.mine(task.client)]
        if sums:
            groups = by_broadcast(own)
            for broadcast, everyone in by_broadcast(tasks).items():
                yield self._summed(groups.get(broadcast, []), everyone)
            return
        by_number = {task.number: task for task in tasks}

        def compute() -> list[tuple[list[int], Results]]:
            found = []
            for results in self.executor.run(own):
                numbers = [task.number for task in results.tasks]
                found.append(
                    (numbers, results._replace(tasks=(), values=ranks.sent(results.values, "cpu")))
                )
            return found

        for parts in ranks.agree(compute):
            for numbers, results in parts:
                here = ranks.sent(results.values, self.device)
                yield results._replace(tasks=[by_number[number] for number in numbers], values=here)

    def _summed(self, own: Sequence[Task], everyone: Sequence[Task]) -> Results:
        """The sums over all ranks of the replies to one broadcast."""
        found: list[Results] = []

        def compute() -> tuple[list[int], list[Any], int, Any]:
            found.extend(self._added_up(own))
            numbers = [task.number for results in found for task in results.tasks]
            costs = [cost for results in found for cost in results.costs]
            size = found[0].nbytes if found else 0
            forms = [
                (ranks.sent(results.sums, "meta"), results.sums.finite.cpu())
                for results in found
                if results.sums
            ]
            return numbers, costs, size, forms

        parts = ranks.agree(compute)
        form = next(forms[0][0] for _, _, _, forms in parts if forms)
        total = pytree.tree_map(
            lambda t: torch.zeros(t.shape, dtype=t.dtype, device=self.device), form[:3]
        )
        for results in found:
            assert results.sums is not None
            total = pytree.tree_map(torch.add, total, results.sums[:3])
        totals, steps, accepted = ranks.total(total)
        finite = torch.cat([mask for _, _, _, forms in parts for _, mask in forms], 1)
        by_number = {task.number: task for task in everyone}
        tasks = [by_number[number] for numbers, _, _, _ in parts for number in numbers]
        costs = [cost for _, costs, _, _ in parts for cost in costs]
        size = max(size for _, _, size, _ in parts)
        return Results(tasks, costs, size, {}, Sums(totals, steps, accepted, finite))

    def _added_up(self, own: Sequence[Task]) -> Iterator[Results]:
        """This rank's results, as sums."""
        for results in self.executor.run(own) if own else ():
            weights = torch.tensor(
                [task.weight for task in results.tasks], dtype=torch.float64, device=self.device
            )
            steps = torch.tensor([task.steps for task in results.tasks], device=self.device)
            yield results._replace(values={}, sums=add_up(results.values, weights, steps))

    def samples(self, client: int) -> int:
        return self.executor.samples(client)

    def mark(self) -> Any:
        return self.executor.mark()

    def back(self, mark: Any) -> None:
        self.executor.back(mark)

    def snapshot(self) -> dict[str, Any]:
        return self.executor.snapshot()

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        self.executor.restore(snapshots)

    def keep_in(self, folder: Path) -> None:
        self.executor.keep_in(folder)
