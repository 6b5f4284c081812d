"""The ranked executor: several processes share the tasks of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.execution.executor import Executor, Mark
from fedbilevel.federation.phase import Side
from fedbilevel.federation.stacks import sum_finite
from fedbilevel.federation.task import Results, Sums, Task, TaskCost, group_by_broadcast


class RankedExecutor(Executor):
    """Shares client tasks out over the ranks of `torch.distributed`.

    Every rank runs the same server program. Client i always computes on rank i mod the number of
    ranks, so that its data and its memory stay there. If the server needs only sums, each rank adds
    up the replies of its own clients and one all-reduce per broadcast adds up the ranks; otherwise
    all replies travel to all ranks.

    `fb.simulated_federation` uses it when there is more than one rank.

    Args:
        executor: Computes the tasks of this rank's clients.
        device: Where the replies of other ranks are put.

    Examples:
        Without `torchrun` there is one rank, which computes everything:

        >>> import fedbilevel as fb
        >>> from fedbilevel.execution.ranked import RankedExecutor
        >>> from fedbilevel.execution.stacked import StackedExecutor
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> local = StackedExecutor(task.problem, task.clients, batch_size=None)
        >>> executor = RankedExecutor(local, "cpu")
        >>> executor.samples(0, "train") == local.samples(0, "train")
        True
    """

    def __init__(self, executor: Executor, device: str) -> None:
        self.executor = executor
        self.device = device

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        """Run the tasks of this rank's clients; yield the results of all ranks.

        Args:
            tasks: The client tasks, the same on every rank.
            sums: Whether the server needs only the sum of the replies.

        Yields:
            The same results on every rank.

        Raises:
            ClientError, TypeError: A task failed on some rank; every rank raises.
        """
        local_tasks = [task for task in tasks if ranks.is_local(task.client)]
        if sums:
            groups = group_by_broadcast(local_tasks)
            for broadcast, group in group_by_broadcast(tasks).items():
                yield self._run_summed(groups.get(broadcast, []), group)
            return
        by_number = {task.number: task for task in tasks}

        def compute() -> list[tuple[list[int], Results]]:
            parts = []
            for results in self.executor.run(local_tasks):
                numbers = [task.number for task in results.tasks]
                values = ranks.move_tensors(results.values, "cpu")
                parts.append((numbers, results._replace(tasks=(), values=values)))
            return parts

        for parts in ranks.on_all_ranks(compute):
            for numbers, results in parts:
                values = ranks.move_tensors(results.values, self.device)
                yield results._replace(tasks=[by_number[n] for n in numbers], values=values)

    def _run_summed(self, local_tasks: Sequence[Task], tasks: Sequence[Task]) -> Results:
        """Return the sums over all ranks of the replies to one broadcast."""
        local_sums: list[Sums] = []

        def compute() -> _RankSums:
            part = _RankSums([], [], 0, [], [])
            nbytes = 0
            for results in self.executor.run(local_tasks) if local_tasks else ():
                sums = self._sum(results)
                local_sums.append(sums)
                part.numbers.extend(task.number for task in results.tasks)
                part.costs.extend(results.costs)
                part.shapes.append(ranks.move_tensors(sums, "meta"))
                part.finite.append(sums.finite.cpu())
                nbytes = nbytes or results.nbytes
            return part._replace(nbytes=nbytes)

        parts = ranks.on_all_ranks(compute)
        shapes = next(part.shapes[0] for part in parts if part.shapes)
        total = pytree.tree_map(self._zeros_like, _additive(shapes))
        for sums in local_sums:
            total = pytree.tree_map(torch.add, total, _additive(sums))
        totals, steps, accepted, weight = ranks.all_reduce_sum(total)
        finite = torch.cat([mask for part in parts for mask in part.finite], 1)
        by_number = {task.number: task for task in tasks}
        return Results(
            tasks=[by_number[number] for part in parts for number in part.numbers],
            costs=[cost for part in parts for cost in part.costs],
            nbytes=max(part.nbytes for part in parts),
            values={},
            sums=Sums(totals, steps, accepted, weight, finite),
        )

    def _sum(self, results: Results) -> Sums:
        """Return the weighted sums of some replies."""
        weights = [task.weight for task in results.tasks]
        steps = [task.steps for task in results.tasks]
        return sum_finite(
            results.values,
            torch.tensor(weights, dtype=torch.float64, device=self.device),
            torch.tensor(steps, device=self.device),
        )

    def _zeros_like(self, meta: Tensor) -> Tensor:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)

    def samples(self, client: int, side: Side) -> int:
        """Return how many samples a client holds on one side, on any rank."""
        return self.executor.samples(client, side)

    def mark(self) -> Mark:
        """Mark the state of this rank."""
        return self.executor.mark()

    def rollback(self, mark: Mark) -> None:
        """Return to the state at the mark on this rank; every rank must do so."""
        self.executor.rollback(mark)

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot of this rank."""
        return self.executor.snapshot()

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Return to the state of a checkpoint, given the snapshots of all ranks."""
        self.executor.restore(snapshots)

    def store_in(self, folder: Path) -> None:
        """Keep the memories of this rank's clients in a file in `folder`."""
        self.executor.store_in(folder)


class _RankSums(NamedTuple):
    """What the other ranks learn of one rank's sums; the sums themselves are all-reduced."""

    numbers: list[int]  # of the tasks
    costs: list[TaskCost]
    nbytes: int  # of one reply
    shapes: list[Sums]  # tensors on the meta device
    finite: list[Tensor]


def _additive(sums: Sums) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The parts of sums that add up; a mask of finite replies is concatenated instead."""
    return sums.totals, sums.steps, sums.accepted, sums.weight
