"""The stacked executor: tasks of equal shape run together, in chunks that stay under a limit of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.devices import constant, sent
from fedbilevel.core.problem import ClientData, Problem
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._draws import SIDES, STAGE_STREAM
from fedbilevel.execution._meter import Meter
from fedbilevel.execution.executor import Executor
from fedbilevel.execution.lift import Lift, lifted, single, stacked
from fedbilevel.execution.memories import Memories, joined, phase_memory, stage_memory
from fedbilevel.execution.stacked._batches import shape
from fedbilevel.execution.stacked._graphs import Graphs
from fedbilevel.execution.stacked._graphs import kinds as input_kinds
from fedbilevel.execution.stacked._inputs import Inputs, stacked_values
from fedbilevel.execution.stacked._parts import Parts
from fedbilevel.execution.stacked._program import Given, StackProgram
from fedbilevel.execution.stacked._samples import Samples
from fedbilevel.federation.phase import Phase
from fedbilevel.federation.replies import wrong_form
from fedbilevel.federation.stages import encoded
from fedbilevel.federation.task import (
    ClientError,
    Results,
    Sums,
    Task,
    by_broadcast,
    first_line,
    form_of,
    in_turns,
    on_client,
)

RECORD_FROM = 2  # uses of a task
STACK_BELOW = 1e7  # operations of a client's largest convolution


class StackedExecutor(Executor):
    """Runs tasks of equal batch shape together, in chunks that stay under `memory` bytes.

    On a CPU, clients whose convolutions are large run one by one. On a GPU samples are pooled and whole tasks recorded;
    replies that the server only sums are added up there, without waiting for it.

    Args:
        problem: the losses and the shapes of x and y.
        clients: the data of each client; a lazy sequence is asked only for those at work.
        batch_size: samples per mini-batch; None is the full batch.
        device: where clients compute.
        memory: bytes that a chunk may take, and bytes of what clients remember that are held in memory.
        compile: whether recorded tasks go through PyTorch's compiler.
    """

    def __init__(
        self,
        problem: Problem,
        clients: Sequence[ClientData],
        batch_size: int | None,
        *,
        device: str = "cpu",
        memory: int = 2**31,
        compile: bool = False,
    ) -> None:
        self.problem = problem
        self.clients = clients
        self.batch_size = batch_size
        self.device = device
        self.memory = memory
        self.on_gpu = device != "cpu"
        self.memories = Memories(device, memory)
        self.footprints: dict[
            str, int
        ] = {}  # bytes that a client takes in a stack, by kind of task
        self.held: dict[int, ClientData] = {}  # the data of the clients that are at work
        self.graphs = Graphs()
        self.parts = Parts(problem, self.graphs if self.on_gpu else None, compile)
        self.storage = Samples(problem, self.parts, memory, device)
        self.inputs = Inputs(problem, self.storage, batch_size, device)

    def run(self, tasks: Sequence[Task], sums: bool = False) -> Iterator[Results]:
        self.held = self._data(tasks)
        for turn in in_turns(tasks):
            for chunk in self._chunks(turn):
                results = self._run_chunk(chunk, sums)
                phase = chunk[0].broadcast.phase
                if phase.remembers:
                    self._remember(results)
                values, stack = (
                    (results.sums.totals, ()) if results.sums else (results.values, (len(chunk),))
                )
                if why := wrong_form(
                    values, phase.reply, self.problem, chunk[0].broadcast.submodel, *stack
                ):
                    raise TypeError(f"phase {phase.name!r} {why}")
                yield self._encoded(results) if chunk[0].broadcast.stages else results

    def _data(self, tasks: Sequence[Task]) -> dict[int, ClientData]:
        """The data of the clients that are at work."""
        held: dict[int, ClientData] = {}
        for task in tasks:
            try:
                held[task.client] = self.problem.paired(self.clients[task.client])
            except Exception:
                with on_client(task.client, task.broadcast):
                    raise
        return held

    def _chunks(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Tasks that can be stacked, as many as the memory allows; longest first, so that the stack can shrink."""
        groups: dict[tuple[Hashable, int], list[Task]] = defaultdict(list)
        phases: dict[Phase, int] = {}
        for broadcast, alike in by_broadcast(tasks).items():
            phase = broadcast.phase
            number = phases.setdefault(
                phase, len(phases)
            )  # a stack has one phase, with its numbers
            sides = SIDES[phase.batch]
            epochs = phase.epochs is not None
            remembers = broadcast.remembers
            size = None if phase.full else self.batch_size
            same = (broadcast.form, "", "")
            for task in alike:
                message = same
                if task.own or remembers:
                    message = (
                        broadcast.form,
                        form_of(task.own),
                        form_of(self.memories.get(task.client, {})),
                    )
                batches = shape(self.held[task.client], sides, size, epochs)
                groups[(phase.name, batches, message), number].append(task)
        for (kind, _), group in groups.items():
            size = (
                1 if len(group) == 1 else max(1, self.memory // self._footprint(repr(kind), group))
            )
            group.sort(key=lambda task: -task.steps)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _footprint(self, kind: str, group: list[Task]) -> int:
        """Bytes that a client takes in a stack: two steps of the two largest ones are run and measured."""
        if kind not in self.footprints:

            def samples(task: Task) -> int:
                client = self.held[task.client]
                return client.size("train") + client.size("val")

            largest = sorted(group, key=samples)[-2:]
            steps = min(2, max(task.steps for task in group))
            constant.cache_clear()  # what is measured must not depend on what ran before in this process
            with Meter() as meter:
                self._run_chunk([replace(task, steps=steps) for task in largest], False)
            # A stack turns convolutions into grouped ones, which are slower on a CPU: there large ones are not stacked.
            alone = not self.on_gpu and meter.convolution // 2 > STACK_BELOW
            self.footprints[kind] = self.memory if alone else max(meter.peak_bytes // 2, 1)
        return self.footprints[kind]

    def _run_chunk(self, tasks: list[Task], sums: bool) -> Results:
        """Run a chunk; if it fails as a stack, its members run one by one to name the one that does."""
        if len(tasks) == 1:
            return self._run_alone(tasks[0], sums)
        try:
            return self._run_stack(tasks, stacked, sums)
        except Exception as error:
            for task in tasks:
                self._run_alone(task, sums)
            raise ClientError(
                f"{tasks[0].broadcast}: every client runs by itself but not in a stack, because of "
                f"{type(error).__name__}: {first_line(error)} (mode='loop' runs them one by one)"
            ) from error

    def _run_alone(self, task: Task, sums: bool) -> Results:
        with on_client(task.client, task.broadcast):
            return self._run_stack([task], single, sums)

    def _run_stack(self, tasks: list[Task], lift: Lift, sums: bool) -> Results:
        """Run a stack, whose longest tasks come first."""
        broadcast = tasks[0].broadcast
        lengths = [task.steps for task in tasks]
        data = [self.held[task.client] for task in tasks]
        given, source = self.inputs.gather(
            tasks, data, [self._recall(task) for task in tasks], sums
        )
        program = StackProgram(self.parts, broadcast, lift, source.take, shrink=not self.on_gpu)
        replies, (spent, size) = self._recorded(program, given) if self.on_gpu else program(given)
        table = nbytes(source.features) // len(tasks)
        whole = [
            cost._replace(peak_bytes=cost.peak_bytes + table).then(source.embedding)
            for cost in spent
        ]
        costs = [whole[length] for length in lengths]
        if isinstance(replies, Sums):
            return Results(tasks, costs, size, {}, replies)
        return Results(tasks, costs, size, replies)

    def _recorded(self, program: StackProgram, given: Given) -> Any:
        """Run a program of a GPU, from its third use on from a recording. Uses are in the checkpoint, as of steps."""
        leaves, form = pytree.tree_flatten(given)
        name = self.parts.name(
            (program.broadcast.phase.structure, "task", form, input_kinds(leaves))
        )
        if self.parts.used(name) <= RECORD_FROM:
            return program(given)
        return self.graphs.run(name, self.storage.addresses(), program, leaves, form)

    def _recall(self, task: Task) -> dict[str, Any]:
        return (
            phase_memory(self.memories.get(task.client, {}))
            if task.broadcast.phase.remembers
            else {}
        )

    def _remember(self, results: Results) -> None:
        if "memory" not in results.values:
            phase = results.tasks[0].broadcast.phase
            raise TypeError(
                f"phase {phase.name!r} remembers; its finish must return a memory beside its reply"
            )
        memory = results.values.pop("memory")
        for j, task in enumerate(results.tasks):
            kept = stage_memory(self.memories.get(task.client, {}))
            self.memories[task.client] = joined(
                pytree.tree_map(lambda t, j=j: t[j].clone(), memory), kept
            )

    def _encoded(self, results: Results) -> Results:
        """Replies as they travel, after their stages."""
        broadcast = results.tasks[0].broadcast
        kinds = broadcast.phase.reply

        def encode(values: Any, key: Tensor, memory: Any) -> Any:
            return encoded(broadcast.stages, values, kinds, fold_in(key, STAGE_STREAM), memory)

        before = [self.memories.get(task.client, {}) for task in results.tasks]
        memory = stacked_values([stage_memory(each) for each in before], self.inputs.tensor)
        keys = sent([task.key for task in results.tasks], self.device)
        payload, kept = lifted(stacked, encode)(results.values, keys, memory)
        if kept:
            for j, (task, each) in enumerate(zip(results.tasks, before, strict=True)):
                own = pytree.tree_map(lambda t, j=j: t[j].clone(), kept)
                self.memories[task.client] = joined(phase_memory(each), own)
        return results._replace(values=payload, nbytes=nbytes(payload) // len(results.tasks))

    def samples(self, client: int) -> int:
        return self.problem.paired(self.clients[client]).size("train")

    def mark(self) -> dict[str, Any]:
        # Chunks round differently: a resumed run must cut the same ones.
        return {
            "memories": self.memories.mark(),
            "footprints": dict(self.footprints),
            **self.parts.mark(),
        }

    def back(self, mark: Mapping[str, Any]) -> None:
        self.memories.back(mark["memories"])
        self.footprints = dict(
            mark.get("footprints", {})
        )  # the reference executor leaves none in a checkpoint
        self.parts.back(mark)

    def snapshot(self) -> dict[str, Any]:
        return {**self.mark(), "memories": self.memories.save()}

    def restore(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Of every rank; with another number of ranks other clients are stacked, and what the first rank had not
        measured is measured again."""
        self.memories.restore([snapshot["memories"] for snapshot in snapshots])
        own = snapshots[ranks.rank() if len(snapshots) == ranks.size() else 0]
        self.back({**own, "memories": self.memories.mark()})

    def keep_in(self, folder: Path) -> None:
        self.memories.folder = folder
