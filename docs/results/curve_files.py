"""The committed curves: evaluations by experiment, label and seed.

Curves are read from curves/ID.csv.xz, which battery.py writes; those that are not there from
ID.csv, which has fewer evaluations than were made.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
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


def costs_to(runs: Iterable[Run], accuracy: float, cost: str) -> list[float]:
    """Return the cost at each seed's first evaluation at or above an accuracy, if there is one."""
    costs = []
    for run in runs:
        reached = np.flatnonzero(run["test_accuracy"] >= accuracy)
        if reached.size:
            costs.append(float(run[cost][reached[0]]))
    return costs
