"""Progress of one run: a bar with live metrics on a terminal, plain lines when piped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_EVERY = 5.0  # seconds between lines when piped


def describe(metrics: Mapping[str, Any]) -> str:
    parts = []
    for name, label in (
        ("test_accuracy", "accuracy"),
        ("upper_loss", "loss"),
        ("hypergradient_norm", "|grad|"),
    ):
        if metrics.get(name) is not None:
            parts.append(f"{label} {metrics[name]:.4g}")
    return "  ".join([*parts, megabytes(metrics["bytes_up"] + metrics["bytes_down"])])


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


class Progress:
    def __init__(self, title: str, rounds: int, quiet: bool) -> None:
        self.title, self.rounds, self.quiet = title, rounds, quiet
        self.console = Console(stderr=True)
        self.bar: Bar | None = None
        self.last = -PLAIN_EVERY

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.quiet:
            name, now = (
                TextColumn(form, markup=False)
                for form in ("{task.description}", "{task.fields[metrics]}")
            )
            columns = [name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), now]
            self.bar = Bar(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.rounds, metrics="")
        return self

    def show(self, metrics: Mapping[str, Any]) -> None:
        if self.bar:
            self.bar.update(self.task, completed=metrics["round"], metrics=describe(metrics))
        elif not self.quiet and (
            time.monotonic() - self.last >= PLAIN_EVERY or metrics["round"] >= self.rounds
        ):
            self.last = time.monotonic()
            line = f"{self.title}  round {metrics['round']}/{self.rounds}  {describe(metrics)}"
            self.console.print(line, soft_wrap=True, markup=False)

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
