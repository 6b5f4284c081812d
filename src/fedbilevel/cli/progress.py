"""Progress of runs that another process writes, and of commands that prepare some."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from fedbilevel.runs.folder import CONFIG, metric_of
from fedbilevel.runs.metric import Metric
from fedbilevel.runs.progress import describe_metrics

CURVE_WIDTH = 20  # characters
LEVELS = "▁▂▃▄▅▆▇█"


def preparing(what: str, quiet: bool) -> Status:
    """Show on a terminal, while this is entered as a context, that a command is at work.

    A command that computes nothing yet may still take seconds, to import PyTorch.
    """
    return Console(stderr=True, quiet=quiet).status(f"preparing {what}")


class FollowedFile:
    """A file of lines that another process is writing.

    Args:
        path: The file; it need not exist yet.
        at_end: Whether to leave out the lines that it holds already.
    """

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self.path = path
        self._offset = 0
        if at_end and path.exists():
            self._offset = path.stat().st_size

    def new_lines(self) -> list[str]:
        """Return the complete lines that were added; all lines again if the file was cut."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            if self.path.stat().st_size < self._offset:
                self._offset = 0
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", "replace").splitlines()


class FollowedRun:
    """What is known of a run that another process writes.

    Args:
        metrics: The file of its evaluations.
        rounds: Its budget of rounds.

    Attributes:
        last: The latest evaluation, or None.
        metric: The metric that the run is judged by.
    """

    def __init__(self, metrics: Path, rounds: int) -> None:
        self.rounds = rounds
        self.last: dict[str, Any] | None = None
        self.metric = Metric("test_accuracy")
        self._path = metrics
        self._file = FollowedFile(metrics)
        self._points: list[tuple[int, float]] = []  # how far the curve reaches, and its value there

    def update(self) -> None:
        """Read the evaluations that were written since the last call."""
        for line in self._file.new_lines():
            with suppress(ValueError):  # a run that was killed may have left half a line
                self.last = json.loads(line)
                if not self._points:
                    self.metric = self._read_metric(self.last)
                self._add(self.last)

    def _read_metric(self, first: Mapping[str, Any]) -> Metric:
        config: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            config = tomllib.loads((self._path.parent / CONFIG).read_text("utf-8"))
        return metric_of(config, first)

    def _add(self, metrics: Mapping[str, Any]) -> None:
        """Add an evaluation to the curve; a resumed run may have gone back."""
        value = metrics.get(self.metric.name)
        if value is None:
            return
        budget = max(1, self.rounds)
        reached = CURVE_WIDTH * min(metrics["round"], budget) // budget
        self._points = [point for point in self._points if point[0] < reached]
        self._points.append((reached, value))

    @property
    def curve(self) -> str:
        """The metric over the budget of rounds: from 0 to 1, or over the range of its values."""
        values = [value for _, value in self._points]
        low = min([0.0, *values])
        high = max([1.0, *values])
        if (low, high) != (0.0, 1.0) or self.metric.direction == "minimize":
            low = min(values, default=0.0)
            high = max(values, default=1.0)
        drawn = ""
        for reached, value in self._points:
            share = (value - low) / (high - low) if high > low else 0.0
            level = LEVELS[min(int(share * len(LEVELS)), len(LEVELS) - 1)]
            drawn = (drawn + CURVE_WIDTH * level)[:reached]
        return drawn

    def __str__(self) -> str:
        """The latest evaluation and the curve in one line; empty before the first evaluation."""
        if self.last is None:
            return ""
        progress = f"round {self.last['round']}/{self.rounds}"
        described = describe_metrics(self.last, self.metric.name)
        return f"{progress}  {described}  {self.curve}".rstrip()
