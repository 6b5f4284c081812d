"""Step sizes that change: a schedule maps the iteration t = 0, 1, ... to a number and stands wherever a float does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from fedbilevel.core import checks, settings
from fedbilevel.core.settings import Count, NonNegative, Positive

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Power:
    """start / (1 + t / after)^power: power 1/2 is the customary decay of stochastic methods."""

    start: Positive
    power: NonNegative = 0.5
    after: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, t: int) -> float:
        return float(self.start / (1 + t / self.after) ** self.power)


@dataclass(frozen=True)
class Cosine:
    """From start to end over `iterations` along half a cosine, then end."""

    start: Positive
    end: Positive
    iterations: Count

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, t: int) -> float:
        return (
            self.end
            + (self.start - self.end) * (1 + math.cos(math.pi * min(t / self.iterations, 1))) / 2
        )


KINDS = {"power": Power, "cosine": Cosine}


def _check(name: str, value: Any) -> Any:
    return value if callable(value) else checks.positive(name, value)


def _read(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return settings.read_kind("schedule", KINDS, key, value)
    return _check(key, value)


# A float or a schedule; by the time `iterate` and the phases see it, a float.
Step = Annotated[Any, settings.Rule("number above 0, or a schedule", _check, _read)]


@functools.cache
def step_fields(kind: type) -> tuple[str, ...]:
    """The settings of a dataclass that are declared as a `Step`."""
    (mark,) = get_args(Step)[1:]
    return tuple(setting.name for setting in settings.declared(kind) if setting.rule is mark)
