"""Step sizes that change: a schedule maps the iteration t = 0, 1, ... to a number and stands wherever a float does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedbilevel import checks

Schedule = Callable[[int], float]
Step = Any  # a float or a schedule; a float by the time `iterate` and the phases see it


@dataclass(frozen=True)
class Power:
    """start / (1 + t / after)^power: power 1/2 is the customary decay of stochastic methods."""

    start: float
    power: float = 0.5
    after: float = 1.0

    def __post_init__(self) -> None:
        checks.positive("start", self.start)
        checks.non_negative("power", self.power)
        checks.positive("after", self.after)

    def __call__(self, t: int) -> float:
        return float(self.start / (1 + t / self.after) ** self.power)


@dataclass(frozen=True)
class Cosine:
    """From start to end over `iterations` along half a cosine, then end."""

    start: float
    end: float
    iterations: int

    def __post_init__(self) -> None:
        checks.positive("start", self.start)
        checks.positive("end", self.end)
        checks.integer("iterations", self.iterations, least=1)

    def __call__(self, t: int) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * min(t / self.iterations, 1))) / 2
