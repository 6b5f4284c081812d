"""Runs side by side, each in its own process: one that fails does not affect the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedbilevel import report
from fedbilevel.cli.options import called_command
from fedbilevel.cli.progress import CURVE_WIDTH, FollowedRun
from fedbilevel.experiments.config import Config
from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import (
    EXTENSIBLE,
    check_same_settings,
    holds_run,
    without_none,
    write_atomically,
)
from fedbilevel.runs.progress import LINE_INTERVAL_S, describe_metrics

POLL_S = 0.2
PIPE_WIDTH = 170  # columns, where there is no terminal
ERROR_LOG = "error.log"

# A member must end when its comparison does, even if that is killed: its standard input is then
# closed. It watches from the start, before it imports PyTorch, so that an impatient user who starts
# the comparison again does not meet members of the first one.
MEMBER = """
import os, threading

def watch():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()

from fedbilevel.cli import main

main()
"""


def compared_algorithms(table: Mapping[str, Any], option: str | None) -> list[str | None]:
    """Return the names of the algorithms to run.

    Args:
        table: The experiment.
        option: comma-separated names. None: those that the experiment compares.

    Returns:
        The names; None stands for the experiment's only algorithm.

    Raises:
        ValueError: If a name in the option is empty.
    """
    if option is not None:
        names = option.split(",")
        if not all(name.strip() for name in names):
            raise ValueError(f"the list of algorithms {option!r} holds an empty name")
        return [*names]
    return [*table.get("compare", [])] or [None]


def share_cores(table: Mapping[str, Any], jobs: int | None) -> tuple[int, int]:
    """Return the number of simultaneous runs, one per core by default, and of threads per run."""
    cores = os.cpu_count() or 1
    jobs = jobs or cores
    threads = table.get("runtime", {}).get("threads") or max(1, cores // jobs)
    return jobs, threads


class Comparison:
    """Runs the members of a comparison that are not finished, and reports on all of them.

    Args:
        folder: The folder of the comparison.
        members: The config of each run, by the path of its folder below `folder`.
        data_dir: Folder of the data sets. None: the default folder.
        resume: Whether to resume the runs in the folder.
        jobs: How many runs at the same time.

    Attributes:
        waiting: The members that are not started yet.
        running: The processes of the members that are running.
        ended: How each of the other members has ended.

    Raises:
        FileExistsError: If the folder holds runs that are not to be resumed.
        ValueError: If a run in the folder has other settings.
    """

    extensible: ClassVar[tuple[str, ...]] = EXTENSIBLE

    def __init__(
        self,
        folder: Path,
        members: dict[str, Config],
        data_dir: Path | None,
        resume: bool,
        jobs: int,
    ) -> None:
        existing = [name for name in members if holds_run(folder / name)]
        if existing and not resume:
            raise FileExistsError(
                f"{folder} already holds runs of this comparison; resume them with --resume or "
                "give another folder with --out"
            )
        for name in existing:
            check_same_settings(folder / name, members[name].table, self.extensible)
        self.folder = folder
        self.members = members
        self.data_dir = data_dir
        self.jobs = jobs
        self.waiting: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: dict[str, str] = {}
        self._followed: dict[str, FollowedRun] = {}
        self._next_line_at = 0.0
        for name in members:
            if self._is_finished(name):
                self.ended[name] = self._status(name)
            else:
                self.waiting.append(name)

    def run(self, quiet: bool, as_json: bool) -> int:
        """Run the members that are not finished, report on all, and return the exit code."""
        console = Console(stderr=True, quiet=quiet)
        live = None
        if console.is_terminal and not quiet:
            live = Live(self._progress_table(), console=console, refresh_per_second=4)
        with live or nullcontext():
            interrupted = self._run_members(console, live)
        if interrupted or "interrupted" in self.ended.values():
            return 130
        if quiet and not as_json:  # otherwise the report tells
            for name, status in self.ended.items():
                if status.startswith("failed"):
                    sys.stderr.write(f"error: {name} {status.replace('error: ', '', 1)}\n")
        return self._report(quiet, as_json)

    def _run_members(self, console: Console, live: Live | None) -> bool:
        """Run members until none is left, and return whether the user interrupted them."""
        interrupted = False
        while self.waiting or self.running:
            try:
                while self.waiting and len(self.running) < self.jobs:
                    name = self.waiting.pop(0)
                    self._start(name)
                    if not live:
                        self._print_line(console, name, "started")
                for name, process in list(self.running.items()):
                    if process.poll() is None:
                        continue
                    del self.running[name]
                    status = self._finish(name, process)
                    self.ended[name] = status
                    if not live:
                        news = status
                        if not status.startswith("failed"):
                            news += f"  {self._follow(name)}"
                        self._print_line(console, name, news)
                    if not interrupted and status != "interrupted":
                        self._after_member(name)
                if live:
                    live.update(self._progress_table())
                else:
                    self._print_progress(console)
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                interrupted = True
                self._interrupt()
        return interrupted

    def _interrupt(self) -> None:
        """Start no more members, and interrupt those that are running."""
        self.waiting = []
        # A terminal has interrupted them too, at the same moment, which counts once.
        for process in self.running.values():
            process.send_signal(signal.SIGINT)

    def _after_member(self, name: str) -> None:
        """Hook for subclasses: a member has ended, and others may be added."""

    def _start(self, name: str) -> None:
        """Start a member: `fedbilevel run` on its resolved config."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        # A summary is there if the run was finished and its budget has been raised.
        (path / folders.SUMMARY).unlink(missing_ok=True)
        config = path / folders.CONFIG
        write_atomically(config, tomli_w.dumps(without_none(self.members[name].table)))
        command = [sys.executable, "-c", MEMBER, "run", str(config)]
        command += ["--out", str(path), "--resume", "--quiet"]
        if self.data_dir:
            command += ["--data-dir", str(self.data_dir)]
        with (path / ERROR_LOG).open("wb") as errors:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=errors,
                # `python -c` would import a file of the working folder in place of any module.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )

    def _finish(self, name: str, process: subprocess.Popen[bytes]) -> str:
        """Close the pipe to a process that has ended, and return the status of its run."""
        process.communicate()
        if process.returncode in (0, 3, 130):
            return self._status(name)
        errors = (self.folder / name / ERROR_LOG).read_text("utf-8", errors="replace").strip()
        if errors:
            return f"failed: {errors.splitlines()[-1]}"
        return f"failed: exit code {process.returncode}"

    def _is_finished(self, name: str) -> bool:
        """Whether a member has ended under its present config; a raised budget continues it.

        A damaged member counts as unfinished: resuming repairs it, or says what is broken.
        """
        try:
            run = folders.read(self.folder / name)
        except (OSError, ValueError):
            return False
        ended = run.status in ("completed", "diverged")
        wanted = without_none(self.members[name].table)
        # The metric may come from the task, and does not change what was computed.
        return ended and folders.first_difference(run.config, wanted, ("metric",)) is None

    def _status(self, name: str) -> str:
        path = self.folder / name
        if not (path / folders.METRICS).exists():
            return "waiting"
        return folders.read(path).status

    def _follow(self, name: str) -> FollowedRun:
        """Return what a member has written so far."""
        if name not in self._followed:
            path = self.folder / name / folders.METRICS
            self._followed[name] = FollowedRun(path, self.members[name].experiment.rounds)
        self._followed[name].update()
        return self._followed[name]

    def _progress_table(self) -> Table:
        table = Table("run", "status", "round", title=escape(str(self.folder)))
        table.add_column("curve", no_wrap=True, width=CURVE_WIDTH)
        table.add_column("metrics")
        for name, config in self.members.items():
            status = self.ended.get(name, "waiting")
            if name in self.running:
                status = "running"
            progress = ""
            metrics = Text(no_wrap=True, overflow="ellipsis")  # a narrow terminal shows the first
            followed = self._follow(name)
            if followed.last:
                progress = f"{followed.last['round']}/{config.experiment.rounds}"
                metrics.append(describe_metrics(followed.last, followed.metric.name))
            table.add_row(escape(name), escape(status), progress, followed.curve, metrics)
        return table

    def _print_progress(self, console: Console) -> None:
        """Print a line about the member that has run longest, if the last line is old enough."""
        for name in self.running:
            followed = self._follow(name)
            begun = followed.last is not None and followed.last["round"] > 0
            if begun and time.monotonic() >= self._next_line_at:
                self._next_line_at = time.monotonic() + LINE_INTERVAL_S
                self._print_line(console, name, str(followed))

    def _print_line(self, console: Console, name: str, news: str) -> None:
        console.print(f"{name}: {news}".rstrip(), soft_wrap=True, markup=False)

    def _report(self, quiet: bool, as_json: bool) -> int:
        """Print the ranking, write report.html, and return the exit code."""
        failed = {}
        for name, status in self.ended.items():
            if status.startswith("failed"):
                failed[name] = status
        finished = [self.folder / name for name in self.members if name not in failed]
        page = self.folder / "report.html"
        rows: list[report.Row] = []
        if finished:
            rows = report.ranked(finished)
            report.write_page(finished, page, called_command())
        if as_json:
            print(json.dumps({"ranked": [_row_as_json(row) for row in rows], "failed": failed}))
        elif not quiet:
            _print_ranking(rows)
            for name, status in failed.items():
                print(f"{name} {status}")
            if finished:
                print(f"report: {page}")
        if failed:
            return 2
        return 0


