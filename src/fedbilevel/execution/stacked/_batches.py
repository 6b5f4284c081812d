"""Where the batches of a stack of clients are drawn.

They are the batches that `execution/_batches.py` draws client by client. Here the draws of all
clients, and of several steps, are made together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedbilevel.core.client_data import Batch, ClientData, Data, named_tensors, repack
from fedbilevel.core.devices import to_device
from fedbilevel.core.rng import fold_in_ranges, rows
from fedbilevel.execution._batches import LOSS_STREAM, SIDES
from fedbilevel.federation.phase import Sides

# Random words that are drawn at once: many steps together take little longer than one.
LOOKAHEAD_WORDS = 1 << 22

Lookahead = tuple[int, Tensor]  # the first of some consecutive turns, and what is drawn for them
RunFused = Callable[..., Any]  # (label, fn, *args) -> fn(*args), see StepRunner.run_fused

# (side, indices) -> samples: `indices` has a row for each of the first clients of a stack; None
# selects all samples of all clients.
SelectSamples = Callable[[str, Tensor | None], Data]


class SideSizes(NamedTuple):
    """How many samples the clients of a stack hold on one side."""

    batch: int  # samples per batch
    largest: int  # the most samples of any client
    each: Tensor | tuple[()]  # the samples of each client, empty if all hold equally many


def side_sizes(
    clients: Sequence[ClientData], sides: Sides, batch_size: int | None, device: str
) -> dict[str, SideSizes]:
    """Return the sizes of each side of a stack of clients with equal `batch_shape`."""
    sizes = {}
    for side in SIDES[sides]:
        counts = [client.size(side) for client in clients]
        largest = max(counts)
        each: Tensor | tuple[()] = ()
        if min(counts) < largest:
            each = to_device(counts, device)
        sizes[side] = SideSizes(min(batch_size or counts[0], counts[0]), largest, each)
    return sizes


class StackBatches:
    """The batches of a stack of clients.

    Args:
        keys: The key of each client's task.
        sizes: The number of samples on each side, in the order of their streams.
        select: Returns the samples of drawn indices.
        run_fused: Calls a function, in compiled form where that pays.
        steps: The steps of the longest task.
        draws: The number of independent batches per step.
        epochs: Whether steps pass over the samples in a shuffled order.
        paired: Whether both sides draw the same samples.

    Attributes:
        samples: The number of samples drawn so far by each client that is still active.
    """

    def __init__(
        self,
        keys: Tensor,
        sizes: Mapping[str, SideSizes],
        select: SelectSamples,
        run_fused: RunFused = lambda _, fn, *args: fn(*args),
        *,
        steps: int = 1,
        draws: int = 1,
        epochs: bool = False,
        paired: bool = False,
    ) -> None:
        self.keys = keys
        self.sizes = sizes
        self.select = select
        self.run_fused = run_fused
        self.steps = steps
        self.draws = draws
        self.epochs = epochs
        self.paired = paired
        self.samples = 0
        # Where no samples are drawn, keys are needed for the losses alone.
        drawn = any(count < size for count, size, _ in sizes.values())
        self.streams = range(0 if drawn else LOSS_STREAM, LOSS_STREAM + 1)
        self._full: dict[str, Data] = {}
        self._key_lookahead: Lookahead = (0, keys[:0].view(1, 0))
        self._index_lookahead: dict[tuple[str, int], Lookahead] = {}

    def at(self, step: int, active: int) -> Batch | tuple[Batch, ...]:
        """Draw the batch of a step, or a tuple of independent ones, for the first clients.

        Args:
            step: The number of the step.
            active: How many clients take this step.
        """
        batches = []
        for draw in range(self.draws):
            sides = {side: self._side(side, step, draw, active) for side in self.sizes}
            rng = self._keys_from(step)[-1, 0, draw, :active]
            batches.append(Batch(**sides, rng=rng))
        if self.draws > 1:
            return tuple(batches)
        return batches[0]

    def _side(self, side: str, step: int, draw: int, active: int) -> Data:
        count, size, _ = self.sizes[side]
        if count == size:
            if side not in self._full:
                self._full[side] = self.select(side, None)
            self.samples += count
            full = self._full[side]
            if active == self.keys.shape[0]:
                return full
            return repack(full, [stack[:active] for _, stack in named_tensors(full)])
        if self.epochs:
            batches_per_epoch = -(-size // count)
            epoch, number = divmod(step, batches_per_epoch)
            order = self._indices(side, epoch, draw)
            indices = order[:active, number * count : (number + 1) * count]
        else:
            indices = self._indices(side, step, draw)[:active, :count]
        self.samples += indices.shape[1]
        return self.select(side, indices)

    def _indices(self, side: str, turn: int, draw: int) -> Tensor:
        """Return the indices that all clients draw in one turn, which is a step or an epoch.

        They are drawn together with those of later turns.
        """
        first, ahead = self._index_lookahead.get((side, draw), (0, self.keys[:0]))
        if not first <= turn < first + len(ahead):
            first = turn
            ahead = self._draw_ahead(side, turn, draw)
            self._index_lookahead[side, draw] = first, ahead
        return ahead[turn - first]

    def _draw_ahead(self, side: str, turn: int, draw: int) -> Tensor:
        """Draw the indices of a turn and of as many later ones as `LOOKAHEAD_WORDS` allows."""
        count, size, each = self.sizes[side]
        turns = self.steps
        if self.epochs:
            batches_per_epoch = -(-size // count)
            turns = -(-self.steps // batches_per_epoch)
            count = size
        affordable = max(1, LOOKAHEAD_WORDS // (size * len(self.keys)))
        stream = 0 if self.paired else list(self.sizes).index(side)
        keys = self._keys_from(turn)[stream, : min(turns - turn, affordable), draw]

        def draw_rows(keys: Tensor, *each: Tensor) -> Tensor:
            return rows(keys, size, count, *each)

        unequal = () if isinstance(each, tuple) else (each,)
        indices: Tensor = self.run_fused(("rows", size, count), draw_rows, keys, *unequal)
        return indices

    def _keys_from(self, turn: int) -> Tensor:
        """Return keys by stream (the losses' last), turn (from this one on), draw and client."""
        first, ahead = self._key_lookahead
        if not first <= turn < first + ahead.shape[1]:
            last = min(self.steps, turn + max(1, LOOKAHEAD_WORDS // self.keys.shape[0]))

            def fold(keys: Tensor) -> Tensor:
                return fold_in_ranges(keys, self.streams, range(turn, last), range(self.draws))

            first = turn
            ahead = self.run_fused(("keys", self.streams, turn, last, self.draws), fold, self.keys)
            self._key_lookahead = first, ahead
        return ahead[:, turn - first :]


def batch_shape(
    client: ClientData, sides: Sequence[str], batch_size: int | None, epochs: bool = False
) -> Hashable:
    """Return the shape of a client's batches; clients with equal ones can be stacked."""
    shapes = []
    for side in sides:
        size, layout = client.layouts[side]
        count = size if batch_size is None else min(batch_size, size)
        # Epochs over unequal numbers of samples would take unequal numbers of steps.
        samples_per_epoch = size if epochs else None
        shapes.append((samples_per_epoch, count, count == size, layout))
    return tuple(shapes)
