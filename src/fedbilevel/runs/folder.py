"""The folder of a run on disk: its files, how to find and read it, and whether a run may use it.

A run folder holds `config.toml` (the resolved experiment), `metrics.jsonl` (one evaluation per
line), `checkpoint/` (from which a killed run resumes) and, once the run has ended, `summary.json`.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint/latest.safetensors"
EXTENSIBLE = ("rounds", "stop", "title")  # what may differ when a run is resumed

Table = dict[str, Any]  # as TOML and JSON hold it


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder, without its checkpoint.

    Args:
        path: The folder.
        config: The resolved experiment.
        history: The metrics of each evaluation; `None` stands for a number that is not finite.
        summary: The summary, or `None` if the run has not ended.
    """

    path: Path
    config: Table
    history: list[Table]
    summary: Table | None

    @property
    def algorithm(self) -> str:
        """The label under which the experiment ran the algorithm, or else the algorithm's name."""
        return str(self.config.get("label") or self.config["algorithm"]["name"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def status(self) -> str:
        """How the run ended, or "unfinished"."""
        if self.summary is None:
            return "unfinished"
        return str(self.summary["status"])


def find(paths: Iterable[Path | str]) -> list[Path]:
    """Find the run folders at or below the given paths.

    Args:
        paths: Run folders, or folders that hold some.

    Returns:
        The run folders as absolute paths, sorted, each of them once.

    Raises:
        FileNotFoundError: If one of the paths is not a folder, or holds no run.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     for seed in (0, 1):
        ...         out = f"{runs}/seed-{seed}"
        ...         _ = fb.solve(task.problem, task.clients, "simfbo", rounds=1, seed=seed, out=out)
        ...     [path.name for path in find([runs])]
        ['seed-0', 'seed-1']
    """
    run_folders: set[Path] = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is not a folder: expected a run folder or a folder that holds some"
            )
        candidates = [file.parent for file in path.rglob(METRICS)]
        below = {folder.resolve() for folder in candidates if (folder / CONFIG).is_file()}
        if not below:
            raise FileNotFoundError(
                f"{path} holds no run: expected {CONFIG} and {METRICS} in it or in a folder below"
            )
        run_folders |= below
    return sorted(run_folders)


def read(path: Path | str) -> RunFolder:
    """Read a run folder.

    A killed run may leave an incomplete last line in its metrics; that line is left out.

    Args:
        path: The run folder.

    Returns:
        The run's config, history and summary.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file does not hold what it should; the message names the file.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = fb.solve(task.problem, task.clients, "simfbo", rounds=2, out=out)
        ...     run = read(out)
        >>> run.algorithm, run.status, len(run.history)
        ('simfbo', 'completed', 3)
    """
    path = Path(path)
    config = _read_config(path / CONFIG)
    history = _read_history(path / METRICS)
    summary = _read_summary(path / SUMMARY)
    return RunFolder(path, config, history, summary)


def _read_config(file: Path) -> Table:
    try:
        config = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("name"), str):
        raise ValueError(f"{file}: algorithm is {algorithm!r}, expected a table with a name")
    if not isinstance(config.get("seed"), int):
        raise ValueError(f"{file}: seed is {config.get('seed')!r}, expected an integer")
    return config


def _read_history(file: Path) -> list[Table]:
    lines = file.read_bytes().splitlines()
    history = []
    for number, line in enumerate(lines, start=1):
        try:
            evaluation = json.loads(line)
        except ValueError:
            evaluation = None
        if isinstance(evaluation, dict):
            history.append(evaluation)
        elif number < len(lines):  # only the last line of a killed run may be incomplete
            raise ValueError(f"{file}, line {number}: {line[:40]!r} is not a JSON object")
    return history


def _read_summary(file: Path) -> Table | None:
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(summary, dict) or "status" not in summary:
        raise ValueError(f"{file} is not a summary: expected a JSON object with a status")
    return summary


def holds_run(path: Path) -> bool:
    """Whether a run has written a checkpoint or a summary to this folder."""
    return (path / CHECKPOINT).exists() or (path / SUMMARY).exists()


def check_writable(path: Path, config: Mapping[str, Any], resume: bool) -> None:
    """Check that a run may be written to a folder.

    Args:
        path: The folder, which need not exist.
        config: The resolved experiment of the run.
        resume: Whether the run may continue one that is already there.

    Raises:
        FileExistsError: If the folder holds a run that is not to be resumed.
        ValueError: If the run in the folder has other settings.
    """
    if not holds_run(path):
        return
    if not resume:
        raise FileExistsError(
            f"{path} already holds a run; resume it with --resume or give another folder with --out"
        )
    if (path / CHECKPOINT).exists():
        check_same_settings(path, config)


def check_same_settings(
    path: Path, config: Mapping[str, Any], ignoring: Sequence[str] = EXTENSIBLE
) -> None:
    """Check that the run in a folder has the same settings as another, up to its budget.

    Args:
        path: The run folder.
        config: The resolved experiment to compare with.
        ignoring: Keys of the experiment that may differ.

    Raises:
        ValueError: If a setting differs; the message names the setting and both values.
    """
    recorded = _flatten(read(path).config)
    current = _flatten(without_none(config))
    # Names come first: another algorithm explains why its settings differ.
    for key in sorted({*recorded, *current}, key=lambda key: (not key.endswith(".name"), key)):
        if key.split(".")[0] not in ignoring and recorded.get(key) != current.get(key):
            raise ValueError(
                f"{path} was run with {key} = {recorded.get(key)!r}, not {current.get(key)!r}; "
                "a run is resumed under its own settings"
            )


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return a nested table as one with dotted keys."""
    flat: Table = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def without_none(table: Mapping[str, Any]) -> Table:
    """Return a nested table as TOML can hold it: without `None`, and with lists for tuples."""
    kept: Table = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            kept[key] = without_none(value)
        elif isinstance(value, tuple):
            kept[key] = list(value)
        elif value is not None:
            kept[key] = value
    return kept


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a killed run, sees either the old or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
