"""Adam for server steps: running means of directions and of their squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.core.tree import Tree, zeros_like

MOMENTUM = 0.9  # Adam's decay of means
SQUARES = 0.99  # and of squares
FLOOR = 1e-8  # the least divisor


class Moments(NamedTuple):
    """What Adam remembers of the directions of variables that share their scale.

    Attributes:
        means: The running mean of each direction.
        squares: The running mean of the largest of their squares.
        t: The number of steps that were taken.
    """

    means: tuple[Tree, ...]
    squares: Tree
    t: int = 0

    @staticmethod
    def of(like: Tree, number: int = 1) -> Moments:
        """Return those of a number of variables before the first step."""
        zeros = zeros_like(like)
        return Moments((zeros,) * number, zeros)

    def step(self, *directions: Tree) -> tuple[Moments, list[Tree]]:
        """Return the new moments and what the variables move along.

        m_j <- b1 m_j + (1 - b1) h_j,   v <- b2 v + (1 - b2) max_j h_j^2   (entry by entry),
        step_j = (m_j / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + floor).

        Args:
            *directions: h_j, one per variable.
        """
        t = self.t + 1
        means = tuple(
            mean.map(lambda m, h: m.lerp(h, 1 - MOMENTUM), h)
            for mean, h in zip(self.means, directions, strict=True)
        )
        largest = directions[0].map(Tensor.square)
        for h in directions[1:]:
            largest = largest.map(lambda square, h: square.maximum(h.square()), h)
        squares = self.squares.map(lambda v, h: v.lerp(h, 1 - SQUARES), largest)
        correction = (1 - SQUARES**t) ** 0.5 / (1 - MOMENTUM**t)
        floor = FLOOR * (1 - SQUARES**t) ** 0.5
        scales = squares.map(lambda v: correction / (v.sqrt() + floor))
        steps = [mean.map(torch.mul, scales) for mean in means]
        return Moments(means, squares, t), steps
