"""Computes the tables of README.md and verdicts.md from the curves.

    python docs/results/tables.py

It rewrites what stands between `<!-- table NAME -->` and `<!-- end NAME -->` on both pages. A table
is a list of rows, each with the labels of its curves, and a list of columns, each a function of a
row. Curves are read from curves/ID.csv.xz, which battery.py writes; those that are not there from
ID.csv, which has fewer evaluations than were made.
"""

from __future__ import annotations

import csv
import lzma
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from battery import BATTERY
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


def to(accuracy: float, cost: str = "round", curve: int = 0) -> Cell:
    """Return the cost to an accuracy: mean over the seeds that reach it, and how many do."""

    def cell(runs: list[Run]) -> str:
        costs = costs_to(runs, accuracy, cost)
        if not costs:
            return "never"
        text = mean_and_spread(costs, 0)
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
        costs = [costs_to(row.runs(index), accuracy, cost) for index in (0, 1)]
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


def scales(row: Row) -> str:
    """Return the scales of step sizes that `tune` chose, from the comments of the tuned file."""
    name, label = row.curves[0].split("/", 1)
    method, *conditions = label.split()
    file = "-".join([name, *conditions]) + ".toml"
    if not (HERE / file).exists():
        return ""
    line = re.search(rf"^# {method}: .* x ([\d.]+), y ([\d.]+)", (HERE / file).read_text(), re.M)
    return f"{line[1]}, {line[2]}" if line else ""


# Tables

PARTITIONS = {"iid": "iid", "shards": "shards"}
TABLE2_PRINT = {  # rounds to 90% and final accuracy of print; its fednest is also the reference's
    ("aggitd", "iid", 1): (530, 92.94),
    ("aggitd", "iid", 5): (195, 94.61),
    ("aggitd", "shards", 1): (520, 92.67),
    ("aggitd", "shards", 5): (305, 93.88),
    ("fednest", "iid", 1): (1630, 91.68),
    ("fednest", "iid", 5): (610, 93.48),
    ("fednest", "shards", 1): (1380, 91.46),
    ("fednest", "shards", 5): (760, 92.87),
}


def table2_rows(batch: str) -> list[Row]:
    """Return the rows of aggitd-table2 at one batch size."""
    rows = []
    methods = ("aggitd", "fednest", "fednest-reference")
    for method, partition, tau in product(methods, PARTITIONS, (1, 5)):
        rounds, accuracy = TABLE2_PRINT[method.removesuffix("-reference"), partition, tau]
        cells = (method, partition, str(tau), f"{rounds} ({accuracy}%)")
        curve = f"aggitd-table2/{method} {partition} tau={tau}{batch}"
        rows.append(Row(cells, [curve], rounds))
    return rows


TABLE2 = {
    "rounds to 90%": to(0.9),
    "outer iterations": iterations_to(0.9),
    "final accuracy": final(),
    "best accuracy": best(),
    "rounds / print": against_print(0.9),
}
TARGETS = {"to 80%": to(0.8), "90%": to(0.9), "93%": to(0.93), "95%": to(0.95)}
SECONDS = {
    "seconds to 85%": to(0.85, "virtual_s"),
    "to 88%": to(0.88, "virtual_s"),
    "to 90%": to(0.9, "virtual_s"),
}
AFBO_METHODS = ("afbo", "simfbo", "fednest", "sdbo", "adbo")
AFBO_NAMES = {"afbo": "afbo, linear system (ours)"}


def sgd_curves(partition: str, method: str) -> list[str]:
    """Return the curves of the SVRG and of the SGD type."""
    svrg = f"aggitd-table2/{method} {partition} tau=1"
    if method == "lfednest":
        svrg = "aggitd-fig3/lfednest C=0.1"
    return [svrg, f"aggitd-fig4/{method} sgd {partition}"]


