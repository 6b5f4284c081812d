"""Mini-batches of a stack of clients: keyed, without replacement within a step, independent across steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel.core.devices import sent
from fedbilevel.core.problem import Batch, ClientData, Data, leaves, like
from fedbilevel.core.rng import fold_in, rows
from fedbilevel.execution._draws import SIDES
from fedbilevel.federation.phase import Sides

DRAWN = (
    1 << 22
)  # words of one look ahead: the draws of many steps cost little more than those of one

Ahead = tuple[int, Tensor]  # the first of some turns, and what belongs to each
Fused = Callable[..., Any]  # (what, fn, *args) -> fn(*args), which depends on tensors and on `what`
Take = Callable[
    [str, Tensor | None], Data
]  # a row of indices for each of the first clients; None: everything of all


class Extent(NamedTuple):
    """What a stack holds on one side: samples a batch, the most that a client has, and what each has if they differ."""

    batch: int
    most: int
    sizes: Tensor | tuple[()]


def extents(
    clients: Sequence[ClientData], sides: Sides, size: int | None, device: str
) -> dict[str, Extent]:
    """Of a stack of clients (`shape` says who can be in one), side by side; `size` None is the full batch."""
    found = {}
    for side in SIDES[sides]:
        held = [client.size(side) for client in clients]
        sizes = sent(held, device) if min(held) < max(held) else ()
        found[side] = Extent(min(size or held[0], held[0]), max(held), sizes)
    return found


class Batches:
    """Draws for a stack of clients, one key each.

    take: (side, indices) -> samples. paired: both sides draw the same ones.
    """

    def __init__(
        self,
        keys: Tensor,
        extents: Mapping[str, Extent],
        take: Take,
        fused: Fused = lambda _, fn, *args: fn(*args),
        *,
        steps: int = 1,
        draws: int = 1,
        epochs: bool = False,
        paired: bool = False,
    ) -> None:
        self.keys, self.extents, self.take, self.fused = keys, extents, take, fused
        self.steps, self.draws, self.epochs, self.paired = steps, draws, epochs, paired
        self.samples = 0  # drawn so far, by each client that is still active
        self._whole: dict[str, Data] = {}
        self._keys: Ahead = (0, keys[:0])
        self._indices: dict[tuple[str, int], Ahead] = {}

    def at(self, k: int, active: int) -> Any:
        """The batches of step k, for the first `active` clients."""
        drawn = []
        for draw in range(self.draws):
            parts = {side: self._side(side, k, draw, active) for side in self.extents}
            drawn.append(Batch(**parts, rng=self._keys_from(k)[0, 2, draw, :active]))
        return tuple(drawn) if self.draws > 1 else drawn[0]

    def _side(self, side: str, k: int, draw: int, active: int) -> Data:
        count, size, _ = self.extents[side]
        if count == size:
            if side not in self._whole:
                self._whole[side] = self.take(side, None)
            self.samples += count
            whole = self._whole[side]
            return like(whole, [stack[:active] for _, stack in leaves(whole)])
        epoch, place = divmod(k, -(-size // count)) if self.epochs else (k, 0)
        chosen = self._drawn(side, epoch, draw)[:active, place * count : (place + 1) * count]
        self.samples += chosen.shape[1]
        return self.take(side, chosen)

    def _drawn(self, side: str, turn: int, draw: int) -> Tensor:
        """What everyone draws in one step, or in one pass over the data, found with that of some to come."""
        first, ahead = self._indices.get((side, draw), (0, self.keys[:0]))
        if not first <= turn < first + len(ahead):
            count, size, sizes = self.extents[side]
            turns = -(-self.steps // -(-size // count)) if self.epochs else self.steps
            some = slice(min(turns - turn, max(1, DRAWN // (size * len(self.keys)))))
            keys = self._keys_from(turn)[
                some, 0 if self.paired else list(self.extents).index(side), draw
            ]
            numbers = (size, size if self.epochs else count)
            own = () if isinstance(sizes, tuple) else (sizes,)
            ahead = self.fused(
                ("rows", *numbers), lambda keys, *own: rows(keys, *numbers, *own), keys, *own
            )
            first, self._indices[side, draw] = turn, (turn, ahead)
        return ahead[turn - first]

    def _keys_from(self, turn: int) -> Tensor:
        """Keys of this turn and of some to come, by stream (two sides and the losses' own), draw and client."""
        first, ahead = self._keys
        if not first <= turn < first + len(ahead):
            last = min(self.steps, turn + max(1, DRAWN // len(self.keys)))

            def folded(keys: Tensor) -> Tensor:
                numbers = ((3,), (turn, last), (self.draws,))
                streams, turns, draws = (
                    torch.arange(*some, device=keys.device) for some in numbers
                )
                by_turn = fold_in(fold_in(keys, streams.view(-1, 1, 1)), turns.view(-1, 1, 1, 1))
                return fold_in(by_turn, draws.view(-1, 1))

            first, ahead = turn, self.fused(("keys", turn, last, self.draws), folded, self.keys)
            self._keys = first, ahead
        return ahead[turn - first :]


def shape(
    client: ClientData, sides: Sequence[str], size: int | None, epochs: bool = False
) -> Hashable:
    """Clients of equal shape can be stacked: their batches hold as many samples, of the same form."""
    found = []
    for side in sides:
        samples, form = client.forms[side]
        count = samples if size is None else min(size, samples)
        found.append((samples if epochs else None, count, count == samples, form))
    return tuple(found)
