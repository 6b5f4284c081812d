"""Step sizes that change over the iterations.

A schedule is a function of the iteration t = 0, 1, ... that returns a number. A setting that is
annotated `Step` takes a number, one of the schedules below, or any other function of t. Before each
iteration, `Algorithm.at` (algorithms/base.py) replaces schedules by their numbers. `theory` returns
the step sizes of the theorem that a method's paper proves.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedbilevel.core import checks, settings
from fedbilevel.core.settings import Count, Decay, NonNegative, Positive, at_least

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


@dataclass(frozen=True)
class Linear:
    """Linear growth: min(start + increase t, end) at iteration t; for a penalty.

    In an experiment: `penalty = { schedule = "linear", start = 2.0, increase = 0.05 }`.

    Args:
        start: The value at t = 0.
        increase: What is added in each iteration.
        end: The largest value; None is no limit.

    Raises:
        TypeError: An argument is not a number.
        ValueError: `start` or `end` is not above 0, or `increase` is negative.

    Examples:
        >>> schedule = Linear(2.0, increase=0.5, end=4.0)
        >>> [schedule(t) for t in (0, 1, 9)]
        [2.0, 2.5, 4.0]
    """

    start: Positive
    increase: NonNegative
    end: Positive | None = None

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, t: int) -> float:
        """Return the value at iteration t."""
        value = self.start + self.increase * t
        if self.end is not None:
            value = min(value, self.end)
        return float(value)


KINDS: dict[str, type[Power] | type[Cosine] | type[Linear]] = {
    "power": Power,
    "cosine": Cosine,
    "linear": Linear,
}


class _ScheduleRule(settings.Rule):
    """The rule of a setting that takes a number or a schedule, from the rule of the numbers."""

    def __init__(self, numbers: settings.Rule) -> None:
        def check(name: str, value: object) -> object:
            return value if callable(value) else numbers.check(name, value)

        def read(key: str, value: object) -> object:
            if isinstance(value, dict):
                return settings.build_variant("schedule", KINDS, key, value)
            return check(key, value)

        super().__init__(f"{numbers.text}, or a schedule", check, read)


Step = Annotated[Any, _ScheduleRule(settings.rule_for(Positive))]
"""A step size: a number above 0, or a schedule.

The type is `Any`, because a field may hold a schedule in the settings that a user writes, and holds
a float by the time `iterate` and the phases see it: `Algorithm.at` (algorithms/base.py) evaluates
the schedules.
"""

ScheduledDecay = Annotated[Any, _ScheduleRule(settings.rule_for(Decay))]
"""A number from 0 to below 1, or a schedule of such numbers; of type `Any`, as `Step` is."""


@functools.cache
def step_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the settings of a dataclass that take a schedule, such as step sizes.

    Args:
        kind: The dataclass.

    Returns:
        The names in the order of their declaration.

    Examples:
        >>> import fedbilevel as fb
        >>> "lr_x" in step_fields(fb.algorithms.SimFBO)
        True
    """
    return tuple(
        setting.name
        for setting in settings.declared_settings(kind)
        if isinstance(setting.rule, _ScheduleRule)
    )


def _simfbo(
    *,
    iterations: Count,
    cohort: Count,
    steps: Positive,
    server_scale: Positive = 1.0,
    ratio_y: Positive = 1.0,
    ratio_z: Positive = 1.0,
    local_scale: Positive = 1.0,
) -> dict[str, Any]:
    gamma = server_scale * math.sqrt(cohort / (steps * iterations))
    eta = local_scale / (steps * math.sqrt(iterations))
    return {
        "lr_x": eta,
        "lr_y": eta,
        "lr_z": eta,
        "server_lr_x": gamma,
        "server_lr_y": ratio_y * gamma,
        "server_lr_z": ratio_z * gamma,
    }


def _asfbo(
    *,
    iterations: Count,
    cohort: Count,
    steps: Positive,
    server_scale: Positive = 1.0,
    ratio_y: Positive = 1.0,
    ratio_z: Positive = 1.0,
    local_scale: Positive = 1.0,
    spread: Annotated[float, settings.within("at least 1", lambda value: value >= 1)] = 10.0,
    smoothness: NonNegative = 0.0,
    norm: Positive = 1.0,
) -> dict[str, Any]:
    gamma = server_scale * math.sqrt(cohort / (steps * iterations))
    eta = local_scale / (steps * math.sqrt(iterations))
    drift = smoothness * math.sqrt(steps * norm)  # (163): sqrt(2) drift eta_x, 2 drift eta_y <= 1
    return {
        "lr_x": eta / max(1, math.sqrt(2) * drift * eta),
        "lr_y": eta / max(1, 2 * drift * eta),
        "lr_z": eta,
        "server_lr_x_bounds": (gamma, spread * gamma),
        "server_lr_y_bounds": (ratio_y * gamma / spread, ratio_y * gamma),
        "server_lr_z_bounds": (ratio_z * gamma / spread, ratio_z * gamma),
    }


