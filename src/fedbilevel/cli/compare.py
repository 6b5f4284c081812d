"""Many runs side by side, each a process of its own: one that fails takes no other with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fedbilevel import report
from fedbilevel.cli.progress import describe
from fedbilevel.experiments.config import Config
from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import (
    EXTENSIBLE,
    check_same_settings,
    holds_run,
    without_none,
    write_atomically,
)

POLL = 0.2  # seconds

# A member ends when its comparison does, however that ended: its standard input is then closed. It looks from its first
# moment on, because importing torch takes longer than an impatient reader waits before starting again.
MEMBER = """
import os, threading

def watch():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()

from fedbilevel.cli import main

main()
"""


class Comparison:
    """The members of a comparison, by their folders below `folder`."""

    extensible: ClassVar[tuple[str, ...]] = EXTENSIBLE

    def __init__(
        self,
        folder: Path,
        members: dict[str, Config],
        data_dir: Path | None,
        resume: bool,
        jobs: int,
    ) -> None:
        taken = [name for name in members if holds_run(folder / name)]
        if taken and not resume:
            raise FileExistsError(
                f"{folder} holds such runs already; go on with --resume or give another folder with --out"
            )
        for name in taken:
            check_same_settings(folder / name, members[name].table, self.extensible)
        self.folder, self.members, self.data_dir, self.jobs = folder, members, data_dir, jobs
        self.waiting = [name for name in members if not self._finished(name)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ended = {name: self._status(name) for name in members if name not in self.waiting}

    def run(self, quiet: bool, as_json: bool) -> int:
        """Run what is not finished, then rank, print and write the report; the exit code."""
        console = Console(stderr=True, quiet=quiet)
        live = None
        if console.is_terminal and not quiet:
            live = Live(self._table(), console=console, refresh_per_second=4)
        with live or nullcontext():
            interrupted = self._run_members(console, live)
        if interrupted or "interrupted" in self.ended.values():
            return 130
        return self._report(quiet, as_json)

    def _run_members(self, console: Console, live: Live | None) -> bool:
        """Run members until none is left, and return whether the user interrupted them."""
        interrupted = False
        while self.waiting or self.running:
            try:
                while self.waiting and len(self.running) < self.jobs:
                    self._start(self.waiting.pop(0))
                for name, process in list(self.running.items()):
                    if process.poll() is None:
                        continue
                    del self.running[name]
                    status = self._end(name, process)
                    self.ended[name] = status
                    if not live:
                        console.print(f"{name}: {status}", soft_wrap=True, markup=False)
                    if not interrupted and status != "interrupted":
                        self._follow(name)
                if live:
                    live.update(self._table())
                time.sleep(POLL)
            except KeyboardInterrupt:
                interrupted = True
                self._interrupt()
        return interrupted

    def _interrupt(self) -> None:
        """Start no more members, and interrupt those that are running."""
        self.waiting = []
        # A terminal has interrupted them too; a second signal does no harm.
        for process in self.running.values():
            process.send_signal(signal.SIGINT)

    def _follow(self, name: str) -> None:
        """What the end of a member calls for; in a comparison nothing."""

    def _start(self, name: str) -> None:
        """A member is `fedbilevel run` on its resolved config."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / folders.SUMMARY).unlink(missing_ok=True)  # of a run whose budget was raised
        config = path / folders.CONFIG
        write_atomically(config, tomli_w.dumps(without_none(self.members[name].table)))
        command = [
            sys.executable,
            "-c",
            MEMBER,
            "run",
            str(config),
            "--out",
            str(path),
            "--resume",
            "--quiet",
        ]
        if self.data_dir:
            command += ["--data-dir", str(self.data_dir)]
        with (path / "error.log").open("wb") as errors:
            self.running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)

    def _end(self, name: str, process: subprocess.Popen[bytes]) -> str:
        process.communicate()  # closes its pipe
        said = (self.folder / name / "error.log").read_text("utf-8", errors="replace").strip()
        if process.returncode in (0, 3, 130):
            return self._status(name)
        return f"failed: {said.splitlines()[-1] if said else f'exit code {process.returncode}'}"

    def _finished(self, name: str) -> bool:
        """Under the config at hand: a member whose budget was raised goes on."""
        if self._status(name) not in ("completed", "diverged"):
            return False
        return folders.read(self.folder / name).config == without_none(self.members[name].table)

    def _status(self, name: str) -> str:
        path = self.folder / name
        return folders.read(path).status if (path / folders.METRICS).exists() else "waiting"

    def _table(self) -> Table:
        table = Table("run", "status", "round", "metrics", title=escape(str(self.folder)))
        for name, config in self.members.items():
            last = self._last(name)
            status = self.ended.get(name, "running" if name in self.running else "waiting")
            round_ = f"{last['round']}/{config.experiment.rounds}" if last else ""
            table.add_row(*map(escape, (name, status, round_, describe(last) if last else "")))
        return table

    def _last(self, name: str) -> dict[str, Any] | None:
        """The latest evaluation, read from the end of the file."""
        path = self.folder / name / folders.METRICS
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None

    def _report(self, quiet: bool, as_json: bool) -> int:
        failed = {
            name: status for name, status in self.ended.items() if status.startswith("failed")
        }
        finished = [self.folder / name for name in self.members if name not in failed]
        rows = report.ranked(finished) if finished else []
        if finished:
            report.write_page(finished, self.folder / "report.html")
        if as_json:
            print(json.dumps({"ranked": [_row(row) for row in rows], "failed": failed}))
        elif not quiet:
            show(_ranking(rows))
            for name, status in failed.items():
                print(f"{name} {status}")
            if finished:
                print(f"report: {self.folder / 'report.html'}")
        return 2 if failed else 0


def show(table: Table) -> None:
    """Print a table, wide enough when nobody watches."""
    (Console() if sys.stdout.isatty() else Console(width=170)).print(table)


def _ranking(rows: list[report.Row]) -> Table:
    table = Table(
        title="communication rounds to each test accuracy, the best method first; mean ± deviation over seeds"
    )
    table.add_column("algorithm", no_wrap=True)
    targets = [f"{target:.0%}" for target in report.TARGETS]
    for heading in ("seeds", *targets, "final accuracy", "operations", "peak memory", "status"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        reached = [
            row.cost["round"].get(target) if "round" in row.cost else None
            for target in report.TARGETS
        ]
        cells = [_cell(spread, row.seeds) if spread else "-" for spread in reached]
        accuracy = f"{row.accuracy.mean:.2%} ± {row.accuracy.std:.2%}" if row.accuracy else "-"
        costs = [
            report.AXES[axis].show(s) if s else "-"
            for axis, s in (("flops", row.flops), ("bytes", row.peak))
        ]
        table.add_row(
            escape(row.label),
            str(row.seeds),
            *cells,
            accuracy,
            *costs,
            ", ".join(sorted(row.statuses)),
        )
    return table


def _cell(spread: report.Spread, seeds: int) -> str:
    """Rounds; with how many seeds got there, where not all did."""
    text = f"{spread.mean:.0f}" + (f" ± {spread.std:.0f}" if spread.count > 1 else "")
    return text if spread.count == seeds else f"{text} ({spread.count}/{seeds})"


def _row(row: report.Row) -> dict[str, Any]:
    costs = {a: {str(t): s and s.mean for t, s in by.items()} for a, by in row.cost.items()}
    return {
        "algorithm": row.label,
        "seeds": row.seeds,
        "accuracy": row.accuracy and row.accuracy.mean,
        "flops": row.flops and row.flops.mean,
        "peak_bytes": row.peak and row.peak.mean,
        "cost_to": costs,
    }
