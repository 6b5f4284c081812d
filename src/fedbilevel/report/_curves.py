"""Runs grouped into curves and a ranked table: the numbers behind the page and the figure."""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.runs.folder import RunFolder

Array = NDArray[np.float64]

TARGETS = (0.8, 0.9, 0.93, 0.95, 0.97)
POINTS = 1000  # a curve has no more: a screen shows no more, and the page stays small


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over `count` seeds (0 for one seed)."""

    mean: float
    std: float
    count: int

    def show(self, digits: int = 4, divisor: float = 1, unit: str = "") -> str:
        text = f"{self.mean / divisor:,.{digits}f}"
        if self.count > 1:
            text += f" ± {self.std / divisor:,.{digits}f}"
        return f"{text} {unit}".rstrip()


@dataclass(frozen=True)
class Axis:
    """A cost to draw curves against; each of its units is a thousand of the one before."""

    key: str
    title: str
    units: tuple[str, ...]

    def unit(self, largest: float) -> tuple[float, str]:
        """The divisor and the name of the unit in which `largest` reads well."""
        power = sum(largest >= 1000**k for k in range(1, len(self.units)))
        return 1000.0**power, self.units[power]

    def heading(self, largest: float) -> str:
        unit = self.unit(largest)[1]
        return f"{self.title} ({unit})" if unit else self.title

    def show(self, spread: Spread) -> str:
        divisor, unit = self.unit(spread.mean)
        scaled = spread.mean / divisor
        whole = divisor == 1 and spread.std == 0 and spread.mean % 1 == 0
        return spread.show(0 if whole or scaled >= 100 else 1 if scaled >= 10 else 2, divisor, unit)


COUNT = ("", "k", "M", "G", "T", "P")
AXES = {
    axis.key: axis
    for axis in (
        Axis("round", "Communication rounds", ("",)),
        Axis("bytes", "Bytes up and down", ("B", "kB", "MB", "GB", "TB")),
        Axis("gradients", "Gradients", COUNT),
        Axis("flops", "Operations", tuple(f"{prefix}FLOP" for prefix in COUNT)),
        Axis("samples", "Samples", COUNT),
        Axis("virtual_s", "Virtual time", ("s",)),
        Axis("wall_s", "Wall time", ("s",)),
    )
}
METRICS = {
    "test_accuracy": "Test accuracy",
    "upper_loss": "Upper loss",
    "hypergradient_norm": "Hypergradient norm",
}

# After Okabe and Ito, for colour-blind readers, at 3:1 contrast or more against white and against black; every second
# four curves are dashed, which tells near colours apart, and all of them in grey print.
LIGHT = ("#0072b2", "#d55e00", "#009268", "#b8578f", "#2c93cf", "#b57e00", "#5a5a5a", "#7a5195")
DARK = ("#4aa8e0", "#ff8b4a", "#2fc795", "#e59cc5", "#9bdcff", "#f2b63c", "#c8c8c8", "#b79ae0")
DASHES = ("solid", "dash", "dot", "dashdot")


def look(index: int) -> tuple[int, str]:
    """The place in the palette and the dash of the curve with this index."""
    return index % len(LIGHT), DASHES[index // 4 % len(DASHES)]


@dataclass(frozen=True)
class Group:
    """The seeds of one algorithm under one configuration."""

    label: str
    runs: list[RunFolder]


@dataclass(frozen=True)
class Curve:
    """The mean over seeds and the range from the smallest to the largest seed."""

    x: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Row:
    """A line of the ranked table; `cost[axis][target]` counts only the seeds that reached the target."""

    label: str
    seeds: int
    statuses: dict[str, int]
    accuracy: Spread | None
    loss: Spread | None
    flops: Spread | None
    peak: Spread | None
    cost: dict[str, dict[float, Spread | None]]

    def reached(self, axis: str) -> dict[float, Spread]:
        """The costs of the targets that every seed reached."""
        return {t: s for t, s in self.cost[axis].items() if s is not None and s.count == self.seeds}


def group(runs: Iterable[RunFolder]) -> list[Group]:
    """The runs by label; a seed that comes twice under one configuration is no second seed, but a group of its own."""
    times: Counter[tuple[str, int]] = Counter()
    seeds: dict[tuple[str, str, int], list[RunFolder]] = defaultdict(list)
    for run in runs:
        config = json.dumps({**run.config, "seed": None}, sort_keys=True, default=str)
        seeds[run.algorithm, config, times[config, run.seed]].append(run)
        times[config, run.seed] += 1
    algorithms: dict[str, list[list[RunFolder]]] = defaultdict(list)
    for (algorithm, _, _), members in seeds.items():
        algorithms[algorithm].append(members)
    groups = []
    for algorithm, variants in algorithms.items():
        folders = _distinct([members[0].path for members in variants])
        for members, folder in zip(variants, folders, strict=True):
            groups.append(
                Group(algorithm if len(variants) == 1 else f"{algorithm} ({folder})", members)
            )
    return sorted(groups, key=lambda g: g.label)


def _distinct(paths: Sequence[Path]) -> list[str]:
    """The paths without the folders that all of them begin with or end in."""
    parts = [path.parts for path in paths]
    for end, rest in ((0, slice(1, None)), (-1, slice(None, -1))):
        while min(map(len, parts)) > 1 and len({p[end] for p in parts}) == 1:
            parts = [p[rest] for p in parts]
    return ["/".join(p) for p in parts]


def column(run: RunFolder, key: str) -> Array:
    """One number an evaluation, NaN where there is none."""
    if key == "bytes":
        return column(run, "bytes_up") + column(run, "bytes_down")
    return np.array(
        [np.nan if line.get(key) is None else line[key] for line in run.history], dtype=np.float64
    )


def curve(runs: Sequence[RunFolder], axis: str, metric: str) -> Curve | None:
    """The metric over the range that all measured seeds cover, so that no seed leaves the mean on the way."""
    series = []
    for run in runs:
        x, y = column(run, axis), column(run, metric)
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            # Evaluations at one and the same x, as two at zero bytes: the later one counts.
            x, later = np.unique(x[known][::-1], return_index=True)
            series.append((x, y[known][::-1][later]))
    if not series:
        return None
    grid = np.unique(np.concatenate([x for x, _ in series]))
    grid = grid[(grid >= max(x[0] for x, _ in series)) & (grid <= min(x[-1] for x, _ in series))]
    if grid.size == 0:
        return None
    if grid.size > POINTS:
        grid = grid[np.linspace(0, grid.size - 1, POINTS).round().astype(int)]
    values = np.stack([np.interp(grid, x, y) for x, y in series])
    return Curve(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def drawable(runs: Sequence[RunFolder]) -> tuple[list[Axis], list[str]]:
    """The axes along which some run moves, and the metrics that some run measured."""
    axes = [
        axis for axis in AXES.values() if any((column(run, axis.key) > 0).any() for run in runs)
    ]
    metrics = [
        metric for metric in METRICS if any(np.isfinite(column(run, metric)).any() for run in runs)
    ]
    if not axes or not metrics:
        raise ValueError(
            f"{runs[0].path} and the other runs hold no evaluation past round 0, expected one to draw"
        )
    return axes, metrics


def logarithmic(curves: Iterable[Curve]) -> bool:
    """Whether the values call for a log scale: all positive, and more than one and a half decades apart."""
    curves = list(curves)
    low = min((c.low.min() for c in curves), default=0.0)
    return bool(low > 0 and max(c.high.max() for c in curves) > 30 * low)


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and deviation of the finite values, None where there are none."""
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return None
    return Spread(
        float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0, len(known)
    )


