"""Mini-batches of a stack of clients: keyed, without replacement within a step, independent across steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.problem import Batch, ClientData, Data, leaves, like
from fedbilevel.rng import fold_in, rows

Sides = Literal["train", "val", "both", "full"]


class Batches:
    """Draws for clients whose batches have one shape (`shape` says which do)."""

    def __init__(
        self, clients: Sequence[ClientData], keys: Tensor, sides: Sides, size: int | None, draws: int, device: str
    ) -> None:
        self.clients, self.keys, self.draws, self.device = clients, keys, draws, device
        self.size = None if sides == "full" else size
        self.sides = ("train", "val") if sides in ("both", "full") else (sides,)
        self.samples = draws * sum(_count(clients[0], side, self.size) for side in self.sides)
        self._full: dict[str, Data] = {}

    def at(self, k: int, active: int) -> Any:
        """The batches of step k, for the first `active` clients."""
        keys = fold_in(self.keys[:active], k)
        drawn = []
        for draw in range(self.draws):
            key = fold_in(keys, draw)
            parts = {side: self._side(side, fold_in(key, j), active) for j, side in enumerate(self.sides)}
            drawn.append(Batch(**parts, rng=fold_in(key, 2).to(self.device)))
        return tuple(drawn) if self.draws > 1 else drawn[0]

    def _side(self, side: str, keys: Tensor, active: int) -> Data:
        sizes = [client.size(side) for client in self.clients[:active]]
        count = _count(self.clients[0], side, self.size)
        if count == sizes[0]:
            if side not in self._full:
                self._full[side] = self._gather(side, [slice(None)] * len(self.clients))
            return like(self._full[side], [stack[:active] for _, stack in leaves(self._full[side])])
        return self._gather(side, list(rows(keys, sizes, count)))

    def _gather(self, side: str, indices: Sequence[slice | Tensor]) -> Data:
        data = [getattr(client, side) for client, _ in zip(self.clients, indices, strict=False)]
        columns = zip(*([tensor for _, tensor in leaves(d)] for d in data), strict=True)
        stacks = [torch.stack([tensor[i] for tensor, i in zip(column, indices, strict=True)]) for column in columns]
        return like(data[0], [stack.to(self.device) for stack in stacks])


def _count(client: ClientData, side: str, size: int | None) -> int:
    """Samples a batch; a batch larger than the client's data is its full batch."""
    return client.size(side) if size is None else min(size, client.size(side))


def shape(client: ClientData, sides: Sides, size: int | None) -> Hashable:
    """Clients of equal shape can be stacked: their batches hold as many samples, of the same form."""
    size = None if sides == "full" else size
    names = ("train", "val") if sides in ("both", "full") else (sides,)
    return tuple(
        (count := _count(client, side, size), count == client.size(side), name, tensor.shape[1:], tensor.dtype)
        for side in names
        for name, tensor in leaves(getattr(client, side))
    )