def _aggitd(
    *,
    iterations: Count,
    inner_rounds: Count,
    smoothness: Positive,
    scale: Positive = 1.0,
    largest: Positive = math.inf,
    ratio_y: Positive = 1.0,
) -> dict[str, Any]:
    neumann_lr = min(10, 1 / smoothness)
    top = min(1, neumann_lr, 1 / (6 * smoothness))
    alpha = min(largest, inner_rounds * top / (2 * ratio_y), scale / math.sqrt(iterations))
    return {
        "lr_x": alpha,
        "lr_y": max(ratio_y * alpha / inner_rounds, neumann_lr / 10),
        "neumann_lr": neumann_lr,
        "inner_rounds": inner_rounds,
        "step_scale": "per-client",
    }


def _rabo(
    *, iterations: Count, clients: Count, coverage: Count, lower_steps: Count
) -> dict[str, Any]:
    return {
        "lr_x": math.sqrt(coverage / iterations),
        "lr_y": 1 / (clients * lower_steps * iterations),
        "lower_steps": lower_steps,
    }


def _afbo(
    *,
    iterations: Annotated[int, at_least(2)],
    clients: Count,
    inner_rounds: Count,
    strongly_convex: bool = False,
    neumann_scale: Positive = 1.0,
) -> dict[str, Any]:
    return {
        "server_lr_x": math.sqrt((1 if strongly_convex else clients) / iterations),
        "server_lr_y": 1 / math.sqrt(inner_rounds * iterations),
        "inner_rounds": inner_rounds,
        "neumann_steps": math.ceil(neumann_scale * math.log(iterations)),
    }


_RECIPES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "simfbo": _simfbo,
    "shrofbo": _simfbo,  # Theorem 2 has the steps of Theorem 1
    "asfbo": _asfbo,
    "la-asfbo": _asfbo,
    "aggitd": _aggitd,
    "rabo": _rabo,
    "rafbo": _rabo,  # Theorem 2 has the steps of Corollary 1
    "afbo": _afbo,
}


def theory(method: str, **constants: Any) -> dict[str, Any]:
    """Return the step sizes under which a method's paper proves its rate.

    The numbers are constant over a run whose length T = `iterations` is known beforehand. Papers
    give them up to constants: those that the paper leaves open are arguments with a default, mostly
    1, which is ours. None of this is needed to use a method; tuned steps are usually larger.

    - "simfbo", "shrofbo" (eq. 38; P = `cohort`, mean tau = `steps`): server steps gamma_x =
      `server_scale` sqrt(P / (tau T)), gamma_y = `ratio_y` gamma_x, gamma_z = `ratio_z` gamma_x,
      and local steps `local_scale` / (tau sqrt T). The paper bounds the ratios below by constants
      of the problem, and gives neither scale.
    - "asfbo", "la-asfbo" (eq. 160 to 163): local steps likewise, and as bounds of the adaptive
      steps [gamma_x, `spread` gamma_x], with `ratio_y` gamma_x the upper bound for y and `ratio_z`
      gamma_x for z. 10 is the spread of the paper's experiments. With L_1 = `smoothness`, eta_x and
      eta_y are at most 1 / sqrt(2 tau c L_1^2) and 1 / sqrt(4 tau c L_1^2); c = `norm` is the
      paper's c_a alpha_max, the largest tau_i over the mean. Smoothness 0 imposes no bound.
    - "aggitd" (Theorem 1; K = `iterations`, N = `inner_rounds`, L_g = `smoothness`): lambda =
      min(10, 1 / L_g), alpha = min(`largest`, N top / (2 `ratio_y`), `scale` / sqrt K) with top =
      min(1, lambda, 1 / (6 L_g)), and beta = max(`ratio_y` alpha / N, lambda / 10), the least that
      is allowed, both divided by tau_i. `largest` stands for min(alpha_1, alpha_2) and `ratio_y`
      for beta-bar, which the paper gives in constants of the problem. The bound lambda / 10 leaves
      an error that does not vanish as K grows (docs/errata.md).
    - "rabo", "rafbo" (Corollary 1; Q = `iterations`, N = `clients`, C_x = `coverage`, T =
      `lower_steps`): alpha = sqrt(C_x / Q) and beta = 1 / (N T Q), the largest that it allows.
    - "afbo" (Corollary 4.1; m = `clients`, K = `inner_rounds`): eta = sqrt(m / T), or sqrt(1 / T)
      if `strongly_convex`; beta = 1 / sqrt(K T), the largest that it allows; and `neumann_scale`
      log T terms of the estimate, rounded up. The paper has no z and no local steps on x.

    Args:
        method: One of these names.
        constants: What the theorem needs, by the names above; those with a default may be left out.

    Returns:
        Settings of the method, by name.

    Raises:
        ValueError: There is no such theorem or constant, a constant is missing, or its value is not
            allowed.
        TypeError: A constant has the wrong type.

    Examples:
        >>> import fedbilevel as fb
        >>> steps = theory("simfbo", iterations=400, cohort=4, steps=1)
        >>> steps["server_lr_x"], steps["lr_x"]
        (0.1, 0.05)
        >>> fb.algorithms.SimFBO(**steps).server_lr_y
        0.1
    """
    checks.one_of("method", method, tuple(_RECIPES))
    recipe = _RECIPES[method]
    return recipe(**settings.read_arguments(settings.declared_settings(recipe), method, constants))