def rows(groups: Iterable[Group]) -> list[Row]:
    """The lines of the ranked table, in the order of the groups."""
    table = []
    for g in groups:
        costs = [_costs(run) for run in g.runs]
        table.append(
            Row(
                label=g.label,
                seeds=len(g.runs),
                statuses=dict(Counter(run.status for run in g.runs)),
                accuracy=spread(_final(run, "test_accuracy") for run in g.runs),
                loss=spread(_final(run, "upper_loss") for run in g.runs),
                flops=spread(_final(run, "flops") for run in g.runs),
                peak=spread([max(_final(run, "peak_bytes") for run in g.runs)]),
                cost={
                    axis: {t: spread(c[axis][t] for c in costs) for t in TARGETS} for axis in AXES
                },
            )
        )
    return table


def ranked(rows: Iterable[Row], axis: str) -> list[Row]:
    """By the highest target that every seed reached, then by the cost to it, then by final accuracy and loss."""

    def standing(row: Row) -> tuple[float, float, float, float]:
        target, cost = max(row.reached(axis).items(), default=(0.0, None))
        accuracy, loss = (
            row.accuracy.mean if row.accuracy else 0.0,
            row.loss.mean if row.loss else np.inf,
        )
        return -target, cost.mean if cost else 0.0, -accuracy, loss

    return sorted(rows, key=standing)


def _final(run: RunFolder, metric: str) -> float:
    return float(column(run, metric)[-1]) if run.history else np.nan


def _costs(run: RunFolder) -> dict[str, dict[float, float]]:
    """What it cost along each axis to reach each target, NaN where the run never did."""
    accuracy = column(run, "test_accuracy")
    first = {target: np.flatnonzero(accuracy >= target)[:1] for target in TARGETS}
    costs = {}
    for axis in AXES:
        x = column(run, axis)
        costs[axis] = {
            target: float(x[hit[0]]) if hit.size else np.nan for target, hit in first.items()
        }
    return costs


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The dotted configuration keys, but the algorithm's name, that differ: a value a group, None where it has none."""
    configs = [dict(_flat(g.runs[0].config)) for g in groups]
    keys = sorted({key for config in configs for key in config} - {"seed", "algorithm.name"})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def ledger(group: Group) -> dict[str, dict[str, float]]:
    """What each phase cost, mean over the group's finished seeds; a phase that a seed never entered cost it nothing."""
    ledgers = [run.summary["ledger"] for run in group.runs if run.summary is not None]
    phases = dict.fromkeys(phase for entry in ledgers for phase in entry)
    columns = ("rounds", "bytes_up", "bytes_down", "samples", "gradients", "flops", "peak_bytes")
    return {
        p: {c: float(np.mean([_cost(e, p, c) for e in ledgers])) for c in columns} for p in phases
    }


def _cost(ledger: dict[str, dict[str, float]], phase: str, column: str) -> float:
    return (
        ledger[phase].get(column, np.nan) if phase in ledger else 0.0
    )  # older runs have fewer columns


PAID = ("flops", "bytes_up", "bytes_down")


def clients(group: Group) -> list[dict[str, float]]:
    """What a client paid, mean over the group's finished seeds: a line for those of one peak memory."""
    alike: dict[float, list[dict[str, float]]] = defaultdict(list)
    seeds = [run.summary.get("clients", []) for run in group.runs if run.summary is not None]
    for entry in itertools.chain(*seeds):
        alike[entry["peak_bytes"]].append(entry)
    found = []
    for peak, entries in sorted(alike.items()):
        counts = [entry["clients"] for entry in entries]
        means = {c: float(np.average([e[c] for e in entries], weights=counts)) for c in PAID}
        found.append({"clients": sum(counts) / len(seeds), "peak_bytes": peak, **means})
    return found
