"""Where the samples of a stack of clients are stored: in one pool, or client by client.

In a pool, the samples of many clients lie one after the other in the same tensors. A batch of the
whole stack is then one indexing operation per tensor, instead of one per tensor and client.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedbilevel.core.client_data import ClientData, Data, named_tensors, repack
from fedbilevel.core.devices import constant, to_device


class SeparateSamples:
    """One side of the data of a stack of clients, each client's in its own tensors."""

    def __init__(self, data: Sequence[Data]) -> None:
        self.container = data[0]
        by_client = [[tensor for _, tensor in named_tensors(each)] for each in data]
        self.columns = list(zip(*by_client, strict=True))

    def select(self, indices: Tensor | None) -> Data:
        """Return the samples with these indices as a stack.

        Args:
            indices: A row per client, for the first clients of the stack or for all of them; None
                selects all samples of all clients, who must hold equally many.
        """
        if indices is None:
            return repack(self.container, [torch.stack(column) for column in self.columns])
        rows = indices.unbind()
        selected = []
        for column in self.columns:
            stack = column[0].new_empty((*indices.shape, *column[0].shape[1:]))
            for tensor, row, out in zip(column, rows, stack, strict=False):
                torch.index_select(tensor, 0, row, out=out)
            selected.append(stack)
        return repack(self.container, selected)


