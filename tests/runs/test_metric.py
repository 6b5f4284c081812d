"""The metric that runs are judged by."""

from __future__ import annotations

import math

import pytest

import fedbilevel as fb


def test_a_metric_of_ones_own_needs_a_direction() -> None:
    with pytest.raises(ValueError, match="direction of the metric 'rmse' is missing; it must be"):
        fb.Metric("rmse")
    with pytest.raises(ValueError, match="direction is 'down'"):
        fb.Metric("rmse", "down")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="targets is 'low'"):
        fb.Metric("rmse", "minimize", ["low"])  # type: ignore[list-item]
    assert fb.Metric("hypergradient_norm").direction == "minimize"


@pytest.mark.parametrize(
    ("direction", "best", "easiest"), [("minimize", 0.1, 0.5), ("maximize", 0.9, 0.2)]
)
def test_better_is_what_the_direction_says(direction: str, best: float, easiest: float) -> None:
    metric = fb.Metric("value", direction, targets=(0.5, 0.2, 0.5))  # type: ignore[arg-type]
    assert metric.best([0.4, math.nan, 0.1, 0.9, math.inf]) == best
    assert metric.best([math.nan]) is None
    assert metric.targets[0] == easiest
    assert len(metric.targets) == 2
    assert metric.is_reached(best, easiest)
    assert not metric.is_reached(math.nan, easiest)
    assert metric.is_reached(0.3, 0.4) == (direction == "minimize")


def test_a_metric_that_is_not_measured_is_refused_before_the_first_round() -> None:
    task = fb.tasks.load("quadratic", clients=4)
    with pytest.raises(ValueError, match="metric is 'rmse', which is not measured; there are byt"):
        fb.solve(task.problem, task.clients, rounds=1, metric=fb.Metric("rmse", "minimize"))
