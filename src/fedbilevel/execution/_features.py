"""What depends on x alone, evaluated once for tasks in which x stays as it was sent."""

from __future__ import annotations

import torch

from fedbilevel.core.problem import Data, Problem, leaves, like
from fedbilevel.core.tree import Tree
from fedbilevel.federation.task import Broadcast


def embeds_beforehand(problem: Problem, broadcast: Broadcast, batch_size: int | None) -> bool:
    """Whether every sample is embedded once before the first step: where x stays and every sample is used."""
    phase = broadcast.phase
    every_sample = phase.full or batch_size is None or phase.epochs is not None
    return phase.fixed_x and every_sample and problem.embeds_samples and "x" in broadcast.message


def embedded(problem: Problem, x: Tree, data: Data, batch: int) -> Data:
    """All samples of one client, a batch at a time: a client need not hold more of them at once."""
    assert problem.embed
    pieces = zip(*(tensor.split(batch) for _, tensor in leaves(data)), strict=True)
    found = [problem.embed(x, like(data, list(piece)), ()) for piece in pieces]
    columns = zip(*([tensor for _, tensor in leaves(each)] for each in found), strict=True)
    return like(
        found[0], [column[0] if len(column) == 1 else torch.cat(column) for column in columns]
    )
