"""What methods for private lower levels share: a client evaluates one episode after another."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from fedbilevel.core.client_data import Batch
from fedbilevel.core.embedding import AnyBatch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Message, Phase, Steps


class EpisodeSums(NamedTuple):
    """The point that the server sent, sums over the episodes so far, and the number of episodes."""

    x: Tree
    y: Tree
    sums: dict[str, Tree]
    steps: Tensor


class Episodes(Phase):
    """One episode per local step, each from the server's x and y; replies with means over episodes.

    A subclass defines `episode` and declares in `reply` what it returns.
    """

    name = "episodes"

    steps: Steps = "local"

    @abstractmethod
    def episode(self, oracle: Oracle, x: Tree, y: Tree, batch: Batch) -> dict[str, Tree]:
        """Evaluate one episode; return a tree for each name of `reply`."""

    def start(self, m: Message) -> EpisodeSums:
        """Start without sums; the first episode makes them."""
        return EpisodeSums(m.x, m.y, {}, m.steps)

    def first(self, c: EpisodeSums, oracle: Oracle, batch: Batch) -> EpisodeSums:
        """Evaluate the first episode."""
        return c._replace(sums=self.episode(oracle, c.x, c.y, batch))

    def step(self, c: EpisodeSums, oracle: Oracle, batch: Batch) -> EpisodeSums:
        """Add one episode to the sums."""
        values = self.episode(oracle, c.x, c.y, batch)
        return c._replace(sums={name: total + values[name] for name, total in c.sums.items()})

    def finish(self, c: EpisodeSums) -> dict[str, Tree]:
        """Reply with the means."""
        return {name: total / c.steps for name, total in c.sums.items()}


def descend_lower(oracle: Oracle, x: Tree, y: Tree, batch: AnyBatch, steps: int, lr: float) -> Tree:
    """Return y after `steps` gradient steps y <- y - lr grad_y g(x, y) on one batch."""
    for _ in range(steps):
        y = y - lr * oracle.lower_gradient_y(x, y, batch)
    return y
