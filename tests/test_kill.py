"""SIGKILL at any moment: a run that goes on ends bit for bit as one that was never killed, and so does a comparison."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedbilevel as fb
from fedbilevel.execution.stacked._parts import TRACE_FROM
from tests.support.tool import call, config, done, fork, metrics, start, summary, write

ROUNDS = TRACE_FROM + 30  # the steps of a long run are traced, those of its start are not
EXPERIMENT = f"""
task = {{ name = "quadratic", clients = 3, samples = 3, noise = 0.3 }}
rounds = {ROUNDS}
every = 2
checkpoint_every = 3
environment = {{ local_steps = [1, 2], batch_size = 2 }}
runtime = {{ threads = 1 }}
"""


def lines(*folders: Path) -> int:
    """How many evaluations the runs have written."""
    files = [folder / "metrics.jsonl" for folder in folders]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def wait(reached: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def same(ended: Path, whole: Path) -> None:
    assert metrics(ended) == metrics(whole)
    a, b = fb.load_run(ended), fb.load_run(whole)
    assert torch.equal(a.x["x"], b.x["x"])
    assert torch.equal(a.y["y"], b.y["y"])
    assert {**summary(ended), "wall_s": 0} == {**summary(whole), "wall_s": 0}
    assert (ended / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()


def test_a_run_killed_ten_times(tmp_path: Path) -> None:
    file, run, whole = write(tmp_path / "a.toml", EXPERIMENT), tmp_path / "run", tmp_path / "whole"
    done("run", file, "--out", whole)
    total, draw = lines(whole), random.Random(5)
    # Twice while it starts, then when it has come so far, and a little later: within a round or while it saves.
    moments = [(0, draw.uniform(0, 1.5)) for _ in range(2)]
    moments += [
        (wanted, draw.uniform(0, 0.015)) for wanted in sorted(draw.sample(range(1, total - 8), 8))
    ]
    command = ["run", file, "--out", run, "--resume", "--quiet"]
    for wanted, later in moments:
        if not wanted:
            with start(*command, cwd=tmp_path) as starting:
                time.sleep(later)
                starting.kill()
            assert starting.returncode == -signal.SIGKILL
        else:
            process = fork(*command, cwd=tmp_path)
            wait(lambda wanted=wanted: lines(run) >= wanted, 60, "no progress")
            time.sleep(later)
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
        assert not (run / "summary.json").exists()
    done("run", file, "--out", run, "--resume")
    same(run, whole)


def members(folder: Path) -> set[int]:
    """The processes that run a member of the comparison in this folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:  # it has ended meanwhile
            continue
        if any(word.startswith(bytes(folder) + b"/") for word in words):
            found.add(int(entry.name))
    return found


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are looked for in /proc"
)
def test_a_comparison_killed_three_times_and_interrupted_once(tmp_path: Path) -> None:
    file, runs = write(tmp_path / "a.toml", EXPERIMENT), tmp_path / "runs"
    names = [f"{algorithm}/seed-{seed}" for algorithm in ("simfbo", "shrofbo") for seed in (0, 1)]
    folders = [runs / name for name in names]
    command = [
        "compare",
        file,
        "--algorithms",
        "simfbo,shrofbo",
        "--seeds",
        2,
        "--jobs",
        2,
        "--out",
        runs,
    ]
    command += ["--rounds", 80]
    # While the first members start, then when so many evaluations have been added, of 41 a member: far from the end.
    for more, signals in [
        (0, signal.SIGKILL),
        (20, signal.SIGKILL),
        (20, signal.SIGKILL),
        (10, signal.SIGINT),
    ]:
        wanted = lines(*folders) + more
        process = fork(*command, "--resume", "--quiet", cwd=tmp_path)
        wait(lambda: members(runs), 30, "no member started")
        wait(lambda wanted=wanted: lines(*folders) >= wanted, 60, "no progress")
        assert process.pid
        os.kill(process.pid, signals)
        process.join(30)
        assert process.exitcode == (130 if signals == signal.SIGINT else -signals)
        wait(lambda: not members(runs), 5, "a member outlives its comparison")
    statuses = {
        summary(folder)["status"] for folder in folders if (folder / "summary.json").exists()
    }
    assert "interrupted" in statuses
    assert call(*command, "--resume", "--quiet") == (0, "", "")
    assert (runs / "report.html").exists()
    for folder in folders:
        assert config(folder)["seed"] == int(folder.name[-1])
        done(
            "run",
            folder / "config.toml",
            "--out",
            tmp_path / "whole" / folder.parent.name / folder.name,
        )
        same(folder, tmp_path / "whole" / folder.parent.name / folder.name)
