"""Batches of a stack: which random draws they come from, however many are drawn ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedbilevel.core.rng import fold_in, rows
from fedbilevel.execution.stacked import _batches as batches
from fedbilevel.execution.stacked._batches import SideSizes, StackBatches

KEYS = torch.tensor([3, 5])
SIZES = {"train": SideSizes(2, 6, torch.tensor([5, 6])), "val": SideSizes(3, 4, ())}


def key(stream: int, turn: int, draw: int) -> Tensor:
    return fold_in(fold_in(fold_in(KEYS, stream), turn), draw)


def expected_indices(stream: int, step: int, draw: int, sizes: SideSizes, epochs: bool) -> Tensor:
    """The samples that each client draws; in epochs, a part of a shuffled order."""
    each = None if isinstance(sizes.each, tuple) else sizes.each
    if not epochs:
        return rows(key(stream, step, draw), sizes.largest, sizes.batch, each)
    steps_per_epoch = -(-sizes.largest // sizes.batch)
    epoch, part = divmod(step, steps_per_epoch)
    order = rows(key(stream, epoch, draw), sizes.largest, sizes.largest, each)
    return order[:, part * sizes.batch : (part + 1) * sizes.batch]


@pytest.mark.parametrize(("epochs", "paired"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("lookahead", [1, 5, 30, 1 << 22])
def test_draws_depend_on_client_side_step_and_draw_alone(
    lookahead: int, epochs: bool, paired: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(batches, "LOOKAHEAD_WORDS", lookahead)
    found = StackBatches(
        KEYS,
        SIZES,
        lambda _, indices: (indices,),
        steps=7,
        draws=2,
        epochs=epochs,
        paired=paired,
    )
    for step in range(7):
        for draw, batch in enumerate(found.at(step, 2)):
            assert torch.equal(batch.rng, key(2, step, draw))
            for side_stream, side in enumerate(("train", "val")):
                stream = 0 if paired else side_stream
                expected = expected_indices(stream, step, draw, SIZES[side], epochs)
                assert torch.equal(getattr(batch, side)[0], expected)
