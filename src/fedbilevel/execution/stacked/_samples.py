"""Where a stack of clients finds its samples: in tables of features, in pools, or with each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.core.problem import ClientData, Data, Problem, leaves, like
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._features import embedded
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.stacked._batches import Extent, Take
from fedbilevel.execution.stacked._parts import Parts
from fedbilevel.execution.stacked._pool import Apart, Pool, Pools
from fedbilevel.execution.stacked._tables import Tables, look_up
from fedbilevel.federation.task import Task, TaskCost, form_of


class Source(NamedTuple):
    """Where the samples of a stack lie, side by side."""

    features: dict[str, Data]
    embedding: TaskCost  # what it takes a client to find its features, in every task
    pools: dict[str, tuple[Pool, Tensor]]
    apart: dict[str, Apart]

    def take(self, given: Mapping[str, Any]) -> Take:
        """Looks samples up, given the inputs of a program."""

        def take(side: str, indices: Tensor | None) -> Any:
            if side in given["features"]:
                return look_up(given["features"][side], indices)
            if side in self.apart:
                return self.apart[side].take(indices)
            return self.pools[side][0].take(
                indices, given["starts"][side], given["extents"][side].most
            )

        return take


class Samples:
    """Finds the samples of stacks; what was pooled or embedded for one is kept for the next."""

    def __init__(self, problem: Problem, parts: Parts, memory: int, device: str) -> None:
        self.problem = problem
        self.parts = parts
        self.on_gpu = device != "cpu"
        self.pools = Pools(memory if self.on_gpu else 0, device)
        self.tables = Tables(problem)

    def source(
        self,
        tasks: Sequence[Task],
        data: Sequence[ClientData],
        extents: Mapping[str, Extent],
        batches: int,
        embed: bool,
    ) -> Source:
        """Where a stack finds its samples. batches: how many each client draws. embed: embed all samples first."""
        numbers = [task.client for task in tasks]
        features: dict[str, Data] = {}
        cost = TaskCost()
        pools: dict[str, tuple[Pool, Tensor]] = {}
        apart: dict[str, Apart] = {}
        for side, extent in extents.items():
            if embed:
                features[side], more = self._features(side, tasks, data, extent)
                cost = cost.then(more)
            elif pool := self._pool(side, data, numbers, batches, extent):
                pools[side] = pool
            else:
                apart[side] = Apart([getattr(client, side) for client in data])
        return Source(features, cost, pools, apart)

    def addresses(self) -> tuple[int, ...]:
        """Of the memory that a recorded program reads beside its inputs."""
        return tuple(
            tensor.data_ptr() for pool in self.pools.pools.values() for tensor in pool.tensors
        )

    def _pool(
        self,
        side: str,
        data: Sequence[ClientData],
        numbers: list[int],
        batches: int,
        extent: Extent,
    ) -> tuple[Pool, Tensor] | None:
        """One place in which the samples of a stack lie, and where each client's begin; None if it does not pay."""
        if not self.on_gpu and (found := self.pools.together(side, data)):
            return found
        # In memory it costs a copy of all samples: it pays if as many are drawn, a few at a time.
        if self.on_gpu or extent.batch < extent.most <= batches * extent.batch:
            return self.pools.bring(side, numbers, data)
        return None

    def _features(
        self, side: str, tasks: Sequence[Task], data: Sequence[ClientData], extent: Extent
    ) -> tuple[Data, TaskCost]:
        """The features of a stack of clients, and what it takes a client to find its own."""
        at = [task.broadcast.message["x"] for task in tasks]
        numbers = [task.client for task in tasks]
        held = self._on_device(side, numbers, data)
        batch = extent.batch
        kind = self.parts.name(
            ("embed", tasks[0].broadcast.form, batch, side, form_of({"": held[0]}))
        )
        if kind not in self.parts.measured:
            with Meter() as meter:
                embedded(self.problem, at[0], held[0], batch)
            piece = [tensor[:batch] for _, tensor in leaves(held[0])]
            self.parts.measured[kind] = (meter.flops, nbytes([at[0], piece]) + meter.peak_bytes)
        flops, peak_bytes = self.parts.measured[kind]
        return self.tables.find(side, at, numbers, held, batch), TaskCost(
            flops=flops, peak_bytes=peak_bytes
        )

    def _on_device(
        self, side: str, numbers: list[int], clients: Sequence[ClientData]
    ) -> list[Data]:
        data: list[Data] = [getattr(client, side) for client in clients]
        if not self.on_gpu:
            return data
        pool, _ = self.pools.bring(
            side, numbers, clients
        )  # all at once: what comes in later may take their place
        starts = [pool.starts[number] for number in numbers]
        return [
            like(each, [tensor[start : start + client.size(side)] for tensor in pool.tensors])
            for each, client, start in zip(data, clients, starts, strict=True)
        ]
