"""Mini-batches of a stack of clients: keyed, without replacement within a step, independent across steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.problem import Batch, ClientData, Data, leaves, like
from fedbilevel.rng import fold_in, rows

Sides = Literal["train", "val", "both"]
SIDES: dict[Sides, tuple[str, ...]] = {"train": ("train",), "val": ("val",), "both": ("train", "val")}


class Batches:
    """Draws for clients whose batches have one shape (`shape` says which do); `size` None is the full batch.

    paired: both sides draw the same samples.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        keys: Tensor,
        sides: Sides,
        size: int | None,
        *,
        draws: int = 1,
        epochs: bool = False,
        paired: bool = False,
        device: str = "cpu",
    ) -> None:
        self.clients, self.keys, self.sides, self.size = clients, keys, SIDES[sides], size
        self.draws, self.epochs, self.paired, self.device = draws, epochs, paired, device
        self.samples = 0  # drawn so far, by each client that is still active
        self._full: dict[str, Data] = {}

    def at(self, k: int, active: int) -> Any:
        """The batches of step k, for the first `active` clients."""
        keys = self.keys[:active]
        drawn = []
        for draw in range(self.draws):
            streams = [0 if self.paired else j for j in range(len(self.sides))]
            parts = {
                side: self._side(side, fold_in(keys, stream), k, draw, active)
                for stream, side in zip(streams, self.sides, strict=True)
            }
            rng = fold_in(fold_in(fold_in(keys, 2), k), draw)
            drawn.append(Batch(**parts, rng=rng.to(self.device)))
        return tuple(drawn) if self.draws > 1 else drawn[0]

    def _side(self, side: str, keys: Tensor, k: int, draw: int, active: int) -> Data:
        sizes = [client.size(side) for client in self.clients[:active]]
        count = _count(self.clients[0], side, self.size)
        if count == sizes[0]:
            if side not in self._full:
                self._full[side] = self._gather(side, [slice(None)] * len(self.clients))
            self.samples += count
            return like(self._full[side], [stack[:active] for _, stack in leaves(self._full[side])])
        if self.epochs:
            epoch, place = divmod(k, -(-sizes[0] // count))
            order = rows(fold_in(fold_in(keys, epoch), draw), sizes, sizes[0])
            chosen = order[:, place * count : (place + 1) * count]
        else:
            chosen = rows(fold_in(fold_in(keys, k), draw), sizes, count)
        self.samples += chosen.shape[1]
        return self._gather(side, list(chosen))

    def _gather(self, side: str, indices: Sequence[slice | Tensor]) -> Data:
        data = [getattr(client, side) for client, _ in zip(self.clients, indices, strict=False)]
        columns = zip(*([tensor for _, tensor in leaves(d)] for d in data), strict=True)
        stacks = [torch.stack([tensor[i] for tensor, i in zip(column, indices, strict=True)]) for column in columns]
        return like(data[0], [stack.to(self.device) for stack in stacks])


def _count(client: ClientData, side: str, size: int | None) -> int:
    """Samples a batch; a batch larger than the client's data is its full batch."""
    return client.size(side) if size is None else min(size, client.size(side))


def passes(samples: int, size: int | None, epochs: int) -> int:
    """Steps that so many passes over so many samples take."""
    return epochs * -(-samples // min(size or samples, samples))


def shape(client: ClientData, sides: Sides, size: int | None, epochs: bool = False) -> Hashable:
    """Clients of equal shape can be stacked: their batches hold as many samples, of the same form."""
    return tuple(
        (
            client.size(side) if epochs else None,
            count := _count(client, side, size),
            count == client.size(side),
            name,
            tensor.shape[1:],
            tensor.dtype,
        )
        for side in SIDES[sides]
        for name, tensor in leaves(getattr(client, side))
    )