def participation_rows() -> list[Row]:
    """Return the rows of aggitd-fig3."""
    rows = []
    for ratio, method in product((0.1, 0.2, 0.5), ("aggitd", "fednest", "lfednest")):
        curve = f"aggitd-fig3/{method} C={ratio}"
        if ratio == 0.1 and method != "lfednest":
            curve = f"aggitd-table2/{method} shards tau=1"
        rows.append(Row((str(ratio), method), [curve]))
    return rows


def simfbo_fig2_rows() -> list[Row]:
    """Return the rows of simfbo-fig2."""
    rows = []
    methods = ("unifbo", "simfbo", "lfednest", "aggitd", "fednest")
    for partition, settings, method in product(PARTITIONS, ("tuned", "paper"), methods):
        curve = f"simfbo-fig2/{method} {partition} {settings}"
        if settings == "paper" and method in ("aggitd", "fednest"):
            curve = f"aggitd-table2/{method} {partition} tau=1"
        if settings == "tuned" or method != "unifbo":
            rows.append(Row((partition, settings.replace("paper", "papers'"), method), [curve]))
    return rows


def cleaning_rows(experiment: str, extra: Mapping[str, str]) -> list[Row]:
    """Return the rows of a hyper-cleaning experiment with delays."""
    methods = {method: AFBO_NAMES.get(method, method) for method in AFBO_METHODS} | extra
    rows = []
    for partition, (method, name) in product(PARTITIONS, methods.items()):
        rows.append(Row((partition, name), [f"{experiment}/{method} {partition}"]))
    return rows


def regularization_rows(condition: str, other: str | None = None) -> list[Row]:
    """Return the rows of an experiment on Covertype, under one or two conditions."""
    rows = []
    for method in AFBO_METHODS:
        curves = [f"afbo-fig3/{method} {condition}"]
        if other:
            curves.append(f"afbo-fig3/{method} {other}")
        if condition == "pareto":
            curves = [f"afbo-fig6/{method} pareto"]
        rows.append(Row((AFBO_NAMES.get(method, method),), curves))
    return rows


CNN_PRINT = {
    ("mnist cnn iid", "aggitd"): "97.6%",
    ("mnist cnn shards", "aggitd"): "96.7%",
    ("mnist cnn shards", "fednest"): "fails",
    ("mnist cnn shards", "lfednest"): "fails",
    ("mnist cnn shards", "fednest-reference"): "fails",
}


def cnn_rows() -> list[Row]:
    """Return the rows of aggitd-cnn."""
    rows = []
    for condition in ("mnist cnn iid", "mnist cnn shards", "cifar10 cnn iid", "cifar10 mlp iid"):
        methods = ["aggitd", "fednest"]
        if condition.startswith("mnist"):
            methods += ["lfednest", "fednest-reference"]
        for method in methods:
            printed = CNN_PRINT.get((condition, method), "")
            if condition.startswith("cifar10"):
                printed = '"not satisfactory"' if method == "aggitd" else "does not converge"
            cells = (condition, method, printed)
            rows.append(Row(cells, [f"aggitd-cnn/{method} {condition}"]))
    return rows


FEW_SHOT_PRINT = {  # 1-shot and 5-shot
    "rabo": ("76.05%", "89.12%"),
    "rafbo": ("75.09%", "88.57%"),
    "static": ("72.34%", "85.09%"),
    "oap": ("73.58%", "86.16%"),
    "fedrolex": ("73.74%", "86.95%"),
    "fiarse": ("74.33%", "87.78%"),
    "fedmbo": ("82.66%", "93.69%"),
    "protonet": ("80.76%", "89.33%"),
}
CLIENTS_PRINT = {"10": "76.05%", "20": "75.81%", "30": "74.39%", "50": "72.76%"}
LOSS_TUNING = {
    "rabo": "rabo, 10 terms x 0.1",
    "rafbo": "rafbo, 10 terms x 0.1",
    "rabo cg": "rabo, conjugate gradients",
    "rafbo cg": "rafbo, conjugate gradients",
    "rabo-3x0.02": "rabo, 3 terms x 0.02",
    "rafbo-3x0.02": "rafbo, 3 terms x 0.02",
    **{name: name for name in ("static", "oap", "fedrolex", "fiarse")},
    "fedmbo": "fedmbo, full models",
    "fedavg": "fedavg, full models, untuned loss",
}

