"""Step sizes that change over the iterations.

A schedule is a function of the iteration t = 0, 1, ... that returns a number. A setting that is
annotated `Step` takes a number, one of the schedules below, or any other function of t. Before each
iteration, `Algorithm.at` (algorithms/base.py) replaces schedules by their numbers.

Examples:
    >>> import fedbilevel as fb
    >>> method = fb.algorithms.SimFBO(lr_x=fb.schedules.Power(0.3), lr_y=lambda t: 0.5 / (t + 1))
    >>> now = method.at(3)
    >>> round(now.lr_x, 6), now.lr_y
    (0.15, 0.125)
"""

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
    """Polynomial decay: start / (1 + t / after)^power at iteration t.

    In an experiment: `lr_x = { schedule = "power", start = 0.1, power = 0.5, after = 1.0 }`.

    Args:
        start: The value at t = 0.
        power: How fast the value decays. 1/2 is customary for stochastic methods, 0 is constant.
        after: The number of iterations after which the value has fallen by the factor 2^power.

    Raises:
        TypeError: An argument is not a number.
        ValueError: `start` or `after` is not above 0, or `power` is negative.

    Examples:
        >>> schedule = Power(1.0, power=1.0, after=10.0)
        >>> [schedule(t) for t in (0, 10, 30)]
        [1.0, 0.5, 0.25]
    """

    start: Positive
    power: NonNegative = 0.5
    after: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
        return float(self.start / (1 + t / self.after) ** self.power)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from start to end, then constant.

    At iteration t the value is

        end + (start - end) (1 + cos(pi min(t / iterations, 1))) / 2.

    In an experiment: `lr_x = { schedule = "cosine", start = 0.1, end = 0.01, iterations = 100 }`.

    Args:
        start: The value at t = 0.
        end: The value from t = iterations on.
        iterations: The number of iterations from start to end.

    Raises:
        TypeError: `start` or `end` is not a number, or `iterations` not a whole number.
        ValueError: `start` or `end` is not above 0, or `iterations` is below 1.

    Examples:
        >>> schedule = Cosine(start=1.0, end=0.5, iterations=10)
        >>> [schedule(t) for t in (0, 5, 10, 99)]
        [1.0, 0.75, 0.5, 0.5]
    """

    start: Positive
    end: Positive
    iterations: Count

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
        progress = min(t / self.iterations, 1)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * progress)) / 2


KINDS: dict[str, type[Power] | type[Cosine]] = {"power": Power, "cosine": Cosine}


def _check(name: str, value: object) -> object:
    if callable(value):
        return value
    return checks.positive(name, value)


def _read(key: str, value: object) -> object:
    if isinstance(value, dict):
        return settings.build_variant("schedule", KINDS, key, value)
    return _check(key, value)


Step = Annotated[Any, settings.Rule("number above 0, or a schedule", _check, _read)]
"""A step size: a number above 0, or a schedule.

The type is `Any`, because a field may hold a schedule in the settings that a user writes, and holds
a float by the time `iterate` and the phases see it: `Algorithm.at` (algorithms/base.py) evaluates
the schedules.
"""


@functools.cache
def step_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the settings of a dataclass that are annotated `Step`.

    Args:
        kind: The dataclass.

    Returns:
        The names in the order of their declaration.

    Examples:
        >>> import fedbilevel as fb
        >>> "lr_x" in step_fields(fb.algorithms.SimFBO)
        True
    """
    _, step_rule = get_args(Step)
    return tuple(
        setting.name for setting in settings.declared_settings(kind) if setting.rule is step_rule
    )