def print_table(table: Table) -> None:
    """Print a table; its width is that of the terminal, or ample if there is none."""
    _console().print(table)


def _console() -> Console:
    if sys.stdout.isatty():
        return Console()
    return Console(width=PIPE_WIDTH)


def _print_ranking(rows: Sequence[report.Row]) -> None:
    """Print the ranking, with as many of its columns as the terminal has room for.

    The last ones to give way are the algorithm, its final value, and the hardest target.
    """
    console = _console()
    columns = _ranking_columns(rows)
    kept = {"algorithm", *[name for name in columns if name.startswith("final ")][:1]}
    targets = [name for name in columns if name.startswith(("≤", "≥"))]
    others = [name for name in reversed(columns) if name not in {*kept, *targets, "status"}]
    for dropped in ("", *others, "status", *targets[:-1]):
        columns.pop(dropped, None)
        table = _ranking_table(rows, columns)
        needed = console.measure(
            table, options=console.options.update_width(10 * PIPE_WIDTH)
        ).maximum
        if needed <= console.width:
            break
    console.print(table)


def _ranking_columns(rows: Sequence[report.Row]) -> dict[str, list[str]]:
    """Return the cells of each column, by its heading."""
    columns = {
        "algorithm": [escape(row.label) for row in rows],
        "seeds": [str(row.seeds) for row in rows],
    }
    if not rows:
        return columns
    metric = rows[0].metric
    sign = "≤" if metric.direction == "minimize" else "≥"
    for target in metric.targets:
        cells = [_rounds_cell(row.cost["round"][target], row.seeds) for row in rows]
        columns[f"{sign} {format_value(metric.name, target)}"] = cells
    columns |= _final_columns(rows)
    columns["operations"] = [_cost_cell("flops", row.flops) for row in rows]
    columns["peak memory"] = [_cost_cell("bytes", row.peak) for row in rows]
    columns["status"] = [", ".join(sorted(row.statuses)) for row in rows]
    return columns


