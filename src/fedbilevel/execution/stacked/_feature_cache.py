"""The features of a stack of clients, kept for the next task at the same x."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbilevel.core.client_data import Data, named_tensors, repack
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.execution._features import embed_samples


class FeatureCache:
    """Embeds the samples of a stack of clients, unless it did so in the previous task.

    A server that sends one x in several messages sends the same object, so that objects are
    compared and not numbers.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._last: dict[str, tuple[list[Tree], list[int], Data]] = {}

    def features(
        self, side: str, xs: list[Tree], numbers: list[int], data: Sequence[Data], batch_size: int
    ) -> Data:
        """Return the features of all samples of a stack of clients on one side, stacked.

        Args:
            side: "train" or "val".
            xs: The x that each client was sent.
            numbers: The number of each client.
            data: The samples of each client; all hold equally many.
            batch_size: How many samples are embedded at once.
        """
        last_xs, last_numbers, features = self._last.get(side, ([], [], ()))
        same_clients = numbers == last_numbers
        if not same_clients or any(x is not last for x, last in zip(xs, last_xs, strict=True)):
            by_client = [
                embed_samples(self.problem, x, samples, batch_size)
                for x, samples in zip(xs, data, strict=True)
            ]
            tensors = [[tensor for _, tensor in named_tensors(each)] for each in by_client]
            stacks = [torch.stack(column) for column in zip(*tensors, strict=True)]
            features = repack(by_client[0], stacks)
            self._last[side] = xs, numbers, features
        return features


def select_features(features: Data, indices: Tensor | None) -> Data:
    """Return the features of the samples with these indices.

    Args:
        features: A stack with axes for clients and for samples.
        indices: A row for each of the first clients; None selects everything.
    """
    if indices is None:
        return features
    samples_per_client = named_tensors(features)[0][1].shape[1]
    first_rows = torch.arange(len(indices), device=indices.device) * samples_per_client
    rows = (first_rows.unsqueeze(-1) + indices).flatten()
    selected = [
        tensor.flatten(0, 1).index_select(0, rows).unflatten(0, indices.shape)
        for _, tensor in named_tensors(features)
    ]
    return repack(features, selected)
