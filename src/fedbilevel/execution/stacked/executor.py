"""The stacked executor: runs the tasks of many clients together."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.devices import constant, to_device
from fedbilevel.core.nests import flatten
from fedbilevel.core.precision import Compile, Precision, products_in
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import Tree, nbytes
from fedbilevel.execution._batches import SIDES, STAGE_STREAM, phase_batch_size
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.client_memory import (
    OWN,
    Memory,
    own_values,
    personal_values,
    phase_memory,
    pop_memory,
    renew,
    stage_memory,
)
from fedbilevel.execution.executor import Executor
from fedbilevel.execution.memories import Memories
from fedbilevel.execution.stacked._batches import batch_shape
from fedbilevel.execution.stacked._convolutions import Convolutions
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs, signature
from fedbilevel.execution.stacked._inputs import InputBuilder, StackInputs, stack_values
from fedbilevel.execution.stacked._program import ProgramCosts, StackProgram
from fedbilevel.execution.stacked._samples import SampleStore
from fedbilevel.execution.stacked._steps import StepRunner
from fedbilevel.execution.vectorize import ApplyToStack, apply_to_one, apply_vmap, vectorized
from fedbilevel.federation.kinds import ReplyError, reply_mismatch
from fedbilevel.federation.phase import Phase, Side
from fedbilevel.federation.stages import encode_values
from fedbilevel.federation.task import (
    ClientError,
    Results,
    Sums,
    Task,
    Values,
    concurrent_groups,
    first_line,
    group_by_broadcast,
    on_client,
    shape_key,
)

CAPTURE_FROM = 2  # uses of a task on a GPU before it is captured
# Bytes of messages, times local steps, that a captured task has worked on before it is compiled.
# They take an H200 about as long as the compiler, 15 to 25 s.
COMPILE_AFTER = 2e12
STACK_BELOW = 1e7  # operations of a client's largest convolution, on a CPU


class StackedExecutor(Executor):
    """Runs the tasks of many clients together, as stacks under `torch.func.vmap`.

    Tasks whose batches, messages and memories have equal shapes form a group. A group is cut into
    chunks that stay under `memory` bytes. Results agree with those of `ReferenceExecutor` up to
    rounding; draws and costs are the same.

    On a CPU, clients with large convolutions run one by one, because a stack of convolutions is
    slower there. On a GPU, samples are pooled, tasks are captured as CUDA graphs, and replies that
    the server only sums are summed there, without waiting for the GPU.

    Args:
        problem: The losses and the shapes of x and y.
        clients: The data of each client; of a lazy sequence only the clients of the tasks are read.
        batch_size: Samples per mini-batch; None for the full batch.
        device: Where clients compute.
        memory: Bytes that a chunk may take, and also bytes of client memories that are cached.
        precision: The precision of products and convolutions.
        compile: Whether captured tasks go through PyTorch's compiler: all, none, or, with "auto",
            those that have run for about as long as compiling them takes.

    Attributes:
        memories: What each client remembers.
        footprints: The bytes that one client takes in a stack, by kind of task.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> federation = fb.simulated_federation(task.problem, task.clients)
        >>> type(federation.transport.executor).__name__
        'StackedExecutor'
        >>> x, y = task.problem.start
        >>> descend = fb.algorithms.SimFBO().descend()
        >>> replies = federation.ask(descend, [0, 2], x=x, y=y, z=y)
        >>> len(replies)
        2
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData],
        batch_size: int | None,
        *,
        device: str = "cpu",
        memory: int = 2**31,
        precision: Precision = "fp32",
        compile: Compile = "auto",
    ) -> None:
        problem = problem.with_precision(precision)
        self.problem = problem
        self.precision = precision
        self.clients = clients
        self.batch_size = batch_size
        self.device = device
        self.memory = memory
        self.on_gpu = device != "cpu"
        self.memories = Memories(device, memory)
        self.footprints: dict[str, int] = {}
        self.convolutions = Convolutions()
        self.compile = compile
        self._data: dict[int, ClientData] = {}  # of the clients of the present tasks
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Forget which steps ran, and what was pooled, embedded, traced and captured for them."""
        self.graphs = CudaGraphs()
        self.step_runner = StepRunner(self.problem, self.graphs if self.on_gpu else None)
        self.sample_store = SampleStore(self.problem, self.step_runner, self.memory, self.device)
        self.inputs = InputBuilder(self.problem, self.sample_store, self.batch_size, self.device)

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        """Run tasks in chunks, and yield the results of each chunk.

        Args:
            tasks: Client tasks that share one phase.
            sums: Whether the server needs only the sum of the replies; a GPU then returns that.

        Yields:
            Replies with a leading axis over the tasks of a chunk, or their sums.

        Raises:
            ClientError: The code of a client failed, or works for every client alone but not in a
                stack.
            ReplyError: A reply has not the names and shapes that its phase declares.
        """
        self._data = self._read_data(tasks)
        for group in concurrent_groups(tasks):
            for chunks in self._side_by_side(group):
                for results in self._run_chunks(chunks, sums):
                    if results.tasks[0].broadcast.remembers:
                        self._remember(results)
                    self._check_replies(results)
                    if results.tasks[0].broadcast.stages:
                        results = self._encode(results)
                    yield results

    def _read_data(self, tasks: Sequence[Task]) -> dict[int, ClientData]:
        data: dict[int, ClientData] = {}
        for task in tasks:
            try:
                data[task.client] = self.problem.validated(self.clients[task.client])
            except Exception:
                with on_client(task.client, task.broadcast):
                    raise
        return data

    def _side_by_side(self, tasks: Sequence[Task]) -> Iterator[list[list[Task]]]:
        """Yield chunks that run at the same time: on a GPU as many as the memory allows."""
        together: list[list[Task]] = []
        used = 0
        for chunk, size in self._chunks(tasks):
            if together and (not self.on_gpu or used + size > self.memory):
                yield together
                together = []
                used = 0
            together.append(chunk)
            used += size
        if together:
            yield together

    def _run_chunks(self, chunks: list[list[Task]], sums: bool) -> list[Results]:
        """Run chunks, at the same time if there are several."""
        with products_in(self.precision, self.device):
            if len(chunks) == 1:
                return [self._run_chunk(chunks[0], sums)]
            with self.graphs.side_by_side():
                return [self._run_chunk(chunk, sums) for chunk in chunks]

    def _chunks(self, tasks: Sequence[Task]) -> Iterator[tuple[list[Task], int]]:
        """Yield tasks that can be stacked, as many at a time as the memory allows, and their bytes.

        The longest tasks come first, so that a stack can shrink as tasks finish.
        """
        if len(tasks) == 1 and not self.on_gpu:  # nothing to group
            yield list(tasks), self.memory
            return
        groups: dict[tuple[Hashable, int], list[Task]] = defaultdict(list)
        phase_numbers: dict[Phase, int] = {}
        for broadcast, alike in group_by_broadcast(tasks).items():
            phase = broadcast.phase
            # A stack has one phase with one set of numbers; footprints do not depend on these.
            phase_number = phase_numbers.setdefault(phase, len(phase_numbers))
            sides = SIDES[phase.batch]
            epochs = phase.epochs is not None
            remembers = phase.remembers or any(stage.remembers for stage in broadcast.stages)
            batch_size = phase_batch_size(phase, self.batch_size)
            broadcast_key = (broadcast.shape_key, "", "")
            for task in alike:
                message_key = broadcast_key
                if task.client_message or remembers:
                    memory = self.memories.get(task.client, {})
                    memory_key = shape_key({n: v for n, v in memory.items() if n != OWN})
                    message_key = (
                        broadcast.shape_key,
                        shape_key(task.client_message),
                        memory_key,
                    )
                shape = batch_shape(self._data[task.client], sides, batch_size, epochs)
                groups[(phase.name, shape, message_key), phase_number].append(task)
        for (kind, _), group in groups.items():
            each = self.memory
            if len(group) > 1 or self.on_gpu:
                each = self._footprint(repr(kind), group)
            count = max(1, self.memory // each)
            group.sort(key=lambda task: -task.steps)
            for start in range(0, len(group), count):
                chunk = group[start : start + count]
                yield chunk, each * len(chunk)

    def _footprint(self, kind: str, group: list[Task]) -> int:
        """Return the bytes that one client takes in a stack.

        They are measured once per kind of task, on two steps of the clients with most samples: of
        two of them, if there are two. What is measured must not depend on what ran before, because
        a resumed run may measure what the killed one had not.
        """
        if kind not in self.footprints:
            largest = sorted(group, key=self._sample_count)[-2:]
            steps = min(2, max(task.steps for task in group))
            constant.cache_clear()
            probe = copy.copy(self)
            probe._start_afresh()
            with products_in(self.precision, self.device), Meter() as meter:
                probe._run_chunk([replace(task, steps=steps) for task in largest], False)
            self.footprints[kind] = max(meter.peak_bytes // len(largest), 1)
            # A stack makes grouped convolutions, which are slower on a CPU if they are large.
            if not self.on_gpu and meter.largest_convolution // 2 > STACK_BELOW:
                self.footprints[kind] = self.memory
        return self.footprints[kind]

    def _sample_count(self, task: Task) -> int:
        client = self._data[task.client]
        return client.size("train") + client.size("val")

    def _run_chunk(self, tasks: list[Task], sums: bool) -> Results:
        """Run a chunk. If it fails as a stack, run its tasks one by one to name the client."""
        if len(tasks) == 1:
            return self._run_alone(tasks[0], sums)
        try:
            return self._run_stack(tasks, apply_vmap, sums)
        except ReplyError:
            raise
        except Exception as error:
            for task in tasks:
                self._run_alone(task, sums)
            raise ClientError(
                f"{tasks[0].broadcast}: every client runs by itself but not in a stack, because of "
                f"{type(error).__name__}: {first_line(error)} (mode='loop' runs them one by one)"
            ) from error

    def _run_alone(self, task: Task, sums: bool) -> Results:
        with on_client(task.client, task.broadcast):
            return self._run_stack([task], apply_to_one, sums)

    def _run_stack(self, tasks: list[Task], apply: ApplyToStack, sums: bool) -> Results:
        """Run tasks as one stack; the longest come first."""
        broadcast = tasks[0].broadcast
        data = [self._data[task.client] for task in tasks]
        memories = [self._recall(task) for task in tasks]
        own = [self._own(task) for task in tasks]
        inputs, samples = self.inputs.build(tasks, data, memories, own, sums)
        program = StackProgram(self.step_runner, broadcast, apply, samples, shrink=not self.on_gpu)
        if self.on_gpu:
            replies, program_costs = self._run_captured(program, inputs)
        else:
            replies, program_costs = program(inputs)
        if program_costs.mismatch:
            raise ReplyError(f"phase {broadcast.phase.name!r} {program_costs.mismatch}")
        costs_by_steps = program_costs.by_steps
        if samples.features:
            feature_bytes = nbytes(samples.features) // len(tasks)
            costs_by_steps = [
                cost._replace(peak_bytes=cost.peak_bytes + feature_bytes).then(samples.embedding)
                for cost in costs_by_steps
            ]
        costs = [costs_by_steps[task.steps] for task in tasks]
        if isinstance(replies, Sums):
            return Results(tasks, costs, program_costs.reply_bytes, {}, replies)
        return Results(tasks, costs, program_costs.reply_bytes, replies)

    def _run_captured(
        self, program: StackProgram, inputs: StackInputs
    ) -> tuple[Values | Sums, ProgramCosts]:
        """Run a program on a GPU, from its third use on as a CUDA graph.

        Uses are counted in the checkpoint, so that a resumed run captures and compiles the same
        tasks at the same uses.
        """
        leaves, form = flatten(inputs)
        structure = program.broadcast.phase.structure
        name = self.step_runner.name((structure, "task", form, signature(leaves)))
        uses = self.step_runner.count_use(name)
        if uses <= CAPTURE_FROM:
            return program(inputs)
        self.step_runner.compiling = self._is_compiled(uses, inputs)

        def with_fast_convolutions(inputs: StackInputs) -> tuple[Values | Sums, ProgramCosts]:
            with self.convolutions:
                return program(inputs)

        version = "compiled" if self.step_runner.compiling else ""
        addresses = self.sample_store.addresses()
        return self.graphs.run(name, version, addresses, with_fast_convolutions, leaves, form)

    def _is_compiled(self, uses: int, inputs: StackInputs) -> bool:
        if self.compile != "auto":
            return self.compile
        message_bytes = len(inputs.keys) * nbytes(inputs.shared) + nbytes(inputs.own)
        return uses * inputs.lengths[0] * message_bytes > COMPILE_AFTER

    def _recall(self, task: Task) -> Memory:
        """Return what the phases of a task's client remember."""
        if not task.broadcast.phase.remembers:
            return {}
        return phase_memory(self.memories.get(task.client, {}))

    def _own(self, task: Task) -> dict[str, Tree]:
        """Return the client's part of the values of its message."""
        kinds = task.broadcast.client_kinds
        if not kinds:
            return {}
        return own_values(self.memories.get(task.client, {}), kinds, self.problem)

    def _remember(self, results: Results) -> None:
        """Move what clients keep from a stack of replies to the clients' memories."""
        phase = results.tasks[0].broadcast.phase
        own = results.values.pop(OWN, {})
        stack = pop_memory(phase, results.values) if phase.remembers else {}
        if not phase.remembers and not own:
            return
        for j, task in enumerate(results.tasks):
            of_phases = _cloned_entry(stack, j) if phase.remembers else None
            memory = self.memories.get(task.client, {})
            self.memories[task.client] = renew(memory, phases=of_phases, own=_cloned_entry(own, j))

    def own(self, client: int) -> dict[str, Tree]:
        """Return what a client has of a model for itself."""
        return personal_values(self.memories.get(client, {}))

    def _check_replies(self, results: Results) -> None:
        """Refuse replies that have not the names and shapes that their phase declares.

        Replies that were summed have been checked already.
        """
        if results.sums:
            return
        broadcast = results.tasks[0].broadcast
        declared = broadcast.phase.reply
        why = reply_mismatch(
            results.values, declared, self.problem, broadcast.submodel, len(results.tasks)
        )
        if why:
            raise ReplyError(f"phase {broadcast.phase.name!r} {why}")

    def _encode(self, results: Results) -> Results:
        """Send replies through their stages; return what travels."""
        broadcast = results.tasks[0].broadcast

        def encode(values: Values, key: Tensor, memory: Memory) -> tuple[Values, Memory]:
            stage_key = fold_in(key, STAGE_STREAM)
            return encode_values(broadcast.stages, values, broadcast.phase.reply, stage_key, memory)

        before = [self.memories.get(task.client, {}) for task in results.tasks]
        memory = stack_values([stage_memory(each) for each in before], self.inputs.tensor)
        keys = to_device([task.key for task in results.tasks], self.device)
        payload, stack = vectorized(encode)(results.values, keys, memory)
        if stack:
            for j, (task, old) in enumerate(zip(results.tasks, before, strict=True)):
                of_stages = _cloned_entry(stack, j)
                self.memories[task.client] = renew(old, stages=of_stages)
        return results._replace(values=payload, nbytes=nbytes(payload) // len(results.tasks))

    def samples(self, client: int, side: Side) -> int:
        """Return how many samples a client holds on one side."""
        return self.problem.validated(self.clients[client]).size(side)

    def mark(self) -> dict[str, Any]:
        """Mark the present state, including what determines chunks and traces.

        Chunks of other sizes round differently, so a resumed run must cut the same ones.
        """
        return {
            "memories": self.memories.mark(),
            "footprints": dict(self.footprints),
            "convolutions": dict(self.convolutions.choices),
            **self.step_runner.mark(),
        }

    def rollback(self, mark: Mapping[str, Any]) -> None:
        """Return to the state at the mark."""
        self.memories.rollback(mark["memories"])
        # A checkpoint that `ReferenceExecutor` wrote has no footprints.
        self.footprints = dict(mark.get("footprints", {}))
        self.convolutions.choices = dict(mark.get("convolutions", {}))
        self.step_runner.rollback(mark)

    def snapshot(self) -> dict[str, Any]:
        """Return the present state for a checkpoint."""
        return {**self.mark(), "memories": self.memories.snapshot()}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Return to the state of a checkpoint, given the snapshots of all ranks.

        With another number of ranks other clients are stacked. Each rank then starts from what the
        first rank had measured, and measures the rest again.
        """
        self.memories.restore([snapshot["memories"] for snapshot in snapshots])
        rank = ranks.rank() if len(snapshots) == ranks.size() else 0
        self.rollback({**snapshots[rank], "memories": self.memories.mark()})

    def store_in(self, folder: Path) -> None:
        """Keep what clients remember in a file in `folder`."""
        self.memories.folder = folder


def _cloned_entry(stack: Values, j: int) -> Memory:
    """Return the values of one client of a stack; a view would keep the whole stack alive."""
    entry: Memory = pytree.tree_map(lambda tensor: tensor[j].clone(), stack)
    return entry
