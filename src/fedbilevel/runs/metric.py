"""`Metric`: the number by which runs are judged, which way is better, and the values to reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedbilevel.core import checks

Metrics = dict[str, float]  # an evaluation: costs, losses and metrics by name
Direction = Literal["minimize", "maximize"]
SUFFIXES = ("_median", "_worst", "_p10", "_spread")  # of figures over clients beside their mean
DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
KNOWN: dict[str, Direction] = {  # of the metrics that runs and ready-made tasks have
    "upper_loss": "minimize",
    "lower_loss": "minimize",
    "hypergradient_norm": "minimize",
    "test_loss": "minimize",
    "test_accuracy": "maximize",
    "train_accuracy": "maximize",
    "balanced_accuracy": "maximize",
    "f1": "maximize",
    "auc": "maximize",
}


@dataclass(frozen=True)
class Metric:
    """A metric by which runs are compared: progress, tables, pages and `stop` use it.

    Without one, runs are judged by their test accuracy if they measure that, else by their upper
    loss.

    Args:
        name: A number that `evaluate` returns, or "upper_loss" or "lower_loss".
        direction: "minimize" or "maximize". It may be left out for the metrics of ready-made tasks.
        targets: Values whose costs are compared in tables; without any, a table of several runs
            chooses some.

    Raises:
        ValueError: If the direction is missing or unknown.
        TypeError: If a target is not a number.

    Examples:
        >>> import fedbilevel as fb
        >>> rmse = fb.Metric("rmse", "minimize", targets=(0.5, 0.4))
        >>> rmse.is_reached(0.45, 0.5), rmse.best([0.7, 0.45, 0.6])
        (True, 0.45)
        >>> fb.Metric("auc").direction
        'maximize'
    """

    name: str
    direction: Direction | None = None
    targets: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name is {self.name!r}; it must be the name of a metric")
        direction = self.direction or KNOWN.get(self.name)
        if direction is None:
            raise ValueError(
                f"direction of the metric {self.name!r} is missing; "
                "it must be 'minimize' or 'maximize'"
            )
        checks.one_of("direction", direction, DIRECTIONS)
        object.__setattr__(self, "direction", direction)
        targets = sorted({checks.number("targets", target) for target in self.targets})
        object.__setattr__(self, "targets", tuple(self.sorted(targets)))

    @property
    def sign(self) -> int:
        """1 if a smaller value is better, else -1."""
        return 1 if self.direction == "minimize" else -1

    def is_reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target; one that is not finite never is.

        Args:
            value: The value.
            target: The target.

        Returns:
            Whether the target is reached.
        """
        return math.isfinite(value) and self.sign * value <= self.sign * target

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the finite values, `None` if there is none.

        Args:
            values: The values.

        Returns:
            The least or the greatest of them.
        """
        finite = [value for value in values if math.isfinite(value)]
        return min(finite, key=lambda value: self.sign * value, default=None)

    def sorted(self, values: Iterable[float]) -> list[float]:
        """Sort values from the worst to the best.

        Args:
            values: The values.

        Returns:
            The values in their new order.
        """
        return sorted(values, key=lambda value: -self.sign * value)

    def table(self) -> dict[str, Any]:
        """Return the metric as a table of an experiment.

        Returns:
            The keyword arguments from which it can be built again.
        """
        return {"name": self.name, "direction": self.direction, "targets": list(self.targets)}


TEST_ACCURACY = Metric("test_accuracy", targets=(0.8, 0.9, 0.93, 0.95, 0.97))
UPPER_LOSS = Metric("upper_loss")


def default_metric(measured: Mapping[str, object]) -> Metric:
    """Return the metric that runs are judged by if none is given.

    Args:
        measured: The metrics of an evaluation.

    Returns:
        The test accuracy if it is measured, else the upper loss.

    Examples:
        >>> default_metric({"upper_loss": 0.3}).name
        'upper_loss'
    """
    if measured.get("test_accuracy") is not None:
        return TEST_ACCURACY
    return UPPER_LOSS


def last_number(history: Sequence[Mapping[str, float | None]], name: str) -> float:
    """Return the last finite value of a metric, NaN if there is none.

    Args:
        history: The metrics of each evaluation.
        name: The name of the metric.

    Returns:
        The value.

    Examples:
        >>> last_number([{"auc": 0.5}, {"auc": 0.7}, {"auc": None}], "auc")
        0.7
    """
    for metrics in reversed(history):
        value = metrics.get(name)
        if value is not None and math.isfinite(value):
            return value
    return math.nan


def smaller_is_better(name: str) -> bool:
    """Return whether a metric of a client is better the smaller it is: a loss or an error.

    Args:
        name: The metric.

    Returns:
        Whether its name contains "loss" or "error".

    Examples:
        >>> smaller_is_better("test_loss"), smaller_is_better("test_accuracy")
        (True, False)
    """
    return "loss" in name or "error" in name
