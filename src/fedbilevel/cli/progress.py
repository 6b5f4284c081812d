"""Progress of runs: of one in this process, and of one that another process writes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status

LINE_INTERVAL_S = 5.0
CURVE_WIDTH = 20  # characters
LEVELS = "▁▂▃▄▅▆▇█"
LABELS = {"test_accuracy": "accuracy", "upper_loss": "loss", "hypergradient_norm": "|grad|"}


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """Return the main metrics of an evaluation, and the bytes sent until then, in one line."""
    parts = []
    for name, label in LABELS.items():
        if metrics.get(name) is not None:
            parts.append(f"{label} {metrics[name]:.4g}")
    parts.append(format_bytes(metrics["bytes_up"] + metrics["bytes_down"]))
    return "  ".join(parts)


def format_bytes(count: float) -> str:
    """Return a number of bytes in MB, or in GB from 1 GB on."""
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.2f} GB"


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
        curve: The test accuracy over the budget of rounds, from ▁ (0) to █ (1).
    """

    def __init__(self, metrics: Path, rounds: int) -> None:
        self.rounds = rounds
        self.last: dict[str, Any] | None = None
        self.curve = ""
        self._file = FollowedFile(metrics)

    def update(self) -> None:
        """Read the evaluations that were written since the last call."""
        for line in self._file.new_lines():
            with suppress(ValueError):  # a run that was killed may have left half a line
                self.last = json.loads(line)
                self._draw(self.last)

    def _draw(self, metrics: Mapping[str, Any]) -> None:
        """Draw the curve up to an evaluation; a resumed run may have gone back."""
        accuracy = metrics.get("test_accuracy")
        if accuracy is None:
            return
        level = LEVELS[min(int(accuracy * len(LEVELS)), len(LEVELS) - 1)]
        budget = max(1, self.rounds)
        reached = CURVE_WIDTH * min(metrics["round"], budget) // budget
        self.curve = (self.curve + CURVE_WIDTH * level)[:reached]

    def __str__(self) -> str:
        """The latest evaluation and the curve in one line; empty before the first evaluation."""
        if self.last is None:
            return ""
        progress = f"round {self.last['round']}/{self.rounds}"
        return f"{progress}  {describe_metrics(self.last)}  {self.curve}".rstrip()


class Progress:
    """Shows the progress of a run on stderr while it is entered as a context.

    It is a bar with live metrics on a terminal, and plain lines elsewhere.

    Args:
        title: The title of the run.
        rounds: Its budget of rounds.
        quiet: Whether to show nothing.
    """

    def __init__(self, title: str, rounds: int, quiet: bool) -> None:
        self.title = title
        self.rounds = rounds
        self.quiet = quiet
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._last_line_at = -LINE_INTERVAL_S

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self.quiet:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}", markup=False),
                console=self._console,
            )
            self._bar.start()
            self._bar_task = self._bar.add_task(self.title, total=self.rounds, metrics="")
        return self

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show an evaluation; plain lines are at least some seconds apart, up to the last one."""
        if self._bar:
            description = describe_metrics(metrics)
            self._bar.update(self._bar_task, completed=metrics["round"], metrics=description)
            return
        waited = time.monotonic() - self._last_line_at >= LINE_INTERVAL_S
        if not self.quiet and (waited or metrics["round"] >= self.rounds):
            self._last_line_at = time.monotonic()
            progress = f"round {metrics['round']}/{self.rounds}"
            line = f"{self.title}  {progress}  {describe_metrics(metrics)}"
            self._console.print(line, soft_wrap=True, markup=False)

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
