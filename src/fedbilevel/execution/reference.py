"""The reference executor: a plain loop over tasks and steps, the truth that other executors are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.devices import sent
from fedbilevel.core.oracle import Features, Oracle
from fedbilevel.core.problem import Batch, ClientData, Data, Problem, leaves, like
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._draws import SIDES, STAGE_STREAM, Draws
from fedbilevel.execution._features import embedded, embeds_beforehand
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.executor import Executor
from fedbilevel.execution.memories import Memories, joined, phase_memory, stage_memory
from fedbilevel.federation.phase import Message
from fedbilevel.federation.replies import wrong_form
from fedbilevel.federation.stages import encoded
from fedbilevel.federation.task import Results, Task, TaskCost, Values, on_client


class ReferenceExecutor(Executor):
    """Runs every task as its phase is written: start, then step after step, then finish.

    Threads may share it: what it keeps is by client, and a client has one task at a time.

    Args:
        problem: the losses and the shapes of x and y.
        clients: the data, by client.
        batch_size: samples per mini-batch; None is the full batch.
        device: where clients compute.
        memory: bytes of what clients remember that are held in memory; the rest is kept in a file.
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData] | Mapping[int, ClientData],
        batch_size: int | None,
        *,
        device: str = "cpu",
        memory: int = 2**31,
    ) -> None:
        self.problem = problem
        self.clients = clients
        self.batch_size = batch_size
        self.device = device
        self.dtype = next(iter(problem.x.values())).dtype
        self.memories = Memories(device, memory)
        self.costs: dict[
            Any, tuple[int, int]
        ] = {}  # operations and peak bytes of each kind of step, measured once

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        for task in tasks:
            with on_client(task.client, task.broadcast):
                results = self._run(task)
            yield results

    def _run(self, task: Task) -> Results:
        phase = task.broadcast.phase
        oracle = Oracle(self.problem)
        data, cost, table_bytes = self._data(task)
        draws = Draws(
            sent(task.key, self.device),
            data,
            None if phase.full else self.batch_size,
            draws=phase.draws,
            epochs=phase.epochs is not None,
            paired=self.problem.lower_level == "private",
            kind=Features if table_bytes else Batch,
        )
        carry, spent = self._measured(task, "start", phase.start, self._message(task))
        for k in range(task.steps):
            step = phase.step if k else phase.first
            carry, more = self._measured(
                task, "step" if k else "first", step, carry, oracle, draws.at(k)
            )
            spent = spent.then(more)
        reply, more = self._measured(task, "finish", phase.finish, carry)
        whole = spent.then(more)
        peak_bytes = max(whole.peak_bytes + table_bytes, cost.peak_bytes)
        counted = TaskCost(draws.samples, oracle.gradients, whole.flops + cost.flops, peak_bytes)
        values = self._encoded(task, self._checked(task, reply))
        size = nbytes(values)
        return Results([task], [counted], size, pytree.tree_map(lambda t: t.unsqueeze(0), values))

    def _message(self, task: Task) -> Message:
        """What the client receives; numbers that it alone is sent, and floats, are tensors."""
        shared = pytree.tree_map(
            lambda v: self._tensor(v) if isinstance(v, float) else v, dict(task.broadcast.message)
        )
        own = pytree.tree_map(self._tensor, dict(task.own))
        remembered = {}
        if task.broadcast.phase.remembers:
            remembered["memory"] = phase_memory(self.memories.get(task.client, {}))
        return Message(
            **shared, **own, **remembered, steps=sent(task.steps, self.device, self.dtype)
        )

    def _tensor(self, value: Any) -> Tensor:
        return sent(value, self.device, self.dtype if isinstance(value, float) else None)

    def _data(self, task: Task) -> tuple[dict[str, Data], TaskCost, int]:
        """The client's samples; where x stays as it is sent and all of them are used, their features at that x."""
        phase = task.broadcast.phase
        client = self.problem.paired(self.clients[task.client])
        data: dict[str, Data] = {}
        for side in SIDES[phase.batch]:
            held = getattr(client, side)
            data[side] = like(held, [tensor.to(self.device) for _, tensor in leaves(held)])
        if not embeds_beforehand(self.problem, task.broadcast, self.batch_size):
            return data, TaskCost(), 0
        x = task.broadcast.message["x"]
        cost = TaskCost()
        table = {}
        for side, held in data.items():
            size = client.size(side)
            batch = size if phase.full else min(self.batch_size or size, size)
            with Meter() as meter:
                table[side] = embedded(self.problem, x, held, batch)
            piece = [tensor[:batch] for _, tensor in leaves(held)]
            cost = cost.then(
                TaskCost(flops=meter.flops, peak_bytes=nbytes([x, piece]) + meter.peak_bytes)
            )
        return table, cost, nbytes(table)

    def _measured(
        self, task: Task, part: str, fn: Callable[..., Any], *args: Any
    ) -> tuple[Any, TaskCost]:
        """fn(*args), with its operations and the bytes it holds; these are measured once for each kind of step."""
        inputs = [leaf for leaf in pytree.tree_leaves(_plain(args)) if isinstance(leaf, Tensor)]
        kind = (task.broadcast.phase.structure, part, tuple((t.shape, t.dtype) for t in inputs))
        if kind in self.costs:
            value = fn(*args)
        else:
            with Meter() as meter:
                value = fn(*args)
            self.costs[kind] = (meter.flops, nbytes(inputs) + meter.peak_bytes)
        flops, peak_bytes = self.costs[kind]
        return value, TaskCost(flops=flops, peak_bytes=peak_bytes)

    def _checked(self, task: Task, reply: Values) -> Values:
        """A reply of the form its phase declares; what the client remembers stays here."""
        phase = task.broadcast.phase
        values = dict(reply)
        if phase.remembers:
            if "memory" not in values:
                raise TypeError(
                    f"phase {phase.name!r} remembers; its finish must return a memory beside its reply"
                )
            kept = stage_memory(self.memories.get(task.client, {}))
            self.memories[task.client] = joined(
                pytree.tree_map(torch.clone, values.pop("memory")), kept
            )
        if why := wrong_form(values, phase.reply, self.problem, task.broadcast.submodel):
            raise TypeError(f"phase {phase.name!r} {why}")
        return values

    def _encoded(self, task: Task, values: Values) -> Values:
        """The reply as it travels, after its stages."""
        stages = task.broadcast.stages
        if not stages:
            return values
        memory = self.memories.get(task.client, {})
        key = fold_in(sent(task.key, self.device), STAGE_STREAM)
        payload, kept = encoded(
            stages, values, task.broadcast.phase.reply, key, stage_memory(memory)
        )
        if kept:
            self.memories[task.client] = joined(phase_memory(memory), kept)
        return payload

    def samples(self, client: int) -> int:
        return self.problem.paired(self.clients[client]).size("train")

    def mark(self) -> Any:
        return self.memories.mark()

    def back(self, mark: Any) -> None:
        self.memories.back(mark)

    def snapshot(self) -> dict[str, Any]:
        return {"memories": self.memories.save()}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        self.memories.restore([snapshot["memories"] for snapshot in snapshots])

    def keep_in(self, folder: Path) -> None:
        self.memories.folder = folder


def _plain(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as nests of tensors: a message has them as attributes, an oracle has none."""
    return [
        vars(arg) if isinstance(arg, Message) else arg
        for arg in args
        if not isinstance(arg, Oracle)
    ]
