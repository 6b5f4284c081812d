"""Equal tuning: the same number of trials for every method of a figure, on a grid without an edge.

The step sizes of the upper level have one scale, those of the lower level and of the linear system
another. A search begins at the scales 1, 1, tries the four neighbours of the best pair so far (each
scale times or divided by `FACTOR`), and moves on to where they are better. It has ended well where
none of the four is better, so that an optimum never lies at an edge; where its trials are used up
before, the table says so. A trial is a run folder, and so it resumes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.experiments.steps import scale_settings

CURVES = Path(__file__).parent / "curves"
FACTOR = 10**0.5


class Point(NamedTuple):
    """The exponents of the two scales."""

    x: int
    y: int

    @property
    def scales(self) -> tuple[float, float]:
        """The factors of the step sizes."""
        return FACTOR**self.x, FACTOR**self.y

    def neighbours(self) -> list[Point]:
        """Return the four points around this one."""
        x, y = self
        return [Point(x + 1, y), Point(x - 1, y), Point(x, y + 1), Point(x, y - 1)]


START = Point(0, 0)


@dataclass(frozen=True)
class Search:
    """The budget of a figure's methods, and what their trials are judged by.

    Args:
        trials: The trials of each method.
        target: The test accuracy to reach.
        cost: The cost to it, a column of the curves, which is to be small.
        limits: What ends a trial, as settings of the experiment.
        seed: The seed of the trials, which no other run has.
    """

    trials: int
    target: float
    cost: str
    limits: Mapping[str, Any]
    seed: int = 3

    def score(self, history: Sequence[Mapping[str, Any]]) -> float:
        """Return the cost to the target; beyond the whole cost if the trial does not reach it."""
        best = 0.0
        for row in history:
            accuracy = row.get("test_accuracy") or 0.0
            if accuracy >= self.target:
                return float(row[self.cost])
            best = max(best, accuracy)
        return MISSED * (1 + self.target - best)


MISSED = 1e18  # more than any cost


def next_points(scores: Mapping[Point, float], trials: int) -> list[Point]:
    """Return the trials to run next, none if the search has ended.

    Args:
        scores: The score of every trial so far.
        trials: The budget.
    """
    if not scores:
        return [START]
    around = best_point(scores).neighbours()
    missing = [point for point in around if point not in scores]
    return missing[: max(0, trials - len(scores))]


def best_point(scores: Mapping[Point, float]) -> Point:
    """Return the best point, of equal ones the first."""
    return min(scores, key=lambda point: scores[point])


def is_closed(scores: Mapping[Point, float]) -> bool:
    """Whether all four neighbours of the best point have been tried."""
    return bool(scores) and set(best_point(scores).neighbours()) <= set(scores)


def scaled(config: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """Return a resolved config with its step sizes multiplied by the scales of a point."""
    return {**config, "algorithm": scale_settings(config["algorithm"], *point.scales)}


# Committed searches: ID-search.csv beside the curves.


class Trial(NamedTuple):
    """A trial as it is recorded: its method, its point, and its score (infinite: not reached)."""

    label: str
    point: Point
    score: float
    accuracy: float
    status: str


HEADER = ("label", "exponent_x", "exponent_y", "score", "best_accuracy", "status")


def write_trials(file: Path, trials: Sequence[Trial]) -> None:
    """Write the trials of an experiment."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(HEADER)
        for trial in trials:
            score = repr(trial.score) if trial.score < MISSED else "inf"
            writer.writerow((trial.label, *trial.point, score, trial.accuracy, trial.status))


def read_trials(name: str) -> list[Trial]:
    """Return the committed trials of an experiment; none if there was no search."""
    file = CURVES / f"{name}-search.csv"
    if not file.exists():
        return []
    trials = []
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            point = Point(int(row["exponent_x"]), int(row["exponent_y"]))
            accuracy = float(row["best_accuracy"])
            trials.append(Trial(row["label"], point, float(row["score"]), accuracy, row["status"]))
    return trials


def scores_in(trials: Sequence[Trial]) -> dict[Point, float]:
    """Return the scores of recorded trials; those that miss the target are by their accuracy."""
    scores = {}
    for trial in trials:
        score = trial.score
        if not math.isfinite(score):
            score = MISSED * (2 - trial.accuracy)
        scores[trial.point] = score
    return scores


def summary(name: str, label: str) -> str:
    """Return what a table says of a search: trials, scales, and whether they are inside."""
    mine = [trial for trial in read_trials(name) if trial.label == label]
    if not mine:
        return ""
    scores = scores_in(mine)
    x, y = best_point(scores).scales
    text = f"{x:.3g}, {y:.3g} of {len(mine)}"
    return text if is_closed(scores) else f"{text}, not closed"


SEARCHES: dict[str, Search] = {
    "aggitd-fig7": Search(
        trials=13,
        target=0.85,
        cost="flops",
        limits={"rounds": 300, "every": 5, "stop.test_accuracy": 0.85},
    ),
}
