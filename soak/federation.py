"""A federation of four nodes on this machine: real processes, killed, stopped and restarted.

A task of a node that dies is sent again, and a server that is killed is resumed. None of what is
done here changes a cohort, so that every experiment must end as in a simulation.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import tomli_w
import torch

import fedbilevel as fb
from fedbilevel.core.tree import flatten
from fedbilevel.deploy.flower.deployment import free_port, is_running, stop_process
from fedbilevel.runs.folder import CHECKPOINT
from soak.resources import Monitor, processes_in
from soak.trials import Trial
from tests.support.flower import Table, resolve_config, simulated_run
from tests.support.processes import wait_until, with_descendants
from tests.support.tool import SCRIPT, read_summary, write

ROOT = Path(__file__).parents[1]
CLIENTS = 4
ROUNDS = 60
MORTAL = (2, 3)  # the other nodes are never killed: what they hold is watched
TOLERANCE = 1e-9
TOO_LATE = "server killed after its last round"
END_S = 300.0  # an interrupted server ends its round, which may wait for a node
LONGEST_PEACE_S = 20.0  # between two disturbances
EXPERIMENT: Table = {
    "task": {"name": "quadratic", "clients": CLIENTS, "samples": 6, "noise": 0.5},
    "environment": {"local_steps": [1, 4], "batch_size": 2},
    "every": 20,
    "checkpoint_every": 5,
    "conduct": {"deadline_s": 200.0, "wait_s": 300.0},
}
METHODS: dict[str, Table] = {
    "simfbo": {},
    "fedbioacc": {},
    "asfbo": {},
    "rabo": {"lower_steps": 2},
    "unifbo": {},
    "aggitd": {"lower_steps": 2},
}


def federation(trial: Trial) -> Counter[str]:
    """Run one experiment on a new federation."""
    with Federation(trial.folder, Monitor()) as nodes:
        return nodes.run_experiment(trial.draw)


class Federation:
    """The nodes, and the server of one experiment after the other on the same port.

    Args:
        folder: Gets the runs, the logs and what clients remember.
        monitor: Samples what the processes hold.
    """

    def __init__(self, folder: Path, monitor: Monitor) -> None:
        self.folder = folder
        self.monitor = monitor
        self.port = free_port()
        self.log = (folder / "log").open("wb")
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.experiments = 0
        self.served_at = 0.0  # when the server was started

    def __enter__(self) -> Federation:
        for partition in range(CLIENTS):
            self._start_node(partition)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_server()
        for node in self.nodes.values():
            stop_process(node)
        self.log.close()

    def _start(self, *arguments: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*map(str, arguments)],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def _start_node(self, partition: int) -> None:
        address = f"127.0.0.1:{self.port}"
        self.nodes[partition] = self._start(
            SCRIPT, "join", address, "--partition", partition, "--warm"
        )

    def run_experiment(self, draw: random.Random) -> Counter[str]:
        """Run one experiment, disturb it on the way, and compare it with a simulation.

        Args:
            draw: The source of randomness.

        Returns:
            How often each disturbance happened.
        """
        name = draw.choice([*METHODS])
        table = {
            **EXPERIMENT,
            "algorithm": {"name": name, **METHODS[name]},
            "rounds": ROUNDS,
            "seed": draw.randrange(1000),
        }
        self.experiments += 1
        run = self.folder / f"run-{self.experiments}"
        file = write(self.folder / f"run-{self.experiments}.toml", tomli_w.dumps(table))
        try:
            happened = self._disturb_until_the_end(draw, file, run)
            self._compare(run, table)
        finally:
            self._stop_server()
        shutil.rmtree(run)  # so that files which are left over show
        file.unlink()
        happened[f"{name} equal to a simulation"] += 1
        return happened

    def _disturb_until_the_end(self, draw: random.Random, file: Path, run: Path) -> Counter[str]:
        happened: Counter[str] = Counter()
        self._serve(file, run)
        assert self.server is not None
        for partition, node in [*self.nodes.items()]:
            if node.poll() is not None:  # a node ends with its study
                self._start_node(partition)
        next_at = time.monotonic() + draw.uniform(0, LONGEST_PEACE_S)
        while self.server.poll() is None:
            time.sleep(1)
            self._sample()
            if time.monotonic() > next_at:
                happened[self._disturb(draw, file, run)] += 1
                if happened[TOO_LATE]:
                    return happened
                next_at = time.monotonic() + draw.uniform(0, LONGEST_PEACE_S)
        assert self.server.returncode == 0, f"the server ended with {self.server.returncode}"
        return happened

    def _stop_server(self) -> None:
        """Make sure that nothing of a server is left, so that the next one gets its port."""
        if self.server is not None:
            stop_process(self.server)
        nodes = {pid for node in self.nodes.values() for pid in with_descendants(node.pid)}
        for pid in processes_in(self.folder) - nodes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _serve(self, file: Path, run: Path) -> None:
        self.served_at = time.time()
        command = ["serve", file, "--out", run, "--port", self.port, "--resume", "--quiet"]
        self.server = self._start(SCRIPT, *command)

    def _disturb(self, draw: random.Random, file: Path, run: Path) -> str:
        assert self.server is not None
        kind = draw.choice(["node killed", "node stopped", "server killed", "server interrupted"])
        if kind == "node killed":
            partition = draw.choice(MORTAL)
            self.nodes[partition].kill()
            self.nodes[partition].wait()
            self._start_node(partition)
        elif kind == "node stopped":
            node = self.nodes[draw.randrange(CLIENTS)]
            node.send_signal(signal.SIGSTOP)
            time.sleep(draw.uniform(0, 5))
            node.send_signal(signal.SIGCONT)
        else:
            if not self._has_progressed(run):
                return "none, too early"
            family = with_descendants(self.server.pid)
            numbers = {"server killed": signal.SIGKILL, "server interrupted": signal.SIGINT}
            self.server.send_signal(numbers[kind])
            self.server.wait(END_S)
            wait_until(
                lambda: not any(map(is_running, family)), END_S, f"{kind}: a process is left"
            )
            if (run / "summary.json").exists() and read_summary(run)["status"] == "completed":
                return TOO_LATE
            self._serve(file, run)
        return kind

    def _has_progressed(self, run: Path) -> bool:
        """Whether this server has written a checkpoint: otherwise a slow one would get nowhere."""
        latest = run / CHECKPOINT
        return latest.exists() and latest.stat().st_mtime > self.served_at

    def _sample(self) -> None:
        assert self.server is not None
        for partition in set(range(CLIENTS)) - {*MORTAL}:
            self.monitor.sample(f"node {partition}", self.nodes[partition].pid)
        for pid in with_descendants(self.server.pid):
            for word, role in (("flwr-serverapp", "server"), ("flower-superlink", "SuperLink")):
                if word in _command_line(pid):
                    self.monitor.sample(role, pid)
        self.monitor.count("federation", self.folder)

    def _compare(self, run: Path, table: Table) -> None:
        """Assert that a run ended as in a simulation, within rounding."""
        expected = simulated_run(resolve_config(table))
        for _ in expected:
            pass
        loaded = fb.load_run(run)
        assert loaded.status == "completed", loaded.status
        for part in ("x", "y"):
            ours = flatten(getattr(loaded, part))
            theirs = flatten(getattr(expected.result, part))
            assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE), f"{part} differs"
        rounds = [metrics["round"] for metrics in loaded.history]
        assert rounds == [metrics["round"] for metrics in expected.history]
        summary = read_summary(run)
        assert summary["refused_replies"] == summary["lost_tasks"] == 0


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:  # it has ended meanwhile
        return ""
