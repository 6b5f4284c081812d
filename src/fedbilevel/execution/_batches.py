"""Where the batches of a client task are drawn.

Draws are keyed: they depend on the key of the task, the side, the step and the number of the draw,
and on nothing else. Within a step samples are drawn without replacement, across steps draws are
independent. `stacked/_batches.py` draws the same batches for a stack of clients.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedbilevel.core.client_data import Batch, Data, named_tensors, repack
from fedbilevel.core.rng import fold_in, rows
from fedbilevel.federation.phase import Phase, Sides

SIDES: dict[Sides, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val",),
    "both": ("train", "val"),
}

# Streams of a task's key. The sides draw from 0 and 1, simulated delays and faults from 3 to 5.
LOSS_STREAM = 2
STAGE_STREAM = 6


def phase_batch_size(phase: Phase, batch_size: int | None) -> int | None:
    """Return the samples per batch: all (None) if the phase asks for that, else `batch_size`."""
    if phase.full:
        return None
    return batch_size


class TaskBatches:
    """The batches of one client task.

    Args:
        key: The root of the task's draws.
        data: The samples of each side, in the order of their streams.
        batch_size: Samples per batch; None for every sample.
        draws: The number of independent batches per step.
        epochs: Whether steps pass over the samples in a shuffled order.
        paired: Whether both sides draw the same samples.
        batch_type: `Batch`, or `FeatureBatch` if the samples are embedded.

    Attributes:
        samples: The number of samples drawn so far.
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
        batch_type: type[Batch] = Batch,
    ) -> None:
        self.key = key
        self.data = data
        self.batch_size = batch_size
        self.draws = draws
        self.epochs = epochs
        self.paired = paired
        self.batch_type = batch_type
        self.samples = 0

    def at(self, step: int) -> Batch | tuple[Batch, ...]:
        """Draw the batch of a step, or a tuple of independent ones if there are several draws."""
        batches = tuple(self._batch(step, draw) for draw in range(self.draws))
        if self.draws > 1:
            return batches
        return batches[0]

    def _batch(self, step: int, draw: int) -> Batch:
        sides = {}
        for stream, (side, data) in enumerate(self.data.items()):
            if self.paired:
                stream = 0
            sides[side] = self._side(data, stream, step, draw)
        return self.batch_type(**sides, rng=self._key(LOSS_STREAM, step, draw))

    def _side(self, data: Data, stream: int, step: int, draw: int) -> Data:
        size = len(named_tensors(data)[0][1])
        count = min(self.batch_size or size, size)
        if count == size:
            self.samples += size
            return data
        if self.epochs:
            batches_per_epoch = -(-size // count)
            epoch, number = divmod(step, batches_per_epoch)
            order = rows(self._key(stream, epoch, draw), size, size)
            indices = order[number * count : (number + 1) * count]
        else:
            indices = rows(self._key(stream, step, draw), size, count)
        self.samples += len(indices)
        return repack(data, [tensor[indices] for _, tensor in named_tensors(data)])

    def _key(self, stream: int, turn: int, draw: int) -> Tensor:
        """Return the key of a draw; `turn` counts steps, or epochs."""
        return fold_in(fold_in(fold_in(self.key, stream), turn), draw)
