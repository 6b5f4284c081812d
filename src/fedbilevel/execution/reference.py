"""The reference executor: a plain loop over client tasks and their steps.

It is the truth that other executors are compared with: what it computes is what a phase says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, ClientData, Data, named_tensors, repack
from fedbilevel.core.devices import to_device
from fedbilevel.core.embedding import FeatureBatch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.precision import Precision, products_in
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.execution._batches import SIDES, STAGE_STREAM, TaskBatches, phase_batch_size
from fedbilevel.execution._features import embed_samples, embeds_before_steps
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.client_memory import (
    OWN,
    finish_task,
    join_message,
    own_values,
    personal_values,
    phase_memory,
    pop_memory,
    renew,
    stage_memory,
)
from fedbilevel.execution.executor import Executor, Mark
from fedbilevel.execution.memories import Memories
from fedbilevel.federation.kinds import reply_mismatch
from fedbilevel.federation.phase import Message, Phase, Side
from fedbilevel.federation.stages import encode_values
from fedbilevel.federation.task import Results, Task, TaskCost, Values, on_client

T = TypeVar("T")

PartCosts = dict[object, tuple[int, int]]  # operations and peak bytes of a part of a task


class ReferenceExecutor(Executor):
    """Runs every client task exactly as its phase is written, one client after the other.

    A task is `start`, then `first` and `step` on a new batch each, then `finish`. It serves
    `mode="loop"` of a simulated federation, and the node of a real client.

    Threads may share the executor: its state is kept per client, and a client has one task at a
    time.

    Args:
        problem: The losses and the shapes of x and y.
        clients: The data of each client, by its number.
        batch_size: Samples per mini-batch; None for the full batch.
        device: Where clients compute.
        memory: Bytes of client memories that are cached; the rest is kept in a file.
        precision: The precision of products and convolutions.

    Attributes:
        memories: What each client remembers.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> federation = fb.simulated_federation(task.problem, task.clients, mode="loop")
        >>> type(federation.transport.executor).__name__
        'ReferenceExecutor'
        >>> x, y = task.problem.start
        >>> descend = fb.algorithms.SimFBO().descend()
        >>> replies = federation.ask(descend, [0, 2], x=x, y=y, z=y)
        >>> sorted(reply.client for reply in replies)
        [0, 2]
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData] | Mapping[int, ClientData],
        batch_size: int | None,
        *,
        device: str = "cpu",
        memory: int = 2**31,
        precision: Precision = "fp32",
    ) -> None:
        self.problem = problem.with_precision(precision)
        self.precision = precision
        self.clients = clients
        self.batch_size = batch_size
        self.device = device
        self.dtype = next(iter(problem.x.values())).dtype
        self.memories = Memories(device, memory)
        self.part_costs: PartCosts = {}

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        """Run tasks one by one and yield a stack of one reply for each; `sums` is ignored."""
        for task in tasks:
            with on_client(task.client, task.broadcast), products_in(self.precision, self.device):
                results = self._run_task(task)
            yield results

    def _run_task(self, task: Task) -> Results:
        phase = task.broadcast.phase
        oracle = Oracle(self.problem)
        samples = self._samples(task)
        batches = self._batches(task, samples)
        meter = _TaskMeter(phase, self.part_costs)

        carry = meter.run("start", phase.start, self._message(task))
        for step in range(task.steps):
            batch = batches.at(step)
            if step == 0:
                carry = meter.run("first", phase.first, carry, oracle, batch)
            else:
                carry = meter.run("step", phase.step, carry, oracle, batch)
        reply = meter.run(
            "finish", lambda carry: finish_task(phase, carry, task.broadcast, self.problem), carry
        )

        values = self._remember(task, reply)
        if why := reply_mismatch(values, phase.reply, self.problem, task.broadcast.submodel):
            raise TypeError(f"phase {phase.name!r} {why}")
        payload = self._encode(task, values)
        cost = TaskCost(
            samples=batches.samples,
            gradients=oracle.gradients,
            flops=samples.embedding.flops + meter.flops,
            peak_bytes=max(samples.embedding.peak_bytes, samples.feature_bytes + meter.peak_bytes),
        )
        stack_of_one = pytree.tree_map(lambda tensor: tensor.unsqueeze(0), payload)
        return Results([task], [cost], nbytes(payload), stack_of_one)

    def _message(self, task: Task) -> Message:
        """Return what the client receives: the broadcast message and what it alone is sent.

        Floats, and all numbers that this client alone is sent, become tensors.
        """
        for_all = pytree.tree_map_only(float, self._tensor, dict(task.broadcast.message))
        for_client = pytree.tree_map(self._tensor, dict(task.client_message))
        remembered = {}
        if task.broadcast.phase.remembers:
            remembered["memory"] = phase_memory(self.memories.get(task.client, {}))
        if kinds := task.broadcast.client_kinds:
            own = own_values(self.memories.get(task.client, {}), kinds, self.problem)
            for_all = join_message(for_all, own, task.broadcast, self.problem)
        steps = to_device(task.steps, self.device, self.dtype)
        return Message(**for_all, **for_client, **remembered, steps=steps)

    def _tensor(self, value: Tensor | float) -> Tensor:
        if isinstance(value, float):
            return to_device(value, self.device, self.dtype)
        return to_device(value, self.device)

    def _samples(self, task: Task) -> _Samples:
        """Return the client's samples, or their features if x stays and every sample is used."""
        phase = task.broadcast.phase
        client = self.problem.validated(self.clients[task.client])
        data: dict[str, Data] = {}
        for side in SIDES[phase.batch]:
            stored = getattr(client, side)
            tensors = [tensor.to(self.device) for _, tensor in named_tensors(stored)]
            data[side] = repack(stored, tensors)
        if not embeds_before_steps(self.problem, task.broadcast, self.batch_size):
            return _Samples(data)

        x = task.broadcast.message["x"]
        features: dict[str, Data] = {}
        embedding = TaskCost()
        for side, raw in data.items():
            size = client.size(side)
            batch_size = min(phase_batch_size(phase, self.batch_size) or size, size)
            with Meter() as meter:
                features[side] = embed_samples(self.problem, x, raw, batch_size)
            batch = [tensor[:batch_size] for _, tensor in named_tensors(raw)]
            peak_bytes = nbytes([x, batch]) + meter.peak_bytes
            embedding = embedding.then(TaskCost(flops=meter.flops, peak_bytes=peak_bytes))
        return _Samples(features, FeatureBatch, embedding, nbytes(features))

    def _batches(self, task: Task, samples: _Samples) -> TaskBatches:
        phase = task.broadcast.phase
        return TaskBatches(
            to_device(task.key, self.device),
            samples.data,
            phase_batch_size(phase, self.batch_size),
            draws=phase.draws,
            epochs=phase.epochs is not None,
            paired=self.problem.lower_level == "private",
            batch_type=samples.batch_type,
        )

    def _remember(self, task: Task, reply: Values) -> Values:
        """Store what a task leaves with its client; return the reply without it."""
        phase = task.broadcast.phase
        values = dict(reply)
        own = pytree.tree_map(torch.clone, values.pop(OWN, {}))
        of_phases = None
        if phase.remembers:
            of_phases = pytree.tree_map(torch.clone, pop_memory(phase, values))
        if phase.remembers or own:
            memory = self.memories.get(task.client, {})
            self.memories[task.client] = renew(memory, phases=of_phases, own=own)
        return values

    def _encode(self, task: Task, values: Values) -> Values:
        """Send a reply through its stages; return what travels."""
        stages = task.broadcast.stages
        if not stages:
            return values
        memory = self.memories.get(task.client, {})
        key = fold_in(to_device(task.key, self.device), STAGE_STREAM)
        declared = task.broadcast.phase.reply
        payload, of_stages = encode_values(stages, values, declared, key, stage_memory(memory))
        if of_stages:
            self.memories[task.client] = renew(memory, stages=of_stages)
        return payload

    def samples(self, client: int, side: Side) -> int:
        """Return how many samples a client holds on one side."""
        return self.problem.validated(self.clients[client]).size(side)

    def own(self, client: int) -> dict[str, Tree]:
        """Return what a client has of a model for itself."""
        return personal_values(self.memories.get(client, {}))

    def mark(self) -> Mark:
        """Mark what clients remember now."""
        return self.memories.mark()

    def rollback(self, mark: Mark) -> None:
        """Return to what clients remembered at the mark."""
        self.memories.rollback(mark)

    def snapshot(self) -> dict[str, Any]:
        """Return what clients remember, or the name of the file that holds it."""
        return {"memories": self.memories.snapshot()}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Return to what clients remembered at a checkpoint, given the snapshots of all ranks."""
        self.memories.restore([snapshot["memories"] for snapshot in snapshots])

    def store_in(self, folder: Path) -> None:
        """Keep what clients remember in a file in `folder`."""
        self.memories.folder = folder


class _Samples(NamedTuple):
    """The samples that a task draws its batches from, or their features."""

    data: dict[str, Data]
    batch_type: type[Batch] = Batch
    embedding: TaskCost = TaskCost()  # of computing the features
    feature_bytes: int = 0


class _TaskMeter:
    """Runs the parts of one task (start, first, step, finish) and adds up what they cost.

    A part is measured the first time that it runs with inputs of some shapes. Its cost is kept in
    `part_costs`, because running under a `Meter` takes much longer.
    """

    def __init__(self, phase: Phase, part_costs: PartCosts) -> None:
        self.phase = phase
        self.part_costs = part_costs
        self.flops = 0
        self.peak_bytes = 0

    def run(self, part: str, fn: Callable[..., T], *args: object) -> T:
        """Return fn(*args)."""
        nested = [vars(arg) if isinstance(arg, Message) else arg for arg in args]
        inputs = [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        key = (self.phase.structure, part, shapes)
        if key in self.part_costs:
            result = fn(*args)
        else:
            with Meter() as meter:
                result = fn(*args)
            self.part_costs[key] = (meter.flops, nbytes(inputs) + meter.peak_bytes)
        flops, peak_bytes = self.part_costs[key]
        self.flops += flops
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        return result
