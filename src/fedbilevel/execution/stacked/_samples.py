"""Find the samples of a stack of clients: as features, in a pool, or client by client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fedbilevel.core.client_data import ClientData, Data, named_tensors, repack
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._features import embed_samples
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.stacked._batches import SideSizes
from fedbilevel.execution.stacked._feature_cache import FeatureCache
from fedbilevel.execution.stacked._pools import Pool, Pools, SeparateSamples
from fedbilevel.execution.stacked._steps import StepRunner
from fedbilevel.federation.task import Task, TaskCost, shape_key


class StackSamples(NamedTuple):
    """The samples of a stack of clients. Each side is in one of `features`, `pools`, `separate`."""

    features: dict[str, Data]
    embedding: TaskCost  # what each client pays for its features, in every task
    pools: dict[str, tuple[Pool, Tensor]]  # with the row at which each client's samples begin
    separate: dict[str, SeparateSamples]


class SampleStore:
    """Finds the samples of stacks. What it pools or embeds for one stack is kept for the next.

    Args:
        problem: Embeds samples.
        step_runner: Keeps measured costs.
        memory: Bytes that pools on a GPU may take.
        device: Where clients compute.
    """

    def __init__(self, problem: Problem, step_runner: StepRunner, memory: int, device: str) -> None:
        self.problem = problem
        self.step_runner = step_runner
        self.on_gpu = device != "cpu"
        self.pools = Pools(memory if self.on_gpu else 0, device)
        self.feature_cache = FeatureCache(problem)

    def find(
        self,
        tasks: Sequence[Task],
        data: Sequence[ClientData],
        sizes: Mapping[str, SideSizes],
        batches: int,
        embed: bool,
    ) -> StackSamples:
        """Return the samples of a stack.

        Args:
            tasks: The tasks of the stack.
            data: The data of each task's client.
            sizes: The number of samples on each side.
            batches: How many batches each client draws.
            embed: Whether all samples are embedded before the first step.
        """
        numbers = [task.client for task in tasks]
        samples = StackSamples({}, TaskCost(), {}, {})
        embedding = TaskCost()
        for side, size in sizes.items():
            if embed:
                samples.features[side], cost = self._features(side, tasks, data, size.batch)
                embedding = embedding.then(cost)
            elif pool := self._pool(side, data, numbers, batches, size):
                samples.pools[side] = pool
            else:
                samples.separate[side] = SeparateSamples(_sides(data, side))
        return samples._replace(embedding=embedding)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of all pools, which a captured program reads beside its inputs."""
        pools = self.pools.pools.values()
        return tuple(tensor.data_ptr() for pool in pools for tensor in pool.tensors)

    def _pool(
        self,
        side: str,
        data: Sequence[ClientData],
        numbers: list[int],
        batches: int,
        size: SideSizes,
    ) -> tuple[Pool, Tensor] | None:
        """Return a pool with the samples of a stack, or None if it does not pay."""
        if self.on_gpu:
            return self.pools.load(side, numbers, data)
        if shared := self.pools.view_shared_storage(side, data):
            return shared
        # A pool costs a copy of all samples. It pays if at least as many are drawn, over several
        # batches.
        if size.batch < size.largest <= batches * size.batch:
            return self.pools.load(side, numbers, data)
        return None

    def _features(
        self, side: str, tasks: Sequence[Task], clients: Sequence[ClientData], batch_size: int
    ) -> tuple[Data, TaskCost]:
        """Return the features of a stack, and what each client pays for its own."""
        xs = [task.broadcast.message["x"] for task in tasks]
        numbers = [task.client for task in tasks]
        data = self._on_device(side, numbers, clients)
        message_key = tasks[0].broadcast.shape_key
        measured = self.step_runner.measured
        name = self.step_runner.name(
            ("embed", message_key, batch_size, side, shape_key({"": data[0]}))
        )
        if name not in measured:
            with Meter() as meter:
                embed_samples(self.problem, xs[0], data[0], batch_size)
            batch = [tensor[:batch_size] for _, tensor in named_tensors(data[0])]
            measured[name] = (meter.flops, nbytes([xs[0], batch]) + meter.peak_bytes)
        flops, peak_bytes = measured[name]
        features = self.feature_cache.features(side, xs, numbers, data, batch_size)
        return features, TaskCost(flops=flops, peak_bytes=peak_bytes)

    def _on_device(
        self, side: str, numbers: list[int], clients: Sequence[ClientData]
    ) -> list[Data]:
        """Return one side of each client's data on the device; on a GPU, as views of a pool."""
        data = _sides(clients, side)
        if not self.on_gpu:
            return data
        # All clients are loaded at once: loading one later could evict another.
        pool, _ = self.pools.load(side, numbers, clients)
        views = []
        for number, client, original in zip(numbers, clients, data, strict=True):
            start = pool.starts[number]
            end = start + client.size(side)
            views.append(repack(original, [tensor[start:end] for tensor in pool.tensors]))
        return views


def _sides(clients: Sequence[ClientData], side: str) -> list[Data]:
    return [getattr(client, side) for client in clients]
