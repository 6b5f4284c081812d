"""Runs grouped by algorithm and configuration, and their curves: mean and range over seeds."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbilevel.report._axes import AXES, COSTS, USUAL_METRICS, Axis
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.metric import SUFFIXES, Metric

Array = NDArray[np.float64]

MAX_POINTS = 600  # per curve: a screen shows no more, and the page stays small

# The palette of Okabe and Ito, for colour-blind readers, changed to a contrast of at least 3:1
# against white and against black. Every four curves the dash changes, which tells similar colours
# apart, and all of them in grey print.
LIGHT = ("#0072b2", "#d55e00", "#009268", "#b8578f", "#2c93cf", "#b57e00", "#5a5a5a", "#7a5195")
DARK = ("#4aa8e0", "#ff8b4a", "#2fc795", "#e59cc5", "#9bdcff", "#f2b63c", "#c8c8c8", "#b79ae0")
DASHES = ("solid", "dash", "dot", "dashdot")


def curve_style(index: int) -> tuple[int, str]:
    """Return the colour, as an index of the palette, and the dash of the curve with this index."""
    return index % len(LIGHT), DASHES[index // 4 % len(DASHES)]


@dataclass(frozen=True)
class Group:
    """The seeds of one algorithm under one configuration."""

    label: str
    runs: list[RunFolder]


@dataclass(frozen=True)
class Curve:
    """Mean, smallest and largest value over the seeds, at the points `x`."""

    x: Array
    mean: Array
    low: Array
    high: Array


def group_runs(runs: Iterable[RunFolder]) -> list[Group]:
    """Group runs by algorithm and configuration, sorted by label.

    A seed that was run twice under one configuration is not a second seed: it starts another group.
    """
    repetitions: Counter[tuple[str, int]] = Counter()
    members: dict[tuple[str, str, int], list[RunFolder]] = defaultdict(list)
    for run in runs:
        config = json.dumps({**run.config, "seed": None}, sort_keys=True, default=str)
        members[run.algorithm, config, repetitions[config, run.seed]].append(run)
        repetitions[config, run.seed] += 1
    variants: dict[str, list[list[RunFolder]]] = defaultdict(list)
    for (algorithm, _, _), same_config in members.items():
        variants[algorithm].append(same_config)
    groups = []
    for algorithm, of_algorithm in variants.items():
        if len(of_algorithm) == 1:
            groups.append(Group(algorithm, of_algorithm[0]))
            continue
        folders = _without_common_parts([same_config[0].path for same_config in of_algorithm])
        for same_config, folder in zip(of_algorithm, folders, strict=True):
            groups.append(Group(f"{algorithm} ({folder})", same_config))
    return sorted(groups, key=lambda group: group.label)


def _without_common_parts(paths: Sequence[Path]) -> list[str]:
    """Return the paths without the folders that all of them begin with or end in."""
    parts = [path.parts for path in paths]
    for end, rest in ((0, slice(1, None)), (-1, slice(None, -1))):
        while min(map(len, parts)) > 1 and len({p[end] for p in parts}) == 1:
            parts = [p[rest] for p in parts]
    return ["/".join(p) for p in parts]


def column(run: RunFolder, key: str) -> Array:
    """Return one number per evaluation, NaN where there is none."""
    if key == "bytes":
        return column(run, "bytes_up") + column(run, "bytes_down")
    values = [evaluation.get(key) for evaluation in run.history]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def mean_curve(runs: Sequence[RunFolder], axis: str, metric: str) -> Curve | None:
    """Return the curve of a metric over the range that all seeds cover, None if it is empty.

    No seed leaves the mean on the way, because beyond that range the curve would jump.
    """
    series = []
    for run in runs:
        x = column(run, axis)
        y = column(run, metric)
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            # Of several evaluations at one x, for example two at zero bytes, the last one counts.
            x, last = np.unique(x[known][::-1], return_index=True)
            series.append((x, y[known][::-1][last]))
    if not series:
        return None
    grid = np.unique(np.concatenate([x for x, _ in series]))
    start = max(x[0] for x, _ in series)
    end = min(x[-1] for x, _ in series)
    grid = grid[(grid >= start) & (grid <= end)]
    if grid.size == 0:
        return None
    if grid.size > MAX_POINTS:
        grid = grid[np.linspace(0, grid.size - 1, MAX_POINTS).round().astype(int)]
    values = np.stack([np.interp(grid, x, y) for x, y in series])
    return Curve(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def drawable(runs: Sequence[RunFolder]) -> tuple[list[Axis], list[str]]:
    """Return the axes along which some run moves, and the metrics that some run measured.

    The metric that the runs are judged by comes first, then those of `main_metrics`, then others.

    Raises:
        ValueError: If there are no axes or no metrics.
    """
    axes = []
    for axis in AXES.values():
        if any((column(run, axis.key) > 0).any() for run in runs):
            axes.append(axis)
    names = dict.fromkeys(main_metrics(runs))
    for run in runs:
        for evaluation in run.history:
            names |= dict.fromkeys(name for name in evaluation if name not in COSTS)
    metrics = []
    for metric in names:
        if any(np.isfinite(column(run, metric)).any() for run in runs):
            metrics.append(metric)
    if not axes or not metrics:
        raise ValueError(
            f"{runs[0].path} and the other runs hold no evaluation past round 0, "
            "expected one to draw"
        )
    return axes, metrics


def main_metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of the metrics that a reader wants to see first.

    They are the one that the runs are judged by, the usual ones, and those of `evaluated`, beside
    an accuracy on training data.
    """
    names = [judged_by(runs).name, *USUAL_METRICS, *evaluated(runs)]
    return [name for name in dict.fromkeys(names) if name != "train_accuracy"]


def evaluated(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of what the `evaluate` of a task returns; of a distribution the mean."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys((run.summary or {}).get("evaluated", []))
    for name in list(names):
        others = {name + suffix for suffix in SUFFIXES}
        if others <= names.keys():
            names = {kept: None for kept in names if kept not in others}
    return list(names)


def judged_by(runs: Sequence[RunFolder]) -> Metric:
    """Return the metric that most of the runs are judged by, with the targets of all of them."""
    metrics = [run.metric for run in runs]
    ((name, direction), _), *_ = Counter((m.name, m.direction) for m in metrics).most_common()
    targets: set[float] = set()
    for metric in metrics:
        if metric.name == name:
            targets |= set(metric.targets)
    return Metric(name, direction, tuple(targets))


def needs_log_scale(columns: Iterable[Array]) -> bool:
    """Whether all values are positive, and more than one and a half decades apart."""
    known = [values[np.isfinite(values)] for values in columns]
    known = [values for values in known if len(values)]
    if not known:
        return False
    low = min(values.min() for values in known)
    high = max(values.max() for values in known)
    return bool(low > 0 and high > 30 * low)
