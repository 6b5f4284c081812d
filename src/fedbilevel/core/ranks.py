"""Runs on several processes: a thin layer over `torch.distributed`.

Every rank runs the same server program on the same state. The tasks of client i always run on rank
i mod (number of ranks), so that the client's data and memory stay there. Replies, or their sums,
are exchanged before the server sees them, and are then the same on all ranks. Where
`torch.distributed` is not initialized there is one rank, and nothing is communicated.

Examples:
    >>> from fedbilevel.core import ranks
    >>> ranks.size(), ranks.rank(), ranks.is_local(5)
    (1, 0, True)
    >>> ranks.all_gather("value")
    ['value']
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def initialize() -> None:
    """Join the process group of `torchrun`; do nothing in a process that `torchrun` did not start.

    The group is left when the process exits.

    Examples:
        >>> initialize()
        >>> size()
        1
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    atexit.register(dist.destroy_process_group)


def size() -> int:
    """Return the number of ranks.

    Returns:
        The world size of `torch.distributed`; 1 where it is not initialized.

    Examples:
        >>> size()
        1
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """Return the index of this process among the ranks.

    Returns:
        A number from 0 to size() - 1; 0 where `torch.distributed` is not initialized.

    Examples:
        >>> rank()
        0
    """
    if size() > 1:
        return dist.get_rank()
    return 0


def is_local(client: int) -> bool:
    """Return whether the tasks of a client run on this rank.

    Args:
        client: The index of the client.

    Returns:
        Whether `client` modulo the number of ranks is the index of this rank.

    Examples:
        >>> is_local(3)
        True
    """
    return client % size() == rank()


def local_device(name: str) -> str:
    """Return this rank's own device, and make it current if it is a GPU.

    Args:
        name: "cpu", "cuda" or "cuda:N".

    Returns:
        With several ranks, "cuda" becomes "cuda:N", a different GPU for every rank of a machine.
        Every other name is returned as it is.

    Examples:
        >>> local_device("cpu")
        'cpu'
    """
    if name != "cuda" or size() == 1:
        return name
    index = int(os.environ.get("LOCAL_RANK", rank()))
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def all_gather(value: T) -> list[T]:
    """Exchange a value between all ranks.

    Args:
        value: This rank's value; it must be possible to pickle it.

    Returns:
        The values of all ranks in their order, the same list on every rank.

    Examples:
        >>> all_gather("value")
        ['value']
    """
    if size() == 1:
        return [value]
    values: list[T | None] = [None] * size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def on_all_ranks(compute: Callable[[], T]) -> list[T]:
    """Call a function on every rank and exchange the results; an error is raised on all ranks.

    Otherwise the ranks that did not fail would wait forever for the one that did.

    Args:
        compute: The function; every rank must make this call.

    Returns:
        The results of all ranks in their order.

    Raises:
        Exception: What `compute` raised on the first rank on which it failed. An exception that
            cannot be pickled is a `RuntimeError` with its message on the other ranks.

    Examples:
        >>> on_all_ranks(lambda: 2 + 3)
        [5]
    """
    if size() == 1:
        return [compute()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = compute()
    except Exception as raised:
        error = raised
    results = []
    for source, (value, remote_error) in enumerate(all_gather((result, _picklable(error)))):
        if source == rank() and error is not None:
            raise error  # with its traceback, which the pickled one has lost
        if remote_error is not None:
            raise remote_error
        results.append(value)
    return results  # type: ignore[return-value]


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise an exception of the `with` block on all ranks, even if it occurs on one of them.

    Every rank must enter and leave the block.

    Yields:
        Nothing.

    Raises:
        Exception: What the block raised on the first rank on which it failed.

    Examples:
        >>> with fail_together():
        ...     folder = "created by the first rank"
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised

    def raise_error() -> None:
        if error is not None:
            raise error

    on_all_ranks(raise_error)


def on_first_rank(compute: Callable[[], T]) -> T:
    """Call a function on the first rank only, and return its result on all ranks.

    Args:
        compute: The function. Every rank must make this call, and the first one runs it.

    Returns:
        The result of the first rank.

    Raises:
        Exception: What `compute` raised, on all ranks.

    Examples:
        >>> on_first_rank(lambda: 2 + 3)
        5
    """

    def compute_if_first() -> T | None:
        if rank() == 0:
            return compute()
        return None

    return on_all_ranks(compute_if_first)[0]  # type: ignore[return-value]


def all_reduce_sum(values: T) -> T:
    """Add up tensors over all ranks, with one all-reduce per dtype.

    Args:
        values: A nest (tuples, lists, dicts, trees) of tensors, with the same structure and shapes
            on every rank.

    Returns:
        A nest of the same structure with the sums.

    Examples:
        >>> all_reduce_sum({"total": torch.tensor(3.0)})  # with one rank
        {'total': tensor(3.)}
    """
    if size() == 1:
        return values
    leaves, structure = pytree.tree_flatten(values)
    indices_by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        indices_by_dtype[leaf.dtype].append(index)
    for indices in indices_by_dtype.values():
        buffer = torch.cat([leaves[index].reshape(-1) for index in indices])
        dist.all_reduce(buffer)
        parts = buffer.split([leaves[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            leaves[index] = part.reshape(leaves[index].shape)
    return pytree.tree_unflatten(leaves, structure)  # type: ignore[no-any-return]


def move_tensors(values: T, device: str) -> T:
    """Move all tensors of a nested value to a device.

    Args:
        values: A nest of tensors and other values, which stay as they are.
        device: The device; "cpu" before tensors are sent to other ranks, "meta" where only their
            shapes and dtypes are needed.

    Returns:
        A nest of the same structure.

    Examples:
        >>> move_tensors({"a": torch.ones(2), "n": 3}, "meta")
        {'a': tensor(..., device='meta', size=(2,)), 'n': 3}
    """

    def move(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return leaf.to(device)
        return leaf

    return pytree.tree_map(move, values)  # type: ignore[no-any-return]


def _picklable(error: Exception | None) -> Exception | None:
    """The error, or a RuntimeError with its message if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # classes outside the standard library may take arguments that pickle drops
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
