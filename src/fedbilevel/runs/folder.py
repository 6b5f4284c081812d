"""Reading the folder that a run leaves behind."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
CHECKPOINT = "checkpoint/latest.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """A run as it lies on disk; `summary` is None while the run is unfinished."""

    path: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def algorithm(self) -> str:
        return str(self.config.get("label") or self.config["algorithm"]["name"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def status(self) -> str:
        return "unfinished" if self.summary is None else str(self.summary["status"])


def find(paths: Iterable[Path | str]) -> list[Path]:
    """Every run folder at or below the given paths, sorted, each once."""
    found: set[Path] = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is not a folder: expected a run folder or a folder that holds some"
            )
        below = {
            file.parent.resolve()
            for file in path.rglob(METRICS)
            if (file.parent / CONFIG).is_file()
        }
        if not below:
            raise FileNotFoundError(
                f"{path} holds no run: expected {CONFIG} and {METRICS} in it or in a folder below"
            )
        found |= below
    return sorted(found)


def read(path: Path | str) -> RunFolder:
    """The run in this folder; a cut-off last line of its metrics is left out."""
    path = Path(path)
    return RunFolder(
        path, _config(path / CONFIG), _history(path / METRICS), _summary(path / SUMMARY)
    )


def _config(file: Path) -> dict[str, Any]:
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


def _history(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().splitlines()
    history = []
    for number, line in enumerate(lines, start=1):
        try:
            evaluation = json.loads(line)
        except ValueError:
            evaluation = None
        if isinstance(evaluation, dict):
            history.append(evaluation)
        elif number < len(lines):  # the last line of a killed run may be cut off, no other may
            raise ValueError(f"{file}, line {number}: {line[:40]!r} is not a JSON object")
    return history


def _summary(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(summary, dict) or "status" not in summary:
        raise ValueError(f"{file} is not a summary: expected a JSON object with a status")
    return summary
