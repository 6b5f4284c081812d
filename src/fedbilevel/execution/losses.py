"""The losses over the clients, by which a run is watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, ClientData, Data, Problem, leaves, like
from fedbilevel.core.rng import fold_in, root, rows, subset
from fedbilevel.core.tree import Tree
from fedbilevel.execution.lift import lifted, stacked
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client

CLIENTS, SAMPLES = 100, 2048


def chosen(
    seed: int, clients: int, most: int = CLIENTS, samples: int = SAMPLES
) -> tuple[list[int], int]:
    """Whose losses are evaluated, and on how many samples a level each."""
    found = subset(root(seed, "evaluation"), clients, min(clients, most))
    return found, -(-samples // len(found))


class ClientLosses:
    """One client's upper and lower loss, on at most `share` of its samples a level, drawn once."""

    def __init__(
        self,
        oracle: Oracle,
        data: ClientData,
        environment: Environment,
        seed: int,
        client: int,
        share: int,
        device: str,
    ) -> None:
        self.oracle, key = oracle, fold_in(root(seed, "evaluation"), client)
        data = oracle.problem.paired(data)
        episodes = oracle.problem.lower_level == "private"
        size = environment.batch_size or data.size("train") if episodes else share
        streams = fold_in(key, 0), fold_in(key, 0 if episodes else 1)
        drawn = Batch(_some(data.train, streams[0], size), _some(data.val, streams[1], size), key)
        for batch in (drawn if episodes else Batch(data.train, data.val, key), drawn):
            self.batch = pytree.tree_map(lambda t: t.to(device), batch)
            self(
                *oracle.problem.start, self.batch
            )  # a loss that fails on a client's data does so here, by name

    def __call__(self, x: Tree, y: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.oracle.upper(x, y, batch), self.oracle.lower(x, y, batch)


class Losses:
    """The upper and lower loss over the clients, weighted as the problem is; of episodes, at the y they start from.

    A federation can be too large to evaluate as a whole: at most `clients` of them, drawn once, are read, and about
    `samples` a level. Up to that size the losses are exact.
    """

    def __init__(
        self,
        problem: Problem,
        data: Sequence[ClientData],
        weights: Sequence[float],
        environment: Environment,
        *,
        seed: int,
        device: str,
        stack: bool = True,
        clients: int = CLIENTS,
        samples: int = SAMPLES,
    ) -> None:
        self.oracle = Oracle(problem)
        read, share = chosen(seed, len(data), clients, samples)
        groups: dict[Hashable, list[tuple[float, Batch]]] = defaultdict(list)
        for i in read:
            with on_client(i, "before round 1"):
                self.both = ClientLosses(self.oracle, data[i], environment, seed, i, share, device)
            batch = self.both.batch
            form = repr([t.shape for t in pytree.tree_leaves(batch)]) if stack else i
            groups[form].append((weights[i], batch))
        total = sum(weights[i] for i in read)
        self.groups = [
            (
                [p / total for p, _ in group],
                pytree.tree_map(lambda *ts: torch.stack(ts), *(batch for _, batch in group)),
            )
            for group in groups.values()
        ]

    def __call__(self, x: Tree, y: Tree) -> dict[str, float]:
        upper = lower = 0.0
        with torch.no_grad():
            for weights, batch in self.groups:
                if len(weights) == 1:
                    f, g = self.both(x, y, pytree.tree_map(lambda t: t[0], batch))
                else:
                    f, g = lifted(stacked, lambda b: self.both(x, y, b))(batch)
                p = torch.tensor(weights, dtype=f.dtype, device=f.device)
                upper, lower = upper + float((p * f).sum()), lower + float((p * g).sum())
        return {"upper_loss": upper, "lower_loss": lower}


def _some(data: Data, key: Tensor, count: int) -> Data:
    """At most `count` of a client's samples, drawn uniformly."""
    size = len(leaves(data)[0][1])
    if size <= count:
        return data
    some = rows(key, size, count)
    return like(data, [tensor[some] for _, tensor in leaves(data)])
