"""The progress of a run: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from fedbilevel.runs.callbacks import Callback

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from fedbilevel.runs.run import Run

LINE_INTERVAL_S = 5.0
NOTEBOOK_INTERVAL_S = 0.2  # between two updates of a bar in a notebook
LABELS = {"test_accuracy": "accuracy", "upper_loss": "loss", "hypergradient_norm": "|grad|"}


def describe_metrics(metrics: Mapping[str, Any], metric: str = "test_accuracy") -> str:
    """Return the main metrics of an evaluation, and the bytes sent until then, in one line.

    Args:
        metrics: The evaluation.
        metric: The metric that the run is judged by, which comes first.

    Examples:
        >>> metrics = {"rmse": 0.5, "upper_loss": 2.0, "bytes_up": 0, "bytes_down": 0}
        >>> describe_metrics(metrics, "rmse")
        'rmse 0.5  loss 2  0.0 MB'
    """
    parts = []
    for name in dict.fromkeys([metric, *LABELS]):
        if metrics.get(name) is not None:
            parts.append(f"{LABELS.get(name, name)} {metrics[name]:.4g}")
    parts.append(format_bytes(metrics["bytes_up"] + metrics["bytes_down"]))
    return "  ".join(parts)


def format_bytes(count: float) -> str:
    """Return a number of bytes in MB, or in GB from 1 GB on."""
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.2f} GB"


def notebook() -> Any:
    """Return the IPython shell of a notebook's kernel, `None` elsewhere."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell = ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return shell


def is_interactive() -> bool:
    """Whether somebody may be looking at a bar: on a terminal, or in a notebook."""
    return notebook() is not None or Console(stderr=True).is_terminal


class Progress:
    """Shows the progress of a run while it is entered as a context.

    It is a bar with live metrics on a terminal (on stderr) and in a notebook, and plain lines
    elsewhere.

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
        self._cell: _NotebookBar | None = None
        self._last_line_at = -LINE_INTERVAL_S
        self._next_line = ""

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        if notebook() is not None:
            self._cell = _NotebookBar(self.title, self.rounds)
        elif self._console.is_terminal:
            self._bar = _terminal_bar(self._console)
            self._bar.start()
            self._bar_task = self._bar.add_task(self.title, total=self.rounds, metrics="")
        return self

    def advance(self, rounds: int) -> None:
        """Move the bar to a number of rounds, between two evaluations."""
        if self._bar:
            self._bar.update(self._bar_task, completed=rounds)
        elif self._cell:
            self._cell.update(rounds)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.quiet:
            self._console.print(text, soft_wrap=True, markup=False)

    def show(self, metrics: Mapping[str, Any], metric: str = "test_accuracy") -> None:
        """Show an evaluation; plain lines are at least some seconds apart, up to the last one."""
        description = describe_metrics(metrics, metric)
        if self._bar:
            self._bar.update(self._bar_task, completed=metrics["round"], metrics=description)
            return
        if self._cell:
            self._cell.update(metrics["round"], description)
            return
        self._next_line = f"{self.title}  round {metrics['round']}/{self.rounds}  {description}"
        waited = time.monotonic() - self._last_line_at >= LINE_INTERVAL_S
        if waited or metrics["round"] >= self.rounds:
            self._print_line()

    def _print_line(self) -> None:
        """Print the last evaluation, unless that was done."""
        if self._next_line:
            self._last_line_at = time.monotonic()
            self.say(self._next_line)
        self._next_line = ""

    def __exit__(self, *_: object) -> None:
        self._print_line()
        if self._bar:
            self._bar.stop()
        elif self._cell:
            self._cell.draw()


def _terminal_bar(console: Console) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}", markup=False),
        console=console,
    )


class _NotebookBar:
    """A bar in the output of a notebook's cell, without widgets."""

    def __init__(self, title: str, rounds: int) -> None:
        from IPython.display import HTML, display

        self.title = title
        self.rounds = rounds
        self.reached = 0
        self.description = ""
        self._html = HTML
        self._drawn_at = time.monotonic()
        self._handle = display(HTML(self._text()), display_id=True)

    def update(self, reached: int, description: str = "") -> None:
        """Show how far the run is, unless it was shown a moment ago."""
        self.reached = reached
        self.description = description or self.description
        if time.monotonic() - self._drawn_at >= NOTEBOOK_INTERVAL_S:
            self.draw()

    def draw(self) -> None:
        """Show how far the run is."""
        self._drawn_at = time.monotonic()
        self._handle.update(self._html(self._text()))

    def _text(self) -> str:
        bar = f'<progress value="{self.reached}" max="{max(1, self.rounds)}"></progress>'
        text = f"round {self.reached}/{self.rounds}  {self.description}"
        return f"<div>{escape(self.title)} {bar} {escape(text)}</div>"


class ShowProgress(Callback):
    """Shows the progress of a run, as `Progress` does; only the first rank shows anything.

    Args:
        title: The title; by default the name of the algorithm.
        quiet: Whether to show nothing.
    """

    def __init__(self, title: str = "", quiet: bool = False) -> None:
        from fedbilevel.core import ranks  # needs PyTorch

        self.title = title
        self.quiet = quiet or ranks.rank() > 0
        self._progress: Progress | None = None

    def on_start(self, run: Run) -> None:
        """Show an empty bar, or that of a resumed run."""
        rounds = int(run.limits.get("rounds", 0))
        self._progress = Progress(self.title or run.algorithm.name, rounds, self.quiet)
        self._progress.__enter__()

    def on_iteration(self, run: Run) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.advance(run.fed.ledger.rounds)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Show the metrics."""
        if self._progress is not None:
            self._progress.show(metrics, run.metric.name)

    def on_end(self, run: Run) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.__exit__()
