"""Features: the samples of a client embedded at one x, before the first step of a task.

If a phase never moves x and looks at every sample, running the backbone once over all samples is
cheaper than running it in every step.
"""

from __future__ import annotations

import torch

from fedbilevel.core.client_data import Data, named_tensors, repack
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.federation.task import Broadcast


def embeds_before_steps(problem: Problem, broadcast: Broadcast, batch_size: int | None) -> bool:
    """Tell whether a task embeds every sample once before its first step.

    It does if x stays as it was sent and the task uses every sample (full batches or epochs).
    """
    phase = broadcast.phase
    if problem.client_levels and "x" in problem.client_levels:
        return False  # every client has an x of its own
    every_sample = phase.full or batch_size is None or phase.epochs is not None
    return phase.fixed_x and every_sample and problem.embeds_samples and "x" in broadcast.message


def embed_samples(problem: Problem, x: Tree, data: Data, batch_size: int) -> Data:
    """Embed all samples of one client at x.

    The backbone sees `batch_size` samples at a time, so that a client needs no more memory than in
    a step on one batch.
    """
    assert problem.embed
    batches = zip(*(tensor.split(batch_size) for _, tensor in named_tensors(data)), strict=True)
    parts = [problem.embed(x, repack(data, list(batch)), ()) for batch in batches]
    columns = zip(*([tensor for _, tensor in named_tensors(part)] for part in parts), strict=True)
    features = [column[0] if len(column) == 1 else torch.cat(column) for column in columns]
    return repack(parts[0], features)