TABLES: dict[str, Table] = {
    "mnist-single-loop": Table(
        ["method", "data", "local steps"],
        [
            Row(("simfbo", "iid", "1"), ["mnist-single-loop/simfbo iid"]),
            Row(("asfbo", "shards", "5 to 15"), ["mnist-single-loop/asfbo shards"]),
            Row(("la-asfbo", "shards", "5 to 15"), ["mnist-single-loop/la-asfbo shards"]),
        ],
        {
            "rounds to 80%": to(0.8),
            "rounds to 90%": to(0.9),
            "of seeds 0, 1, 2": to_of_seeds(0.9),
            "best accuracy": best(),
            "gradients": final_number("gradients", 0),
        },
    ),
    "unifbo-mnist": Table(
        ["data"],
        [Row((partition,), [f"unifbo-mnist/unifbo {partition}"]) for partition in PARTITIONS],
        {
            "rounds to 80%": to_median(0.8),
            "90%": to_median(0.9),
            "93%": to_median(0.93),
            "95%": to_median(0.95),
            "97%": to_median(0.97),
            "accuracy after 100 rounds": final(),
        },
    ),
    "aggitd-table2": Table(
        ["method", "data", "tau", "print: rounds to 90% (final)"], table2_rows(""), TABLE2
    ),
    "aggitd-table2-batch-10": Table(
        ["method", "data", "tau", "print: rounds to 90% (final)"], table2_rows(" batch=10"), TABLE2
    ),
    "aggitd-epochs": Table(
        ["batch", "data", "tau in epochs", "print: rounds to 90% (final)"],
        [
            Row(
                (str(batch), partition, str(tau), "{} ({}%)".format(*printed)),
                [f"aggitd-epochs/aggitd {partition} tau={tau} epochs batch={batch}"],
                printed[0],
            )
            for batch, partition, tau in product((64, 10), PARTITIONS, (1, 5))
            for printed in [TABLE2_PRINT["aggitd", partition, tau]]
        ],
        TABLE2,
    ),
    "aggitd-fig3": Table(
        ["C", "method"],
        participation_rows(),
        {
            "rounds to 80%": to(0.8),
            "rounds to 90%": to(0.9),
            "accuracy after 2000 rounds": final(),
            "best accuracy": best(),
            "swing": swing(),
        },
    ),
    "aggitd-fig4": Table(
        ["data", "method"],
        [
            Row((partition, method), sgd_curves(partition, method))
            for partition, method in product(PARTITIONS, ("aggitd", "fednest", "lfednest"))
            if (partition, method) != ("iid", "lfednest")
        ]
        + [Row(("iid", "lfednest, SGD only"), ["", "aggitd-fig4/lfednest sgd iid"])],
        {
            "rounds to 90%, SVRG": to(0.9),
            "SGD": to(0.9, curve=1),
            "final accuracy, SVRG": final(),
            "SGD ": final(curve=1),
            "swing, SVRG": swing(),
            "SGD  ": swing(1),
        },
    ),
    "aggitd-cnn": Table(
        ["data, network", "method", "print (training)"],
        cnn_rows(),
        {
            "training accuracy after 2000 rounds": final("train_accuracy"),
            "its best": best("train_accuracy"),
            "test accuracy": final(),
        },
    ),
    "simfbo-fig2": Table(
        ["data", "settings", "method"],
        simfbo_fig2_rows(),
        {
            "scales x, y": scales,
            **TARGETS,
            "after 1000 rounds": at(1000),
            "best in the run": best(),
        },
    ),
    "simfbo-fig2-cnn": Table(
        ["method"],
        [
            Row((method,), [f"simfbo-fig2-cnn/{method}"])
            for method in ("simfbo", "lfednest", "aggitd", "fednest", "fednest-reference")
        ],
        {
            "test accuracy after 2000 rounds": final(),
            "training accuracy": final("train_accuracy"),
            "best test accuracy": best(),
        },
    ),
    "simfbo-fig5": Table(
        ["method"],
        [
            Row((method,), [f"simfbo-fig5/{method}"])
            for method in ("simfbo", "lfednest", "aggitd", "fednest")
        ],
        {
            "seconds to 80%": to(0.8, "wall_s"),
            "85%": to(0.85, "wall_s"),
            "90%": to(0.9, "wall_s"),
            "95%": to(0.95, "wall_s"),
            "accuracy after 10 s": at(10, cost="wall_s"),
            "30 s": at(30, cost="wall_s"),
            "at the end": final(),
            "rounds": final_number("round", 0),
        },
    ),
    "shrofbo-fig4": Table(
        ["method"],
        [
            Row((method,), [f"shrofbo-fig4/{method}"])
            for method in ("shrofbo", "simfbo", "aggitd", "fednest", "lfednest")
        ],
        {
            "rounds to 80%": to(0.8),
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "of seeds 0, 1, 2": of_seeds(last_rounds(50)),
            "best accuracy": best(),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "shrofbo-fig4-tuned": Table(
        ["method"],
        [
            Row((name,), [f"shrofbo-fig4/{label}"])
            for name, label in (
                ("shrofbo, tuned", "shrofbo tuned"),
                ("simfbo, tuned", "simfbo tuned"),
                ("unifbo, tuned", "unifbo tuned"),
                ("unifbo, as it ships", "unifbo"),
            )
        ],
        {
            "scales x, y": scales,
            "rounds to 80%": to_of_seeds(0.8),
            "rounds to 85%": to_of_seeds(0.85),
            "mean accuracy of the last 50 rounds": of_seeds(last_rounds(50)),
            "best accuracy": best(),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "shrofbo-fig4-equal": Table(
        ["local steps", "method"],
        [
            Row(("redrawn", "shrofbo"), ["shrofbo-fig4/shrofbo"]),
            Row(("redrawn", "simfbo"), ["shrofbo-fig4/simfbo equal"]),
            Row(("fixed, 1 to 10", "shrofbo"), ["shrofbo-fig4/shrofbo equal fixed"]),
            Row(("fixed, 1 to 10", "simfbo"), ["shrofbo-fig4/simfbo equal fixed"]),
        ],
        {
            "rounds to 80%": to_of_seeds(0.8),
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "of seeds 0, 1, 2": of_seeds(last_rounds(50)),
            "mean upper loss of the last 50 rounds": last_rounds(50, "upper_loss"),
        },
    ),
    "asfbo-fig1": Table(
        ["data", "settings", "method"],
        [
            Row(
                (partition, settings.replace("paper", "papers'"), method),
                [f"asfbo-fig1/{method} {partition} {settings}"],
            )
            for partition, settings, method in product(
                PARTITIONS,
                ("tuned", "paper"),
                ("simfbo", "shrofbo", "la-asfbo", "asfbo", "lfednest", "fednest"),
            )
        ],
        {
            "scales x, y": scales,
            **TARGETS,
            "mean accuracy of the last 50 rounds": last_rounds(50),
            "mean upper loss of those": last_rounds(50, "upper_loss"),
            "gradients": final_number("gradients", 0),
        },
    ),
    "afbo-fig1": Table(
        ["data", "method"],
        cleaning_rows(
            "afbo-fig1",
            {"afbo printed": "afbo as printed", "afbo printed free": "the same, products free"},
        ),
        {
            **SECONDS,
            "accuracy at the end": final(),
            "best accuracy": best(),
            "AUC of the weights": final_number("auc"),
            "seconds in all": final_number("virtual_s", 0),
        },
    ),
    "afbo-printed": Table(
        ["data", "method"],
        [
            Row((partition, method), [f"afbo-printed/{method} {partition}"])
            for partition, method in product(
                ("shards", "iid"),
                (
                    "simfbo",
                    "afbo, linear system (ours)",
                    "afbo as printed, K = 5",
                    "afbo as printed, K = 5, products free",
                    "afbo as printed, K = 1",
                    "afbo as printed, K = 1, products free",
                ),
            )
        ],
        {"seconds to 90%": to(0.9, "virtual_s"), "of seeds 0, 1, 2": to_of_seeds(0.9, "virtual_s")},
    ),
    "afbo-fig3": Table(
        ["method"],
        regularization_rows("plain", "slow"),
        {
            "seconds to 65%": to(0.65, "virtual_s"),
            "seconds to 67%": to(0.67, "virtual_s"),
            "to 67% with stragglers": to(0.67, "virtual_s", 1),
            "grows by": growth(0.67, "virtual_s"),
            "time for 250 rounds grows by": total_growth("virtual_s"),
            "accuracy after 250 rounds": final(),
            "with stragglers": final(curve=1),
        },
    ),
    "afbo-fig5": Table(
        ["data", "method"],
        [
            Row((*row.cells,), [*row.curves, row.curves[0].replace("fig5", "fig1")])
            for row in cleaning_rows("afbo-fig5", {})
        ],
        {
            **SECONDS,
            "accuracy after 400 rounds": final(),
            "seconds for 400 rounds": final_number("virtual_s", 0),
            "in afbo-fig1": final_number("virtual_s", 0, curve=1),
        },
    ),
    "afbo-fig6": Table(
        ["method"],
        regularization_rows("pareto"),
        {
            "seconds to 65%": to(0.65, "virtual_s"),
            "seconds to 67%": to(0.67, "virtual_s"),
            "accuracy after 250 rounds": final(),
            "seconds for 250 rounds": final_number("virtual_s", 0),
        },
    ),
    "afbo-fig7": Table(
        ["data", "method"],
        [
            Row((partition, name), [curve.format(partition)])
            for partition, (name, curve) in product(
                PARTITIONS,
                {
                    "afbo, linear system (ours)": "afbo-fig1/afbo {}",
                    "afl (AFA-CS)": "afbo-fig7/afl {}",
                    "afl-cd (AFA-CD)": "afbo-fig7/afl-cd {}",
                    "afl, hypergradients of all samples": "afbo-fig7/afl {} full",
                }.items(),
            )
        ],
        {
            "accuracy after 400 rounds": final(),
            "of seeds 0, 1, 2": of_seeds(final()),
            "upper loss": final_number("upper_loss"),
            "AUC of the weights": final_number("auc"),
        },
    ),
    "hyper-cleaning": Table(
        ["data"],
        [
            Row((name,), [f"hyper-cleaning/{label}"])
            for name, label in (
                ("MNIST, all 60,000, iid", "MNIST 60000 iid"),
                ("MNIST, 12,000, shards", "MNIST 12000 shards"),
                ("MNIST, 3,000, iid", "MNIST 3000 iid"),
                ("digits", "digits"),
            )
        ],
        {
            "rounds": final_number("round", 0),
            "AUC": final_number("auc"),
            "F1": final_number("f1"),
            "all labels": final("all_labels", 1),
            "correct labels only": final("correct_labels", 1),
            "learnt weights": final("learnt_weights", 1),
        },
    ),
    "rabo-table2": Table(
        ["ResNet-12", "print, 1-shot", "print, 5-shot"],
        [
            Row((method, *printed), [f"rabo-table2/{method} resnet12 {n}" for n in (1, 5)])
            for method, printed in FEW_SHOT_PRINT.items()
        ],
        {
            "1-shot, 100 rounds": episodes_at(100),
            "at the end": episodes_at(None),
            "5-shot, 100 rounds": episodes_at(100, 1),
            "at the end ": episodes_at(None, 1),
        },
    ),
    "rabo-table2-conv4": Table(
        ["Conv-4, 32 channels"],
        [
            Row((method,), [f"rabo-table2/{method} conv4 {n}" for n in (1, 5)])
            for method in FEW_SHOT_PRINT
        ],
        {
            "1-shot, 50 rounds": episodes_at(50),
            "150 rounds": episodes_at(150),
            "at the end": episodes_at(None),
            "5-shot, 50 rounds": episodes_at(50, 1),
            "150 rounds ": episodes_at(150, 1),
            "at the end ": episodes_at(None, 1),
        },
    ),
    "rabo-fig4": Table(
        ["", "print, operations"],
        [
            Row((name, printed), [f"rabo-fig4/{label} shots={n}" for n in (5, 1)])
            for name, label, printed in (
                ("fedmbo, full models", "fedmbo", "100%"),
                ("rabo-full, its steps on full models", "rabo-full", ""),
                ("rabo, five capacities", "rabo", "26.7%"),
                ("rafbo, five capacities", "rafbo", "17.8%"),
            )
        ],
        {
            "TFLOP per iteration, 5-shot": per("iteration", "flops", 1e12, 3),
            "of fedmbo's": share("iteration", "flops", "rabo-fig4/fedmbo shots=5"),
            "1-shot, of fedmbo's": share("iteration", "flops", "rabo-fig4/fedmbo shots=1", 1),
            "MB per iteration": per("iteration", "bytes", 1e6, 0),
            "of fedmbo's ": share("iteration", "bytes", "rabo-fig4/fedmbo shots=5"),
            "MB held by a client": final_number("peak_bytes", 0, 1e-6),
        },
    ),
    "rabo-fig5": Table(
        [""],
        [Row((name,), [f"rabo-fig5/{label}"]) for label, name in LOSS_TUNING.items()],
        {
            "balanced accuracy after 100 rounds": at(100, "balanced_accuracy"),
            "after 200 rounds": at(200, "balanced_accuracy"),
            "iterations": final_number("iteration", 0),
            "GFLOP": final_number("flops", 0, 1e-9),
            "GB": final_number("bytes", 2, 1e-9),
        },
    ),
    "rabo-fig6": Table(
        ["", "print: operations", "print: bytes"],
        [
            Row((method, operations, sent), [f"rabo-fig5/{label}"])
            for method, label, operations, sent in (
                ("fedmbo, 3 terms", "fedmbo", "100%", "100%"),
                ("rabo, 3 terms", "rabo-3x0.02", "50%", "25%"),
                ("rafbo, 3 terms", "rafbo-3x0.02", "25%", "25%"),
            )
        ],
        {
            "GFLOP per iteration": per("iteration", "flops", 1e9, 2),
            "of fedmbo's": share("iteration", "flops", "rabo-fig5/fedmbo"),
            "MB per iteration": per("iteration", "bytes", 1e6, 1),
            "of fedmbo's ": share("iteration", "bytes", "rabo-fig5/fedmbo"),
        },
    ),
    "rabo-fig3": Table(
        ["", "C_x*"],
        [
            Row((method, count), [f"rabo-fig3-conv4/{method}-C{count}"])
            for method, count in product(("rabo", "rafbo"), "12")
        ],
        {f"{rounds} rounds": episodes_at(rounds) for rounds in (50, 100, 150, 200)},
    ),
    "rabo-table3": Table(
        ["clients", "print"],
        [
            Row(
                (clients, printed),
                [
                    "rabo-table2/rabo conv4 1"
                    if clients == "10"
                    else f"rabo-table3-conv4/rabo-{clients}"
                ],
            )
            for clients, printed in CLIENTS_PRINT.items()
        ],
        {"rabo, 150 rounds": episodes_at(150)},
    ),
}


def rendered(text: str, blocks: Mapping[str, object]) -> str:
    """Return a page with its generated parts computed again.

    Args:
        text: The page.
        blocks: The parts by name.

    Raises:
        ValueError: If a part of the page is not declared.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"table {name} is not declared")
        return f"<!-- table {name} -->\n\n{blocks[name]}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """Return both pages as they should be."""
    import verdicts  # it imports this module

    results = HERE / "README.md"
    text = results.read_text("utf-8")
    page = HERE / "verdicts.md"
    return {
        results: rendered(text, TABLES),
        page: rendered(page.read_text("utf-8"), verdicts.blocks(text)),
    }


def main() -> None:
    """Rewrite the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
