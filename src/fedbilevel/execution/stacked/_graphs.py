"""Programs of a GPU recorded once and replayed: launching a small kernel takes longer than running it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

log = logging.getLogger("fedbilevel")

MOST = 32  # recordings that are kept; each holds the memory that its program works in

Program = Callable[[Any], tuple[Any, Any]]


class Recording(NamedTuple):
    """A program's kernels, the tensors they read and write, and what else it returned."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    form: pytree.TreeSpec
    rest: Any


class Graphs:
    """Runs programs: functions of nested tensors and other values to (nested tensors, a plain value).

    A program is recorded for the shapes of its tensors and for its other values; it must do nothing but launch kernels.
    One that does more (a copy from the CPU, a choice by a value) cannot be recorded and runs as it is, which is said in
    the log. `recording` tells a program that it is being recorded.
    """

    def __init__(self) -> None:
        self.recordings: dict[Hashable, Recording | None] = {}
        self.recording = False

    def run(
        self, name: str, where: Hashable, program: Program, leaves: list[Any], form: pytree.TreeSpec
    ) -> Any:
        """name: of the program and the forms of its inputs. where: addresses that it reads beside them."""
        key = (name, where)
        if key not in self.recordings:
            if len(self.recordings) >= MOST:
                del self.recordings[next(iter(self.recordings))]
            self.recording = True
            try:
                self.recordings[key] = _record(program, leaves, form)
            except RuntimeError as error:
                log.info("a task is not recorded: %s", str(error).strip().split("\n")[0])
                self.recordings[key] = None
            finally:
                self.recording = False
        if (recording := self.recordings[key]) is None:
            return program(pytree.tree_unflatten(leaves, form))
        torch._foreach_copy_(
            recording.inputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        )
        recording.graph.replay()
        return pytree.tree_unflatten(
            [t.clone() for t in recording.outputs], recording.form
        ), recording.rest


def kinds(leaves: list[Any]) -> tuple[Any, ...]:
    """What a recording depends on: the forms of tensors, and everything else as it is."""
    return tuple(
        (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves
    )


def _record(program: Program, leaves: list[Any], form: pytree.TreeSpec) -> Recording:
    own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = pytree.tree_unflatten(own, form)
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(
        aside
    ):  # what is made at first use (workspaces, handles) must be there before
        program(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, rest = program(inputs)
    found, after = pytree.tree_flatten(outputs)
    return Recording(graph, [leaf for leaf in own if isinstance(leaf, Tensor)], found, after, rest)
