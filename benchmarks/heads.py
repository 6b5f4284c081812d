"""Kill and resume a run of 100,000 clients that own a head each: `python -m benchmarks.heads`.

The run is killed in the middle of rounds and of checkpoints, resumed, and compared with one that
was never killed: x, the metrics, and every client's head must have the same bits.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.tasks import Task

CLIENTS = 100_000
KILLS = 3
EXPERIMENT = f"""
task = {{ name = "benchmarks.heads:task", clients = {CLIENTS} }}
algorithm = "simfbo"
rounds = 4
every = 1
checkpoint_every = 1
environment = {{ participation = 1.0 }}
runtime = {{ threads = 1, memory = 33554432 }}
"""


class Lines(Sequence[fb.ClientData]):
    """Clients with 4 rows of one tensor each."""

    def __init__(self, count: int) -> None:
        self.rows = normal(root(0, "lines"), (count, 4, 5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, client: Any) -> Any:
        side = (self.rows[client],)
        return fb.ClientData(train=side, val=side)


def task(clients: int) -> Task:
    """A regression whose features are common and whose head of 4 numbers is each client's own."""

    def upper(x: Any, y: Any, batch: Any) -> torch.Tensor:
        rows = batch[0]
        residuals = rows[:, :4] @ x["features"] @ y["head"] - rows[:, 4]
        return residuals.square().mean()

    def lower(x: Any, y: Any, batch: Any) -> torch.Tensor:
        return upper(x, y, batch) + y["head"].square().sum()

    problem = fb.Problem(
        upper,
        lower,
        x={"features": torch.eye(4)},
        y={"head": torch.zeros(4)},
        owner={"head": "client"},
    )
    return Task(problem, Lines(clients))


def main() -> None:
    """Run, kill, resume, compare; print what was found."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder, "heads.toml")
        experiment.write_text(EXPERIMENT)
        command = [sys.executable, "-m", "fedbilevel.cli", "run", str(experiment), "--quiet"]
        whole = Path(folder, "whole")
        killed = Path(folder, "killed")
        started = time.monotonic()
        subprocess.run([*command, "--out", str(whole)], check=True)
        took = time.monotonic() - started
        print(f"{CLIENTS:,} clients: the whole run took {took:.0f} s", flush=True)
        kills = 0
        while kills < KILLS:
            process = subprocess.Popen([*command, "--out", str(killed), "--resume"])
            time.sleep(draw.uniform(0.3, 0.7) * took)
            if process.poll() is not None:
                break
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            lines = killed / "metrics.jsonl"
            written = len(lines.read_text().splitlines()) if lines.exists() else 0
            print(f"killed after {written} evaluations", flush=True)
        subprocess.run([*command, "--out", str(killed), "--resume"], check=True)
        ours, theirs = fb.load_run(killed), fb.load_run(whole)
        assert torch.equal(ours.x["features"], theirs.x["features"])
        moved = 0
        for client in range(CLIENTS):
            head = ours.personal(client)[1]["head"]
            assert torch.equal(head, theirs.personal(client)[1]["head"]), f"client {client} differs"
            moved += bool(head.any())
        losses = [[row["upper_loss"] for row in run.history] for run in (ours, theirs)]
        assert losses[0] == losses[1]
        print(f"killed {kills} times: x, losses and {moved:,} heads have the same bits")


if __name__ == "__main__":
    main()
