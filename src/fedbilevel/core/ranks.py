"""Several processes, one run: `torch.distributed`, where the caller has initialised it.

Every rank runs the same server program on the same state. Client i computes on rank i mod the number of ranks, always,
so that its data and what it remembers stay there; what clients reply becomes the same on all ranks before the server
sees it. Without `torch.distributed` there is one rank, and nothing here does anything.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def start() -> None:
    """Join the ranks that `torchrun` has started, if it has."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(dist.destroy_process_group)


def size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if size() > 1 else 0


def mine(client: int) -> bool:
    return client % size() == rank()


def device(name: str) -> str:
    """Ranks of one machine have a GPU each."""
    if name != "cuda" or size() == 1:
        return name
    here = int(os.environ.get("LOCAL_RANK", rank()))
    torch.cuda.set_device(here)
    return f"cuda:{here}"


def gather(value: T) -> list[T]:
    """Every rank's value, on all of them."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found


def agree(run: Callable[[], T]) -> list[T]:
    """What `run` gives on every rank; where it fails on one of them it fails on all, with that error."""
    if size() == 1:
        return [run()]
    found: Any = None
    error: Exception | None = None
    try:
        found = run()
    except Exception as failed:
        error = failed
    everyone = gather((found, _portable(error)))
    for here, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise (error if error is not None and here == rank() else reason)
    return [value for value, _ in everyone]


@contextmanager
def together() -> Iterator[None]:
    """The same for a block without a value."""
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed

    def run() -> None:
        if error is not None:
            raise error

    agree(run)


def first(run: Callable[[], T]) -> T:
    """What `run` gives on the first rank; the others do not run it."""
    return agree(lambda: run() if rank() == 0 else None)[0]  # type: ignore[return-value]


def total(values: Any) -> Any:
    """The sum over the ranks of a nest of tensors, by one all-reduce for each dtype in it (there is one, as a rule)."""
    leaves, form = pytree.tree_flatten(values)
    groups: dict[torch.dtype, list[int]] = defaultdict(list)
    for place, leaf in enumerate(leaves):
        groups[leaf.dtype].append(place)
    for places in groups.values():
        buffer = torch.cat([leaves[place].reshape(-1) for place in places])
        dist.all_reduce(buffer)
        parts = buffer.split([leaves[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            leaves[place] = part.reshape(leaves[place].shape)
    return pytree.tree_unflatten(leaves, form)


def sent(values: T, to: str) -> T:
    """A nest with its tensors elsewhere: "cpu" to send them, "meta" to send their shapes alone."""
    return pytree.tree_map(lambda t: t.to(to) if isinstance(t, Tensor) else t, values)  # type: ignore[no-any-return]


def _portable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of the reader's own, with arguments of its own
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
