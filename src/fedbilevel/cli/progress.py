"""Progress of one run: a bar with live metrics on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_INTERVAL_S = 5.0
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


class Progress:
    """Shows the progress of a run on stderr while it is entered as a context.

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
