"""Where the clients' samples lie: each client's by themselves, or those of many in one place."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedbilevel.core.devices import sent
from fedbilevel.core.problem import ClientData, Data, leaves, like


class Apart:
    """One side of the data of a stack of clients, where they were made."""

    def __init__(self, data: Sequence[Data]) -> None:
        self.like = data[0]
        self.columns = list(
            zip(*([tensor for _, tensor in leaves(held)] for held in data), strict=True)
        )

    def take(self, indices: Tensor | None) -> Data:
        if indices is None:
            return like(self.like, [torch.stack(column) for column in self.columns])
        each, found = indices.unbind(), []
        for column in self.columns:
            found.append(column[0].new_empty((*indices.shape, *column[0].shape[1:])))
            for tensor, chosen, place in zip(column, each, found[-1], strict=False):
                torch.index_select(tensor, 0, chosen, out=place)
        return like(self.like, found)


class Pool:
    """One side of the data of clients that hold the same kind of sample, one after the other.

    A batch of many clients is then one look-up in every tensor. A client comes in when it is first asked for; when
    `memory` bytes are full, the pool begins anew, with those who are asked for (with no memory, it holds those alone).
    """

    def __init__(self, memory: int, device: str) -> None:
        self.memory, self.device = memory, device
        self.tensors: list[Tensor] = []
        self.used = 0
        self.starts: dict[int, int] = {}

    def bring(self, data: dict[int, Data]) -> None:
        """See that the samples of these clients are all in the pool."""
        new = [i for i in data if i not in self.starts]
        if not new:
            return
        self.like = next(iter(data.values()))
        one = [tensor for _, tensor in leaves(self.like)]
        most = self.memory // max(sum(tensor[:1].nbytes for tensor in one), 1)
        more = sum(len(leaves(data[i])[0][1]) for i in new)
        if self.starts and self.used + more > most:
            self.starts, self.used, new = {}, 0, list(data)
            more = sum(len(leaves(side)[0][1]) for side in data.values())
        self._reserve(one, self.used + more, most)
        columns = zip(*([tensor for _, tensor in leaves(data[i])] for i in new), strict=True)
        for pooled, column in zip(self.tensors, columns, strict=True):
            torch.cat(
                [tensor.to(self.device) for tensor in column],
                out=pooled[self.used : self.used + more],
            )
        for i in new:
            self.starts[i] = self.used
            self.used += len(leaves(data[i])[0][1])

    def _reserve(self, one: list[Tensor], rows: int, most: int) -> None:
        if self.tensors and rows <= len(self.tensors[0]):
            return
        shape = max(rows, min(2 * rows, most))
        grown = [
            torch.empty((shape, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
            for tensor in one
        ]
        for old, tensor in zip(self.tensors, grown, strict=False):
            tensor[: self.used] = old[: self.used]
        self.tensors = grown

    def take(self, indices: Tensor | None, starts: Tensor, size: int) -> Data:
        """Samples of clients that begin there, by their places among the client's own; None is `size` of each."""
        if indices is None:
            indices = torch.arange(size, device=starts.device).expand(len(starts), size)
        places = (starts[: len(indices)].unsqueeze(-1) + indices).flatten()
        return like(
            self.like,
            [_rows(tensor, places).unflatten(0, indices.shape) for tensor in self.tensors],
        )


def _rows(tensor: Tensor, places: Tensor) -> Tensor:
    # Single numbers are looked up faster by the first on a GPU, and by the second on a CPU.
    return (
        tensor.take(places)
        if tensor.is_cuda and tensor.ndim == 1
        else tensor.index_select(0, places)
    )


class Pools:
    """A pool for each side and kind of sample."""

    def __init__(self, memory: int, device: str) -> None:
        self.memory, self.device = memory, device
        self.pools: dict[Hashable, Pool] = {}
        self._places: WeakKeyDictionary[ClientData, dict[str, Place]] = WeakKeyDictionary()

    def together(self, side: str, clients: Sequence[ClientData]) -> tuple[Pool, Tensor] | None:
        """A pool that needs no copies, where the clients' tensors are parts of one, as those of tasks are."""
        places = []
        for client in clients:
            if client not in self._places:
                self._places[client] = {
                    name: _place(getattr(client, name)) for name in ("train", "val")
                }
            places.append(self._places[client][side])
        whole = places[0].whole
        if whole is None or any(place.whole != whole for place in places):
            return None
        pool = Pool(0, "cpu")
        pool.like = getattr(clients[0], side)
        for _, first in leaves(pool.like):
            storage, width = first.untyped_storage(), first.stride(0)
            count = storage.nbytes() // first.itemsize // width
            pool.tensors.append(first.as_strided((count, *first.shape[1:]), first.stride(), 0))
        return pool, torch.tensor([place.start for place in places])

    def bring(
        self, side: str, numbers: Sequence[int], clients: Sequence[ClientData]
    ) -> tuple[Pool, Tensor]:
        """The pool of these clients, and where the samples of each begin in it."""
        kind = (side, clients[0].forms[side][1])
        pool = self.pools.setdefault(kind, Pool(self.memory // 2, self.device))
        pool.bring({i: getattr(client, side) for i, client in zip(numbers, clients, strict=True)})
        return pool, sent([pool.starts[i] for i in numbers], self.device)


class Place(NamedTuple):
    """The memory that the tensors of one side are parts of, None if they are not, and the sample they begin at."""

    whole: Hashable
    start: int


def _place(data: Data) -> Place:
    starts, whole = set(), []
    for _, t in leaves(data):
        starts.add(divmod(int(t.storage_offset()), t.stride(0) or 1))
        storage = t.untyped_storage()  # two of NumPy may begin alike and not end so
        whole.append((storage.data_ptr(), storage.nbytes(), t.stride()))
    start, off = next(iter(starts))
    dense = all(
        t.is_contiguous() and t.stride(0) == t[0].numel() for _, t in leaves(data)
    )  # one sample has any stride
    return Place(tuple(whole), start) if dense and len(starts) == 1 and not off else Place(None, 0)
