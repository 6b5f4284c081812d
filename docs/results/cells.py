"""The curves of the results, and the cells of their tables.

Curves are read from curves/ID.csv.xz, which battery.py writes; those that are not there from
ID.csv, which has fewer evaluations than were made. A cell is a function of a row: of the labels of
its curves, and of what print reports.
"""

from __future__ import annotations

import csv
import lzma
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import search
from members import BATTERY
from numpy.typing import NDArray

HERE = Path(__file__).parent
NOT_RUN = "not run yet"
TEXT_COLUMNS = ("label", "algorithm", "condition", "partition", "model", "status", "method")
CONDITIONS = ("condition", "partition", "model", "shots")  # of thinned curves, for their labels

Array = NDArray[np.float64]


class Run(NamedTuple):
    """The evaluations of one seed, by column, NaN where there is no number."""

    seed: int
    columns: Mapping[str, Array]
    diverged: bool

    def __getitem__(self, column: Any) -> Any:
        if column == "bytes" and "bytes_up" in self.columns:
            return self.columns["bytes_up"] + self.columns["bytes_down"]
        return self.columns.get(column, np.full(len(self.columns["round"]), np.nan))


class Row(NamedTuple):
    """A row: its first cells, the curves it is about as "ID/label", and what print reports."""

    cells: Sequence[str]
    curves: Sequence[str]
    printed: float | None = None

    def runs(self, index: int) -> list[Run]:
        """Return the seeds of one of the curves."""
        name, _, label = self.curves[index].partition("/")
        return load(name, label)


Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Args:
        heads: The headings of the rows' first cells.
        rows: The rows.
        columns: The other headings, with the function that makes their cells.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    columns: Mapping[str, Cell]

    def __str__(self) -> str:
        lines = [[*self.heads, *self.columns], ["---"] * (len(self.heads) + len(self.columns))]
        for row in self.rows:
            lines.append([*row.cells, *(cell(row) for cell in self.columns.values())])
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{self._caption()}\n\n{text}"

    def _caption(self) -> str:
        """Say where the curves are, and which of them are thinned or lack seeds."""
        full: dict[Path, None] = {}
        thinned: dict[Path, list[str]] = {}
        fewer = []
        for curve in dict.fromkeys(curve for row in self.rows for curve in row.curves if curve):
            name, label = curve.split("/", 1)
            file = file_of(name, label)
            if file is None:
                continue
            if file.parent == HERE:
                thinned.setdefault(file, []).append(label)
                continue
            full[file] = None
            declared = [len(m.seeds) for m in BATTERY.get(name, ()) if m.label == label]
            if declared and len(load(name, label)) < declared[0]:
                fewer.append(f"{label} ({len(load(name, label))} of {declared[0]})")
        parts = []
        if full:
            parts.append(f"Curves: {', '.join(map(_link, full))}.")
        if fewer:
            parts.append(f"Fewer seeds so far: {', '.join(fewer)}.")
        for file, labels in thinned.items():
            which = f" for {', '.join(labels)}" if full else ""
            parts.append(
                f"Thinned curves{which}: {_link(file)}; costs to an accuracy are upper bounds. "
                "The full curves are lost, to be run again."
            )
        return " ".join(parts) or "Not run yet."


def _link(file: Path) -> str:
    return f"[{file.name}]({file.relative_to(HERE)})"


# Curves


def files_of(name: str) -> list[Path]:
    """Return the files with the curves of an experiment, the full ones first."""
    names = [f"curves/{name}.csv.xz", f"curves/{name}.csv", f"{name}.csv", f"{name}-mnist.csv"]
    return [HERE / name for name in names if (HERE / name).exists()]


def file_of(name: str, label: str) -> Path | None:
    """Return the file from which a curve is read; None if it was not run."""
    return next((file for file in files_of(name) if label in read(file)), None)


