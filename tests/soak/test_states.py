"""A run folder as a state machine: run, kill, fill the disk, resume, report, in any order."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fedbilevel as fb
from soak.disturb import Disturbance
from tests.support.processes import assert_same_run
from tests.support.tool import (
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    read_metrics,
    run_forked,
    write,
)

ROUNDS = 12
EXPERIMENT = f"""
task = {{ name = "quadratic", clients = 3, samples = 3, noise = 0.3 }}
rounds = {ROUNDS}
checkpoint_every = 2
environment = {{ local_steps = [1, 2], batch_size = 2 }}
runtime = {{ threads = 1 }}
"""
# One method without a barrier and with client memory, one with variance reduction.
METHODS = ("afbo", "fedbioacc")
EVENTS = st.integers(1, 40)


@pytest.fixture(scope="module", autouse=True)
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of each method that is never disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = write(folder / "a.toml", EXPERIMENT)
    for method in METHODS:
        invoke_ok("run", file, "--algorithm", method, "--out", folder / method)
    RunFolder.undisturbed = folder
    return folder


class RunFolder(RuleBasedStateMachine):
    """One folder, and what its owner and fate do with it."""

    undisturbed: Path

    @initialize(method=st.sampled_from(METHODS))
    def choose(self, method: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="states-"))
        self.run = self.folder / "run"
        self.expected = self.undisturbed / method
        self.command: list[object] = ["run", self.undisturbed / "a.toml", "--algorithm", method]
        self.command += ["--out", self.run, "--quiet"]

    def teardown(self) -> None:
        """Whatever has happened, the folder ends as if nothing had."""
        if hasattr(self, "folder"):
            invoke_ok(*self.command[:-1], "--resume")
            assert_same_run(self.run, self.expected)
            shutil.rmtree(self.folder)

    @rule(rounds=st.integers(0, ROUNDS))
    def resume(self, rounds: int) -> None:
        """A budget may be lower than what is done, and is raised later."""
        assert invoke(*self.command, "--resume", "--rounds", rounds) == (0, "", "")
        assert fb.load_run(self.run).status == "completed"

    @rule(event=EVENTS)
    def kill(self, event: int) -> None:
        outcome = self._disturbed(Disturbance("kill", self.run, event))
        assert outcome.code in (0, -signal.SIGKILL)

    @rule(event=EVENTS)
    def kill_in_a_write(self, event: int) -> None:
        outcome = self._disturbed(Disturbance("tear", self.run, 250 * event))
        assert outcome.code in (0, -signal.SIGXFSZ)

    @rule(event=EVENTS)
    def fill_the_disk(self, event: int) -> None:
        outcome = self._disturbed(Disturbance("full", self.run, event))
        if outcome.code != 0:
            assert_refused(outcome, str(self.run), "No space left")

    def _disturbed(self, disturbance: Disturbance) -> Any:
        return run_forked(*self.command, "--resume", cwd=self.folder, prepare=disturbance)

    @rule()
    def report(self) -> None:
        before = contents(self.folder)
        outcome = invoke("report", self.run, "--out", self.folder / "page.html")
        if outcome.code != 0:
            assert_refused(outcome, str(self.run))
            assert contents(self.folder) == before
        else:
            assert (self.run / "metrics.jsonl").exists()

    @precondition(lambda self: (self.run / "checkpoint/latest.safetensors").exists())
    @rule(option=st.sampled_from(["--seed=1", "--set=algorithm.lr_x=0.1", None]))
    def run_otherwise(self, option: str | None) -> None:
        """A run is not resumed under other settings, and not started again."""
        before = contents(self.run)
        options = ["--resume", option] if option else []
        assert_refused(invoke(*self.command, *options), str(self.run))
        assert contents(self.run) == before

    @precondition(lambda self: (self.run / "checkpoint").exists())
    @rule()
    def write_twice(self) -> None:
        with FileLock(self.run / "checkpoint" / "lock"):
            before = contents(self.run)
            assert_refused(invoke(*self.command, "--resume"), "another process")
            assert contents(self.run) == before

    @invariant()
    def metrics_are_a_beginning_of_those_of_the_undisturbed_run(self) -> None:
        """Of a run that was killed, the last line may be incomplete."""
        if not hasattr(self, "run") or not (self.run / "metrics.jsonl").exists():
            return
        data = (self.run / "metrics.jsonl").read_bytes()
        complete = write(self.folder / "metrics.jsonl", data[: data.rfind(b"\n") + 1].decode())
        metrics = read_metrics(complete.parent)
        assert metrics == read_metrics(self.expected)[: len(metrics)]


TestRunFolder = RunFolder.TestCase
TestRunFolder.settings = settings(
    max_examples=4, stateful_step_count=8, deadline=None, derandomize=True
)
