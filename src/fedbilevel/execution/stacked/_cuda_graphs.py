"""CUDA graphs: programs captured once on a GPU and replayed.

Launching a small kernel takes longer than running it; a graph launches all kernels of a program at
once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.core.nests import Form, flatten, unflatten

log = logging.getLogger("fedbilevel")

MAX_GRAPHS = 32  # graphs that are kept; each holds the memory that its program works in

Leaf = Any  # a tensor or a plain value
Program = Callable[[Any], tuple[Any, Any]]  # nested inputs -> (nested tensors, a plain value)


class CapturedProgram(NamedTuple):
    """The graph of a program, the tensors that it reads and writes, and its plain result.

    It keeps the stream on which it was captured, because no other graph may be captured there: the
    matrix products of all graphs of one stream work in the same memory.
    """

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    inputs: list[Tensor]
    outputs: list[Tensor]
    output_form: Form
    plain_result: object

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Run the program on new inputs; return its nested result."""
        _copy(self.inputs, tensors)
        self.graph.replay()
        results = [torch.empty_like(output) for output in self.outputs]
        _copy(results, self.outputs)
        return unflatten(results, self.output_form)


class CudaGraphs:
    """Captures and replays programs.

    A program is a function of nested tensors and plain values that returns nested tensors and one
    plain value. It is captured for the shapes of its tensors and for its plain values, and must do
    nothing but launch kernels. A program that does more, such as copying from the CPU or branching
    on a tensor, cannot be captured; it then runs as it is, which is logged.

    Programs that are run within `side_by_side` run at the same time, each on a stream of its own: a
    program of small kernels leaves most of a GPU idle.

    Attributes:
        captured: The captured programs; None for one that cannot be captured.
        capturing: Whether a program is being captured now.
    """

    def __init__(self) -> None:
        self.captured: dict[Hashable, CapturedProgram | None] = {}
        self.capturing = False
        self._versions: dict[Hashable, str] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._busy: dict[Hashable, torch.cuda.Stream] | None = None  # within `side_by_side`
        self._inputs: list[Sequence[Tensor]] = []  # of the programs on the busy streams

    def run(
        self,
        name: str,
        version: str,
        addresses: Hashable,
        program: Program,
        leaves: Sequence[Leaf],
        form: Form,
    ) -> tuple[Any, Any]:
        """Run a program from its graph, which is captured if there is none yet.

        Args:
            name: Identifies the program and the signature of its inputs.
            version: In which form it is captured; another one takes the place of the former.
            addresses: Of the tensors that the program reads beside its inputs.
            program: The program.
            leaves: Its inputs, flattened.
            form: Their form.
        """
        key = (name, addresses)
        if key not in self.captured or self._versions[key] != version:
            self.captured.pop(key, None)  # its memory is free before the other version takes some
            self._versions[key] = version
            self._capture(key, program, leaves, form)
        captured = self.captured[key]
        if captured is None:
            return program(unflatten(leaves, form))
        tensors = _tensors(leaves)
        if self._busy is None:
            return captured.replay(tensors), captured.plain_result
        stream = self._stream_for(key, self._busy)
        stream.wait_stream(torch.cuda.current_stream())
        self._inputs.append(tensors)  # their memory must not be reused before the stream is done
        with torch.cuda.stream(stream):
            return captured.replay(tensors), captured.plain_result

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """A context in which captured programs run at the same time.

        Their results may be used after it.
        """
        self._busy = {}
        try:
            yield
        finally:
            for stream in self._busy.values():
                torch.cuda.current_stream().wait_stream(stream)
            self._busy = None
            self._inputs = []

    def _stream_for(
        self, key: Hashable, busy: dict[Hashable, torch.cuda.Stream]
    ) -> torch.cuda.Stream:
        """Return a stream that is not busy, unless with the same program.

        A program works in one place, so that two runs of it must follow one another.
        """
        if len(busy) == len(self._streams):
            self._streams.append(torch.cuda.Stream())
        return busy.setdefault(key, self._streams[len(busy)])

    def _capture(self, key: Hashable, program: Program, leaves: Sequence[Leaf], form: Form) -> None:
        if len(self.captured) >= MAX_GRAPHS:
            oldest = next(iter(self.captured))
            del self.captured[oldest]
        self.capturing = True
        try:
            self.captured[key] = capture(program, leaves, form, self._unused_stream())
        except RuntimeError as error:
            log.info("a task is not captured: %s", str(error).strip().split("\n")[0])
            self.captured[key] = None
        finally:
            self.capturing = False

    def _unused_stream(self) -> torch.cuda.Stream:
        """Return a stream on which none of the captured programs was captured."""
        used = [program.stream for program in self.captured.values() if program]
        while (stream := torch.cuda.Stream()) in used:  # PyTorch hands out 32 streams in turn
            pass
        return stream


def capture(
    program: Program, leaves: Sequence[Leaf], form: Form, stream: torch.cuda.Stream
) -> CapturedProgram:
    """Capture the kernels of a program on copies of its inputs."""
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = unflatten(copies, form)
    torch.cuda.synchronize()
    # Libraries create workspaces and handles at first use, which is not allowed while capturing.
    with torch.cuda.stream(stream):
        program(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs, plain_result = program(inputs)
    results, result_form = flatten(outputs)
    return CapturedProgram(graph, stream, _tensors(copies), results, result_form, plain_result)


def signature(leaves: Sequence[Leaf]) -> tuple[object, ...]:
    """Return what a captured program depends on: shapes of tensors, and all other values."""
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, all those of one dtype at once."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)


def _tensors(leaves: Sequence[Leaf]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
