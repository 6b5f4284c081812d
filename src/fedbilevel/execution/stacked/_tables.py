"""Tables of features: what is embedded once for a stack of clients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbilevel.core.problem import Data, Problem, leaves, like
from fedbilevel.core.tree import Tree
from fedbilevel.execution._features import embedded


class Tables:
    """The features of a stack of clients, for as long as the next tasks are for the same clients at the same x.

    A server that sends one x in several messages sends the same object, so that no numbers need be compared.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.last: dict[str, tuple[list[Tree], list[int], Data]] = {}

    def find(
        self, side: str, at: list[Tree], numbers: list[int], data: Sequence[Data], batch: int
    ) -> Data:
        """Of these clients, who hold as many samples, each at its x."""
        before, clients, table = self.last.get(side, ([], [], ()))
        if clients != numbers or any(x is not other for x, other in zip(at, before, strict=True)):
            each = [
                embedded(self.problem, x, held, batch) for x, held in zip(at, data, strict=True)
            ]
            columns = zip(*([tensor for _, tensor in leaves(found)] for found in each), strict=True)
            table = like(each[0], [torch.stack(column) for column in columns])
            self.last[side] = at, numbers, table
        return table


def look_up(table: Data, indices: Tensor | None) -> Data:
    """A row of samples for each of the first clients; None: all samples of all clients."""
    if indices is None:
        return table
    count = leaves(table)[0][1].shape[1]
    places = (
        torch.arange(len(indices), device=indices.device).unsqueeze(-1) * count + indices
    ).flatten()
    found = [
        tensor.flatten(0, 1).index_select(0, places).unflatten(0, indices.shape)
        for _, tensor in leaves(table)
    ]
    return like(table, found)