def _final_columns(rows: Sequence[report.Row]) -> dict[str, list[str]]:
    """Return the cells of the metrics at the end, by heading."""
    columns = {}
    own = [name for name in rows[0].finals if name not in ("upper_loss", "train_accuracy")]
    for name in dict.fromkeys([rows[0].metric.name, *own]):
        if any(row.finals[name] for row in rows):
            heading = f"final {name.removeprefix('test_').replace('_', ' ')}"
            columns[heading] = [_final_cell(name, row.finals[name]) for row in rows]
    return columns


def _ranking_table(rows: Sequence[report.Row], columns: Mapping[str, Sequence[str]]) -> Table:
    title = "the best algorithm first"
    if rows:
        name = rows[0].metric.name.replace("_", " ")
        title = f"communication rounds to each {name}, {title}"
        if any(row.seeds > 1 for row in rows):
            title += "; mean ± standard deviation over seeds"
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def format_value(metric: str, value: float) -> str:
    """Format a value of a metric; accuracies as percentages."""
    if metric.endswith("accuracy"):
        return f"{100 * value:.4g}%"
    return f"{value:.4g}"


def _final_cell(metric: str, final: report.Spread | None) -> str:
    """Format a final value, with its deviation if there are several seeds."""
    if final is None:
        return "-"
    if metric.endswith("accuracy"):
        text = f"{final.mean:.2%}"
        deviation = f"{final.std:.2%}"
    else:
        text = f"{final.mean:.4g}"
        deviation = f"{final.std:.2g}"
    if final.count > 1:
        text += f" ± {deviation}"
    return text


def _rounds_cell(rounds: report.Spread | None, seeds: int) -> str:
    """Format rounds to a target, with the number of seeds that reached it if not all did."""
    if rounds is None:
        return "-"
    text = f"{rounds.mean:.0f}"
    if rounds.count > 1:
        text += f" ± {rounds.std:.0f}"
    if rounds.count < seeds:
        text += f" ({rounds.count}/{seeds})"
    return text


def _cost_cell(axis: str, cost: report.Spread | None) -> str:
    if cost is None:
        return "-"
    return report.AXES[axis].format(cost)


def _row_as_json(row: report.Row) -> dict[str, object]:
    cost_to: dict[str, dict[str, float | None]] = {}
    for axis, costs in row.cost.items():
        cost_to[axis] = {str(target): _mean(cost) for target, cost in costs.items()}
    return {
        "algorithm": row.label,
        "seeds": row.seeds,
        "accuracy": _mean(row.finals.get("test_accuracy")),
        "metric": row.metric.name,
        "direction": row.metric.direction,
        "final": {name: _mean(final) for name, final in row.finals.items()},
        "flops": _mean(row.flops),
        "peak_bytes": _mean(row.peak),
        "cost_to": cost_to,
    }


def _mean(spread: report.Spread | None) -> float | None:
    if spread is None:
        return None
    return spread.mean