class Pool:
    """One side of the data of clients with the same layout, one client after the other.

    A client's samples are copied into the pool when they are first needed. When `max_bytes` are
    full, the pool starts over with the clients that are needed then.

    Args:
        max_bytes: Bytes that the pool may take; with 0 it holds the clients of the last `load`.
        device: Where the pool is.

    Attributes:
        tensors: The samples of all clients in the pool; rows from `used` on are free.
        starts: The row at which each client's samples begin, by the client's number.
    """

    container: Data  # of the same type as the data of each client

    def __init__(self, max_bytes: int, device: str) -> None:
        self.max_bytes = max_bytes
        self.device = device
        self.tensors: list[Tensor] = []
        self.used = 0
        self.starts: dict[int, int] = {}
        self._last_view: tuple[tuple[int, int], Data] | None = None

    def load(self, data: Mapping[int, Data]) -> None:
        """Copy the samples of these clients into the pool, unless they are there already."""
        missing = [client for client in data if client not in self.starts]
        if not missing:
            return
        self._last_view = None
        self.container = next(iter(data.values()))
        templates = [tensor for _, tensor in named_tensors(self.container)]
        bytes_per_row = sum(tensor[:1].nbytes for tensor in templates)
        max_rows = self.max_bytes // max(bytes_per_row, 1)
        new_rows = sum(_size(data[client]) for client in missing)
        if self.starts and self.used + new_rows > max_rows:
            self.starts = {}
            self.used = 0
            missing = list(data)
            new_rows = sum(map(_size, data.values()))
        self._reserve(templates, self.used + new_rows, max_rows)
        by_client = [[tensor for _, tensor in named_tensors(data[client])] for client in missing]
        for pooled, column in zip(self.tensors, zip(*by_client, strict=True), strict=True):
            new = pooled[self.used : self.used + new_rows]
            torch.cat([tensor.to(self.device) for tensor in column], out=new)
        for client in missing:
            self.starts[client] = self.used
            self.used += _size(data[client])

    def _reserve(self, templates: Sequence[Tensor], rows: int, max_rows: int) -> None:
        """Make room for so many rows; a pool that grows doubles in size, as far as it may."""
        if self.tensors and rows <= len(self.tensors[0]):
            return
        capacity = max(rows, min(2 * rows, max_rows))
        grown = [
            torch.empty((capacity, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
            for tensor in templates
        ]
        for old, new in zip(self.tensors, grown, strict=False):
            new[: self.used] = old[: self.used]
        self.tensors = grown

    def select(self, indices: Tensor | None, starts: Tensor, size: int) -> Data:
        """Return the samples of a stack of clients with these indices.

        Args:
            indices: A row per client of indices among its own samples, for the first clients of the
                stack or for all of them; None selects the first `size` samples of every client.
            starts: The row of the pool at which each client's samples begin.
            size: Used if `indices` is None.
        """
        if indices is None:
            if starts.shape[0] == 1 and not starts.is_cuda:
                return self._view(int(starts), size)
            indices = torch.arange(size, device=starts.device).expand(len(starts), size)
        rows = (starts[: len(indices)].unsqueeze(-1) + indices).flatten()
        selected = [_select_rows(t, rows).unflatten(0, indices.shape) for t in self.tensors]
        return repack(self.container, selected)

    def _view(self, start: int, size: int) -> Data:
        """Return consecutive samples as a stack of one client; a view, kept for the next round."""
        if self._last_view is None or self._last_view[0] != (start, size):
            views = [tensor[start : start + size].unsqueeze(0) for tensor in self.tensors]
            self._last_view = (start, size), repack(self.container, views)
        return self._last_view[1]


def _size(data: Data) -> int:
    return len(named_tensors(data)[0][1])


def _select_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    if tensor.is_cuda and tensor.ndim == 1:
        return tensor.take(rows)  # faster on a GPU for single numbers, slower on a CPU
    return tensor.index_select(0, rows)


class Pools:
    """A pool for each side and layout of the clients' data.

    Args:
        max_bytes: Twice the bytes that each pool may take: one pool per side, as a rule.
        device: Where the pools are.
    """

    def __init__(self, max_bytes: int, device: str) -> None:
        self.max_bytes = max_bytes
        self.device = device
        self.pools: dict[Hashable, Pool] = {}
        self._slices: WeakKeyDictionary[ClientData, dict[str, StorageSlice | None]]
        self._slices = WeakKeyDictionary()
        self._shared: dict[str, tuple[Hashable, Pool]] = {}  # by side, the last pool of views

    def view_shared_storage(
        self, side: str, clients: Sequence[ClientData]
    ) -> tuple[Pool, Tensor] | None:
        """Return a pool without copies, if the clients' tensors are slices of the same tensors.

        Learning tasks split one data set into clients, so theirs are.

        Returns:
            The pool and the row at which each client's samples begin; None if they do not share
            their storage.
        """
        slices = []
        for client in clients:
            if client not in self._slices:
                self._slices[client] = {
                    "train": _storage_slice(client.train),
                    "val": _storage_slice(client.val),
                }
            slices.append(self._slices[client][side])
        starts = []
        for each in slices:
            if each is None or slices[0] is None or each.storages != slices[0].storages:
                return None
            starts.append(each.start)
        assert slices[0] is not None
        key = (slices[0].storages, clients[0].layouts[side])
        # The last pool keeps its storages alive, so that equal addresses are the same storages.
        if side not in self._shared or self._shared[side][0] != key:
            self._shared[side] = key, _pool_of_views(getattr(clients[0], side))
        return self._shared[side][1], constant(tuple(starts), self.device, torch.int64)

    def load(
        self, side: str, numbers: Sequence[int], clients: Sequence[ClientData]
    ) -> tuple[Pool, Tensor]:
        """Copy the samples of these clients into their pool.

        Args:
            side: "train" or "val".
            numbers: The number of each client.
            clients: The data of each client, all of the same layout.

        Returns:
            The pool and the row at which each client's samples begin.
        """
        _, layout = clients[0].layouts[side]
        pool = self.pools.setdefault((side, layout), Pool(self.max_bytes // 2, self.device))
        data = [getattr(client, side) for client in clients]
        pool.load(dict(zip(numbers, data, strict=True)))
        return pool, to_device([pool.starts[number] for number in numbers], self.device)


def _pool_of_views(data: Data) -> Pool:
    """Return a pool of the tensors that one client's samples are slices of, for `select` only."""
    pool = Pool(0, "cpu")
    pool.container = data
    for _, tensor in named_tensors(data):
        numbers_per_row = tensor.stride(0)
        rows = tensor.untyped_storage().nbytes() // tensor.itemsize // numbers_per_row
        pool.tensors.append(tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride(), 0))
    return pool


class StorageSlice(NamedTuple):
    """Consecutive samples within larger tensors: which storages, and the first sample's row."""

    storages: Hashable
    start: int


def _storage_slice(data: Data) -> StorageSlice | None:
    """Return the slice that one side of a client's data is, or None if it is not a slice."""
    starts = set()
    storages = []
    for _, tensor in named_tensors(data):
        # A tensor with a single sample may have any stride, hence the second condition.
        if not tensor.is_contiguous() or tensor.stride(0) != tensor[0].numel():
            return None
        starts.add(divmod(int(tensor.storage_offset()), tensor.stride(0) or 1))
        # Storages of two NumPy arrays may begin at one address and differ in length.
        storage = tensor.untyped_storage()
        storages.append((storage.data_ptr(), storage.nbytes(), tensor.stride()))
    start, remainder = starts.pop()
    if starts or remainder:
        return None
    return StorageSlice(tuple(storages), start)