def load(name: str, label: str) -> list[Run]:
    """Return the seeds of a curve; none if it was not run."""
    file = file_of(name, label)
    return read(file)[label] if file else []


@cache
def read(file: Path) -> dict[str, list[Run]]:
    """Return the runs of a file by label."""
    opened = lzma.open if file.suffix == ".xz" else open
    with opened(file, "rt", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if "seconds_to_90" in rows[0]:
        rows = [_reached(row) for row in rows if row["stage"] == "best"]
    seeds: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in rows:
        label = row.get("label") or row["algorithm"]
        label = " ".join([label, *(row[key] for key in CONDITIONS if key in row)])
        seeds.setdefault((label, int(row["seed"])), []).append(row)
    last_round = max((int(row["round"]) for row in rows), default=0)
    runs: dict[str, list[Run]] = {}
    for (label, seed), evaluations in seeds.items():
        columns = {}
        for key in evaluations[0]:
            if key not in TEXT_COLUMNS:
                columns[key] = np.array([float(row[key] or "nan") for row in evaluations])
        last = evaluations[-1]
        if "status" in last:
            diverged = last["status"] == "diverged"
        else:  # thinned curves do not say it: such a run ends early, and at chance
            diverged = int(last["round"]) < last_round - 10 and float(last["test_accuracy"]) < 0.5
        runs.setdefault(label, []).append(Run(seed, columns, diverged))
    return runs


def _reached(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row of afbo-printed.csv as the one evaluation that it is about."""
    reached = row["seconds_to_90"] not in ("inf", "nan")
    return {
        "label": f"{row['method']} {row['partition']}",
        "seed": row["seed"],
        "round": row["rounds"],
        "virtual_s": row["seconds_to_90"],
        "test_accuracy": "0.9" if reached else "",
        "status": row["status"],
    }


# Cells


def mean_and_spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Return mean and sample standard deviation as text."""
    text = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text + unit


def for_runs(cell: Callable[[list[Run]], str], curve: int) -> Cell:
    """Return a cell about one of a row's curves, or one that says that it was not run."""

    def of_row(row: Row) -> str:
        if curve >= len(row.curves) or not row.curves[curve]:
            return ""
        runs = row.runs(curve)
        return cell(runs) if runs else NOT_RUN

    return of_row


def costs_to(runs: Iterable[Run], accuracy: float, cost: str) -> list[float]:
    """Return the cost at each seed's first evaluation at or above an accuracy, if there is one."""
    costs = []
    for run in runs:
        reached = np.flatnonzero(run["test_accuracy"] >= accuracy)
        if reached.size:
            costs.append(float(run[cost][reached[0]]))
    return costs


def to(
    accuracy: float, cost: str = "round", curve: int = 0, scale: float = 1.0, digits: int = 0
) -> Cell:
    """Return the cost to an accuracy: mean over the seeds that reach it, and how many do."""

    def cell(runs: list[Run]) -> str:
        costs = [scale * value for value in costs_to(runs, accuracy, cost)]
        if not costs:
            return "never"
        text = mean_and_spread(costs, digits)
        if len(costs) < len(runs):
            text += f" ({len(costs)}/{len(runs)})"
        return text

    return for_runs(cell, curve)


def to_of_seeds(accuracy: float, cost: str = "round", curve: int = 0) -> Cell:
    """Return the cost to an accuracy for every seed."""

    def cell(runs: list[Run]) -> str:
        texts = []
        for run in runs:
            costs = costs_to([run], accuracy, cost)
            texts.append(f"{costs[0]:.0f}" if costs else "never")
        return ", ".join(texts)

    return for_runs(cell, curve)


def to_median(accuracy: float, curve: int = 0) -> Cell:
    """Return median and range of the rounds to an accuracy."""

    def cell(runs: list[Run]) -> str:
        costs = costs_to(runs, accuracy, "round")
        if len(costs) < len(runs):
            return f"{len(costs)}/{len(runs)}"
        return f"{statistics.median(costs):.0f} ({min(costs):.0f} to {max(costs):.0f})"

    return for_runs(cell, curve)


def against_print(accuracy: float) -> Cell:
    """Return the rounds to an accuracy, in multiples of print's."""

    def cell(row: Row) -> str:
        costs = costs_to(row.runs(0), accuracy, "round")
        if row.printed is None or not costs or len(costs) < len(row.runs(0)):
            return ""
        return f"{statistics.fmean(costs) / row.printed:.2f}"

    return cell


def growth(accuracy: float, cost: str) -> Cell:
    """Return by which factor the cost to an accuracy differs between a row's two curves."""

    def cell(row: Row) -> str:
        runs = [row.runs(index) for index in (0, 1)]
        if not all(runs):
            return NOT_RUN
        costs = [costs_to(of_curve, accuracy, cost) for of_curve in runs]
        if not all(costs):
            return ""
        return f"{statistics.fmean(costs[1]) / statistics.fmean(costs[0]):.2f}"

    return cell


def total_growth(cost: str) -> Cell:
    """Return by which factor the cost of the whole run differs between a row's two curves."""

    def cell(row: Row) -> str:
        totals = [[run[cost][-1] for run in row.runs(index)] for index in (0, 1)]
        if not all(totals):
            return NOT_RUN
        return f"{statistics.fmean(totals[1]) / statistics.fmean(totals[0]):.2f}"

    return cell


def of_kept(
    value: Callable[[Run], float], scale: float, digits: int, unit: str, curve: int
) -> Cell:
    """Return mean and spread of a number over the seeds that have not diverged, and the others."""

    def cell(runs: list[Run]) -> str:
        kept = [run for run in runs if not run.diverged]
        lost = [run["round"][-1] for run in runs if run.diverged]
        if len(runs) == len(lost) == 1:
            return f"diverged at {lost[0]:.0f}"
        if not kept:
            return f"diverged at {min(lost):.0f} to {max(lost):.0f} ({len(lost)}/{len(runs)})"
        values = [scale * value(run) for run in kept]
        if np.isnan(values).any():
            return ""
        text = mean_and_spread(values, digits, unit)
        if lost:
            text += f" ({len(lost)}/{len(runs)} diverged)"
        return text

    return for_runs(cell, curve)


def at(amount: float, metric: str = "test_accuracy", cost: str = "round", curve: int = 0) -> Cell:
    """Return an accuracy at the first evaluation at or past a cost; NaN before it."""

    def value(run: Run) -> float:
        past = np.flatnonzero(run[cost] >= amount)
        return float(run[metric][past[0]]) if past.size else np.nan

    return of_kept(value, 100, 2, "%", curve)


def final(metric: str = "test_accuracy", digits: int = 2, curve: int = 0) -> Cell:
    """Return an accuracy at the end."""
    return of_kept(lambda run: float(run[metric][-1]), 100, digits, "%", curve)


def final_number(metric: str, digits: int = 3, scale: float = 1.0, curve: int = 0) -> Cell:
    """Return a number at the end."""
    return of_kept(lambda run: float(run[metric][-1]), scale, digits, "", curve)


def last_rounds(count: int, metric: str = "test_accuracy", curve: int = 0) -> Cell:
    """Return the mean of a metric over the last rounds; accuracies in percent."""

    def value(run: Run) -> float:
        return float(np.nanmean(run[metric][run["round"] > run["round"][-1] - count]))

    if metric.endswith("accuracy"):
        return of_kept(value, 100, 2, "%", curve)
    return of_kept(value, 1, 4, "", curve)


def best(metric: str = "test_accuracy", digits: int = 2, curve: int = 0) -> Cell:
    """Return the best accuracy, also of seeds that diverge later."""

    def cell(runs: list[Run]) -> str:
        return mean_and_spread([100 * float(np.nanmax(run[metric])) for run in runs], digits, "%")

    return for_runs(cell, curve)


def of_seeds(cell_of_runs: Cell) -> Cell:
    """Return a cell for every seed."""

    def cell(row: Row) -> str:
        runs = row.runs(0)
        if not runs:
            return NOT_RUN
        texts = []
        for run in runs:
            single = _SingleRun(row.cells, row.curves, run)
            texts.append(cell_of_runs(single))  # type: ignore[arg-type]
        return ", ".join(texts)

    return cell


class _SingleRun(NamedTuple):
    cells: Sequence[str]
    curves: Sequence[str]
    run: Run

    def runs(self, index: int) -> list[Run]:
        return [self.run]


def swing(curve: int = 0) -> Cell:
    """Return how much the accuracy changes over 20 rounds, in rounds 1000 to 2000, in points."""

    def value(run: Run) -> float:
        rounds = run["round"]
        if np.diff(rounds).max() > 20:  # thinned
            return np.nan
        later = rounds[(rounds >= 1000) & (rounds <= rounds[-1] - 20)] + 20
        accuracy = run["test_accuracy"]
        changes = np.interp(later, rounds, accuracy) - np.interp(later - 20, rounds, accuracy)
        return float(np.std(changes, ddof=1) / np.sqrt(2))

    return of_kept(value, 100, 2, "", curve)


def diverged(curve: int = 0) -> Cell:
    """Return how many seeds have diverged."""

    def cell(runs: list[Run]) -> str:
        count = sum(run.diverged for run in runs)
        return f"{count}/{len(runs)}" if count else ""

    return for_runs(cell, curve)


def iterations_to(accuracy: float) -> Cell:
    """Return the outer iterations to an accuracy."""
    return to(accuracy, "iteration")


def per(unit: str, cost: str, scale: float, digits: int, curve: int = 0) -> Cell:
    """Return a cost per round or per iteration, of the first seed."""

    def cell(runs: list[Run]) -> str:
        return f"{runs[0][cost][-1] / runs[0][unit][-1] / scale:.{digits}f}"

    return for_runs(cell, curve)


def share(unit: str, cost: str, reference: str, curve: int = 0) -> Cell:
    """Return a cost per round or per iteration, in percent of that of another curve."""
    other = Row((), (reference,))

    def cell(runs: list[Run]) -> str:
        costs = [run[cost][-1] / run[unit][-1] for run in (runs[0], other.runs(0)[0])]
        return f"{100 * costs[0] / costs[1]:.1f}%"

    return for_runs(cell, curve)


def episodes_at(amount: float | None, curve: int = 0) -> Cell:
    """Return a few-shot accuracy with its 95% half-width at a round, or at the end with costs."""

    def cell(runs: list[Run]) -> str:
        (run,) = runs
        index = len(run["round"]) - 1
        if amount is not None:
            past = np.flatnonzero(run["round"] == amount)
            if not past.size:
                return NOT_RUN
            index = past[0]
        text = f"{100 * run['test_accuracy'][index]:.1f} ± {100 * run['ci95'][index]:.1f}%"
        if amount is None:
            text += f" ({run['round'][index]:.0f} rounds, {run['flops'][index] / 1e12:.3g} TFLOP)"
        return text

    return for_runs(cell, curve)


def searched(row: Row) -> str:
    """Return the scales that search.py chose, and of how many trials."""
    name, label = row.curves[0].split("/", 1)
    return search.summary(name, label)


def scales(row: Row) -> str:
    """Return the scales of step sizes that `tune` chose, from the comments of the tuned file."""
    name, label = row.curves[0].split("/", 1)
    method, *conditions = label.split()
    file = "-".join([name, *conditions]) + ".toml"
    if not (HERE / file).exists():
        return ""
    line = re.search(rf"^# {method}: .* x ([\d.]+), y ([\d.]+)", (HERE / file).read_text(), re.M)
    return f"{line[1]}, {line[2]}" if line else ""
