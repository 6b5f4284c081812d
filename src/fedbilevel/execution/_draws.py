"""Mini-batches of one client: keyed, without replacement within a step, independent across steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedbilevel.core.problem import Batch, Data, leaves, like
from fedbilevel.core.rng import fold_in, rows
from fedbilevel.federation.phase import Sides

SIDES: dict[Sides, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val",),
    "both": ("train", "val"),
}
LOSSES = 2  # the stream that losses draw from; the sides draw from streams 0 and 1
STAGE_STREAM = 6  # of a task's key; 3 to 5 are the delays and faults of a simulated transport


class Draws:
    """The batches of one task.

    Args:
        key: the root of the task's draws.
        data: the samples of each side, in the order of their streams.
        batch_size: samples per batch; None is every sample.
        draws: independent batches per step.
        epochs: whether steps go through the samples in shuffled passes.
        paired: whether both sides draw the same samples.
        kind: what a batch is; `Features` where the samples are embedded.
    """

    def __init__(
        self,
        key: Tensor,
        data: Mapping[str, Data],
        batch_size: int | None,
        *,
        draws: int = 1,
        epochs: bool = False,
        paired: bool = False,
        kind: type[Batch] = Batch,
    ) -> None:
        self.key = key
        self.data = data
        self.batch_size = batch_size
        self.draws = draws
        self.epochs = epochs
        self.paired = paired
        self.kind = kind
        self.samples = 0  # drawn so far

    def at(self, step: int) -> Any:
        """The batch of a step, or a tuple of independent ones."""
        batches = tuple(self._batch(step, draw) for draw in range(self.draws))
        return batches if self.draws > 1 else batches[0]

    def _batch(self, step: int, draw: int) -> Batch:
        sides = {}
        for stream, (side, data) in enumerate(self.data.items()):
            sides[side] = self._side(data, 0 if self.paired else stream, step, draw)
        return self.kind(**sides, rng=self._key(LOSSES, step, draw))

    def _side(self, data: Data, stream: int, step: int, draw: int) -> Data:
        size = len(leaves(data)[0][1])
        count = min(self.batch_size or size, size)
        if count == size:
            self.samples += size
            return data
        if self.epochs:
            epoch, place = divmod(step, -(-size // count))
            order = rows(self._key(stream, epoch, draw), size, size)
            chosen = order[place * count : (place + 1) * count]
        else:
            chosen = rows(self._key(stream, step, draw), size, count)
        self.samples += len(chosen)
        return like(data, [tensor[chosen] for _, tensor in leaves(data)])

    def _key(self, stream: int, turn: int, draw: int) -> Tensor:
        return fold_in(fold_in(fold_in(self.key, stream), turn), draw)
