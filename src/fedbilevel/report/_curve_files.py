"""Runs from a file of curves, a CSV table with a row per evaluation: what a run folder shrinks to.

Its columns are `label`, `seed`, `status` (of the last evaluation of a run) and numbers named as in
metrics.jsonl. An empty cell is a number that was not measured, or not finite.
"""

import csv
import lzma
from collections.abc import Sequence
from pathlib import Path

from fedbilevel.runs import folder
from fedbilevel.runs.folder import RunFolder, Table

SUFFIXES = (".csv", ".csv.xz")


def read_runs(paths: Sequence[Path | str]) -> list[RunFolder]:
    """Read run folders, those below other folders, and files of curves.

    Raises:
        FileNotFoundError: If one of the paths does not exist or holds no run.
        ValueError: If a file does not hold what it should; the message names the file.
    """
    files = [Path(path) for path in paths if str(path).endswith(SUFFIXES)]
    folders = [path for path in paths if not str(path).endswith(SUFFIXES)]
    runs = [folder.read(path) for path in folder.find(folders)]
    for file in files:
        runs += _read_curves(file)
    return runs


def _read_curves(file: Path) -> list[RunFolder]:
    """Read a file of curves; a run of it has a label, a seed and a history, and no settings."""
    runs: dict[tuple[str, int], RunFolder] = {}
    opened = lzma.open if file.suffix == ".xz" else open
    try:
        with opened(file, "rt", newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                label = row.pop("label")
                seed = int(row.pop("seed"))
                status = row.pop("status", "")
                if (label, seed) not in runs:
                    config: Table = {"label": label, "algorithm": {"name": label}, "seed": seed}
                    summary: Table = {"status": "unfinished", "ledger": {}}
                    runs[label, seed] = RunFolder(file, config, [], summary)
                run = runs[label, seed]
                evaluation = {key: float(value) if value else None for key, value in row.items()}
                run.history.append(evaluation)
                if status and run.summary is not None:
                    run.summary["status"] = status
    except (KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise ValueError(
            f"{file} is not a file of curves: expected a table with label, seed and numbers"
        ) from error
    if not runs:
        raise ValueError(f"{file} holds no evaluation")
    return list(runs.values())
