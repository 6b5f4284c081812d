"""Kills, failing disks and interruptions of runs and comparisons.

Only one outcome is good: what is resumed in the end is equal to the bit to what was never
disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from soak.disturb import MOST_WAIT_S, Disturbance, EventCounter
from soak.experiments import METHODS, write_valid
from soak.resources import processes_in
from soak.trials import Trial
from tests.support.processes import assert_same_run, wait_until
from tests.support.tool import (
    Outcome,
    assert_refused,
    contents,
    forked_outcome,
    invoke,
    run_forked,
    start_forked,
)

MOST_ROUNDS = (10, 20, 80)  # the compiled steps of a long run are traced
MOST_DISTURBANCES = 12
LONGEST_S = 300  # that a process may take, on a busy machine
COMPARISON_EVERY = 5  # of so many trials of a method, one disturbs a comparison
SIGNALS = {
    "killed": signal.SIGKILL,
    "interrupted": signal.SIGINT,
    "terminated": signal.SIGTERM,
}
# By kind of disturbance, the exit codes with which a process may end when it is met.
ENDS = {
    "killed at an event": (-signal.SIGKILL,),
    "killed in a write": (-signal.SIGXFSZ,),
    "killed": (-signal.SIGKILL,),
    "interrupted": (130, 1),  # 1 if the process has not come to the tool yet
    "terminated": (130, -signal.SIGTERM),  # the signal itself before the run has begun
    "disk full": (2,),
    "write failed": (2,),
}


def kills(trial: Trial) -> Counter[str]:
    """Disturb a run or a comparison some times; the methods take turns."""
    turn, index = divmod(trial.number, len(METHODS))
    if (turn + index) % COMPARISON_EVERY == 0:
        return _disturb_comparison(trial, METHODS[index])
    return _disturb_run(trial, METHODS[index])


def _disturb_run(trial: Trial, name: str) -> Counter[str]:
    folder = trial.folder
    file, undisturbed, size = _run_undisturbed(trial, name)
    run = folder / "run"
    command = ["run", file, "--out", run, "--resume", "--quiet"]
    outcomes: Counter[str] = Counter()
    for _ in range(trial.draw.randint(1, MOST_DISTURBANCES)):
        kind, outcome = _disturb(trial.draw, command, run, size)
        if outcome.code in (0, 3):  # it ended before
            break
        if outcome.code == 2:
            assert_refused(outcome, str(run))
        outcomes[f"run {kind}"] += 1
        if run.exists() and trial.draw.random() < 0.2:
            _check_report(run, folder / "page.html")
    resumed = invoke(*command)
    assert resumed == undisturbed, (resumed, undisturbed)
    assert_same_run(run, folder / "whole")
    return outcomes


def _disturb_comparison(trial: Trial, name: str) -> Counter[str]:
    folder = trial.folder
    file, _, size = _run_undisturbed(trial, name)
    names = [name]
    other = trial.draw.choice(METHODS)
    if other != name:
        also = invoke("run", file, "--algorithm", other, "--out", folder / "also", "--quiet")
        if also.code != 2:
            names.append(other)
    runs = folder / "runs"
    command = ["compare", file, "--algorithms", ",".join(names), "--out", runs]
    command += ["--seeds", trial.draw.randint(1, 2), "--jobs", 2, "--resume", "--quiet"]
    outcomes: Counter[str] = Counter()
    for _ in range(trial.draw.randint(1, MOST_DISTURBANCES)):
        kind, outcome = _disturb(trial.draw, command, runs, size)
        if outcome.code == 0:  # it ended before
            break
        if outcome.code == 2:  # the comparison itself was disturbed, or some of its members
            assert "Traceback" not in outcome.err, outcome
        outcomes[f"comparison {kind}"] += 1
        if any(runs.rglob("metrics.jsonl")) and trial.draw.random() < 0.2:
            _check_report(runs, folder / "page.html")
    resumed = run_forked(*command, cwd=folder, prepare=Disturbance("none", runs))
    assert resumed == (0, "", ""), resumed
    assert (runs / "report.html").exists()
    for member in sorted(path.parent for path in runs.rglob("metrics.jsonl")):
        whole = folder / "members" / member.relative_to(runs)
        outcome = invoke("run", member / "config.toml", "--out", whole, "--quiet")
        assert outcome.code in (0, 3), outcome
        assert_same_run(member, whole)
    return outcomes


class Size(NamedTuple):
    """What a run that is not disturbed takes and leaves."""

    seconds: float
    events: int
    largest_file: int


def _run_undisturbed(trial: Trial, name: str) -> tuple[Path, Outcome, Size]:
    """Write an experiment `a.toml`, run it into `whole`, and return how that went."""
    began = time.monotonic()
    whole = trial.folder / "whole"
    with EventCounter(whole) as counter:
        file, outcome = write_valid(trial.draw, name, trial.folder, trial.draw.choice(MOST_ROUNDS))
    largest = max(len(data) for data in contents(whole).values())
    return file, outcome, Size(time.monotonic() - began, counter.events, largest)


def _disturb(
    draw: random.Random, command: Sequence[object], watched: Path, size: Size
) -> tuple[str, Outcome]:
    """Start a command that writes to a folder, and let something happen to it.

    Returns what happened, a key of `ENDS`, and how the command ended.
    """
    kind = draw.choice([*ENDS, *["killed at an event"] * 4])
    event = draw.randint(1, draw.randint(1, size.events))  # rather early: so a run meets several
    disturbance = Disturbance("none", watched)
    if kind == "killed at an event":
        after_s = draw.choice([0.0, draw.uniform(0, MOST_WAIT_S)])
        disturbance = Disturbance("kill", watched, event, after_s)
    elif kind == "disk full":
        disturbance = Disturbance("full", watched, event)
    elif kind == "killed in a write":
        disturbance = Disturbance("tear", watched, draw.randint(1, size.largest_file))
    elif kind == "write failed":
        disturbance = Disturbance(
            "limit", watched, draw.randint(1000, max(1000, size.largest_file))
        )
    process = start_forked(*command, cwd=watched.parent, prepare=disturbance)
    if kind in SIGNALS:
        process.join(draw.uniform(0, size.seconds))
        if process.pid and process.is_alive():
            os.kill(process.pid, SIGNALS[kind])
    process.join(LONGEST_S)
    assert process.exitcode is not None, f"the process does not end ({kind})"
    folder = watched.parent
    wait_until(lambda: not processes_in(folder), LONGEST_S, f"a process is left ({kind})")
    outcome = forked_outcome(process, folder)
    assert outcome.code in (0, 3, *ENDS[kind], 2), (kind, outcome)
    return kind, outcome


def _check_report(folder: Path, page: Path) -> None:
    """Check that what a disturbance left can be reported, or gets one sentence."""
    outcome = invoke("report", folder, "--out", page)
    if outcome.code != 0:
        assert_refused(outcome)
