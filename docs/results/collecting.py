"""From run folders to the files of curves that are committed."""

from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import search
from member import EXTRA
from members import BATTERY
from plan import Plan, is_finished

from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import RunFolder

COLUMNS = (
    "round",
    "iteration",
    "virtual_s",
    "wall_s",
    "bytes_up",
    "bytes_down",
    "gradients",
    "flops",
    "peak_bytes",
    "test_accuracy",
    "test_accuracy_ci95",
    "train_accuracy",
    "balanced_accuracy",
    "upper_loss",
    "auc",
    "f1",
    "all_labels",
    "correct_labels",
    "learnt_weights",
)
WHOLE = {"round", "iteration", "bytes_up", "bytes_down", "gradients", "flops", "peak_bytes"}


def collect(ids: Iterable[str], out: Path, curves: Path) -> None:
    """Write the curves of finished members to a file per experiment, and its trials to another.

    Curves of members that have no run folder here are kept.
    """
    curves.mkdir(parents=True, exist_ok=True)
    for name in ids:
        file = curves / f"{name}.csv.xz"
        runs = dict(committed(file))
        plan = Plan.of([name], out)
        finished = 0
        for path, (member, seed) in plan.members.items():
            if is_finished(path):
                rows = curve_rows(folders.read(path), member.label, seed)
                runs[member.label, seed] = list(rows)
                finished += 1
        expected = [(member.label, seed) for member in BATTERY[name] for seed in member.seeds]
        rows = [row for run in expected for row in runs.get(run, ())]
        if finished:
            write_curves(file, rows)
        trials = [trial for _, trial in plan.trials()]
        if trials:
            search.write_trials(curves / f"{name}-search.csv", trials)
        missing = [f"{label} seed {seed}" for label, seed in expected if (label, seed) not in runs]
        print(f"{name}: {len(rows)} evaluations, {len(missing)} members missing {missing}")


def committed(file: Path) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
    """Return the rows of each run in a file of curves, by label and seed; none without the file."""
    if not file.exists():
        return
    with lzma.open(file, "rt", newline="", encoding="utf-8") as stream:
        for (label, seed), rows in groupby(csv.DictReader(stream), itemgetter("label", "seed")):
            kept = [{key: value for key, value in row.items() if value} for row in rows]
            yield (label, int(seed)), kept


def curve_rows(run: RunFolder, label: str, seed: int) -> Iterator[dict[str, Any]]:
    """Return the evaluations of a finished run; the last one says how it ended."""
    extra = {}
    if (run.path / EXTRA).exists():
        extra = json.loads((run.path / EXTRA).read_text())
    for index, evaluation in enumerate(run.history):
        is_last = index == len(run.history) - 1
        values = {**evaluation, **extra} if is_last else evaluation
        row: dict[str, Any] = {"label": label, "seed": seed}
        for column in COLUMNS:
            if values.get(column) is not None:
                row[column] = _number(column, values[column])
        if is_last:
            row["status"] = run.status
        yield row


def _number(column: str, value: float) -> str:
    """Return a number as text: counts and accuracies exactly, times and losses rounded."""
    if column in WHOLE:
        return str(round(value))
    if column.endswith("_s"):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if column in ("upper_loss", "auc", "f1", "test_accuracy_ci95"):
        return f"{value:.6g}"
    return repr(value)


def write_curves(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write evaluations as a compressed table, without empty columns."""
    used = set().union(*rows)
    columns = [name for name in ("label", "seed", *COLUMNS, "status") if name in used]
    with lzma.open(file, "wt", preset=9, newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
