"""Tables of results, and their cells: functions of a row, which names the curves it is about."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import search
from curve_files import HERE, Run, costs_to, file_of, load
from members import BATTERY

MISSING = "–"  # stands in a cell whose runs are still to be made


class Row(NamedTuple):
    """A row: its first cells, the curves it is about as "ID/label", and what the paper reports."""

    cells: Sequence[str]
    curves: Sequence[str]
    reported: float | None = None
    seed: int | None = None  # the only one that counts

    def runs(self, index: int) -> list[Run]:
        """Return the seeds of one of the curves."""
        name, _, label = self.curves[index].partition("/")
        return [run for run in load(name, label) if self.seed in (None, run.seed)]

    def was_run(self) -> bool:
        """Whether one of its curves is there."""
        return any(self.runs(index) for index in range(len(self.curves)))


Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table of a page, without rows and columns that have no number yet.

    Args:
        heads: The headings of the rows' first cells.
        rows: The rows.
        columns: The other headings, with the function that makes their cells.
        intro: What leads to the table. Where none of its rows was run, neither is shown.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    columns: Mapping[str, Cell]
    intro: str = ""

    def __str__(self) -> str:
        rows = [row for row in self.rows if row.was_run()]
        if not rows:
            return ""
        columns = [[head, *(row.cells[at] for row in rows)] for at, head in enumerate(self.heads)]
        for head, cell in self.columns.items():
            cells = [cell(row) for row in rows]
            if any(text not in ("", MISSING) for text in cells):
                columns.append([head, *cells])
        head, *lines = zip(*columns, strict=True)
        lines = [head, ["---"] * len(columns), *lines]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(part for part in (self.intro, self._caption(rows), text) if part)

    def _caption(self, rows: Sequence[Row]) -> str:
        """Say where the curves are, and which of them are thinned or lack seeds."""
        full: dict[Path, None] = {}
        thinned: dict[Path, list[str]] = {}
        curves = [curve for row in rows for curve in row.curves if curve]
        for curve in dict.fromkeys(curves):
            name, label = curve.split("/", 1)
            file = file_of(name, label)
            if file is None:
                continue
            if file.parent == HERE:
                thinned.setdefault(file, []).append(label)
                continue
            full[file] = None
        parts = []
        if full:
            parts.append(f"Curves: {', '.join(map(_link, full))}.")
        if fewer := fewer_seeds(curves):
            parts.append(f"Fewer seeds so far: {fewer}.")
        if thinned:
            files = ", ".join(map(_link, thinned))
            labels = ", ".join(label for labels in thinned.values() for label in labels)
            which = f" for {labels}" if full else ""
            parts.append(f"Thinned curves{which}: {files}; costs to an accuracy are upper bounds.")
        return " ".join(parts)


def fewer_seeds(curves: Iterable[str]) -> str:
    """Return which curves lack some of the seeds that are declared, and how many they have."""
    found = []
    for curve in dict.fromkeys(curves):
        name, label = curve.split("/", 1)
        seeds = len(load(name, label))
        declared = [len(m.seeds) for m in BATTERY.get(name, ()) if m.label == label]
        if declared and 0 < seeds < declared[0]:
            found.append(f"{label} ({seeds} of {declared[0]})")
    return ", ".join(found)


def _link(file: Path) -> str:
    return f"[{file.name}]({file.relative_to(HERE)})"


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
        return cell(runs) if runs else MISSING

    return of_row


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


TARGETS = {"to 80%": to(0.8), "90%": to(0.9), "93%": to(0.93), "95%": to(0.95)}


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


def against_reported(accuracy: float) -> Cell:
    """Return the rounds to an accuracy, in multiples of those reported."""

    def cell(row: Row) -> str:
        costs = costs_to(row.runs(0), accuracy, "round")
        if row.reported is None or not costs or len(costs) < len(row.runs(0)):
            return ""
        return f"{statistics.fmean(costs) / row.reported:.2f}"

    return cell


def growth(accuracy: float, cost: str) -> Cell:
    """Return by which factor the cost to an accuracy differs between a row's two curves."""

    def cell(row: Row) -> str:
        runs = [row.runs(index) for index in (0, 1)]
        if not all(runs):
            return MISSING
        costs = [costs_to(of_curve, accuracy, cost) for of_curve in runs]
        if not all(costs):
            return ""
        return f"{statistics.fmean(costs[1]) / statistics.fmean(costs[0]):.2f}"

    return cell


def growth_per_round(cost: str) -> Cell:
    """Return by which factor the cost of a round differs between a row's two curves."""

    def cell(row: Row) -> str:
        costs = [[run[cost][-1] / run["round"][-1] for run in row.runs(index)] for index in (0, 1)]
        if not all(costs):
            return MISSING
        return f"{statistics.fmean(costs[1]) / statistics.fmean(costs[0]):.2f}"

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
            return MISSING
        return ", ".join(cell_of_runs(row._replace(seed=run.seed)) for run in runs)

    return cell


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
                return MISSING
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
