"""SIGKILL at any moment: a resumed run or comparison ends as if it had never been killed."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import fedbilevel as fb
from fedbilevel.execution.stacked._steps import TRACE_FROM
from tests.support.processes import (
    assert_same_run,
    evaluations_written,
    member_processes,
    wait_until,
)
from tests.support.tool import (
    invoke,
    invoke_ok,
    read_config,
    read_summary,
    start_forked,
    start_process,
    write,
)

ROUNDS = TRACE_FROM + 30  # later steps of a run are traced, the first ones are not
EXPERIMENT = f"""
task = {{ name = "quadratic", clients = 3, samples = 3, noise = 0.3 }}
rounds = {ROUNDS}
every = 2
checkpoint_every = 3
environment = {{ local_steps = [1, 2], batch_size = 2 }}
runtime = {{ threads = 1 }}
"""


def test_a_run_that_is_killed_ten_times(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", EXPERIMENT)
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    invoke_ok("run", file, "--out", whole)
    total = evaluations_written(whole)
    draw = random.Random(5)
    command = ["run", file, "--out", run, "--resume", "--quiet"]
    start_delays = [draw.uniform(0, 1.5) for _ in range(2)]
    # The other kills come a little after some evaluation: within a round, or within a checkpoint.
    evaluations = sorted(draw.sample(range(1, total - 8), 8))
    delays = [draw.uniform(0, 0.015) for _ in evaluations]
    for delay in start_delays:
        with start_process(*command, cwd=tmp_path) as starting:
            time.sleep(delay)
            starting.kill()
        assert starting.returncode == -signal.SIGKILL
        assert not (run / "summary.json").exists()
    for wanted, delay in zip(evaluations, delays, strict=True):
        process = start_forked(*command, cwd=tmp_path)
        wait_until(lambda wanted=wanted: evaluations_written(run) >= wanted, 60, "no progress")
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (run / "summary.json").exists()
    invoke_ok("run", file, "--out", run, "--resume")
    assert_same_run(run, whole)


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are looked for in /proc"
)
def test_a_comparison_that_is_killed_three_times_and_interrupted_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", EXPERIMENT)
    runs = tmp_path / "runs"
    folders = []
    for algorithm in ("simfbo", "shrofbo"):
        folders += [runs / algorithm / f"seed-{seed}" for seed in (0, 1)]
    command = ["compare", file, "--algorithms", "simfbo,shrofbo", "--seeds", 2, "--jobs", 2]
    command += ["--out", runs, "--rounds", 200]
    # The first kill comes while the first members start. The others come after this number of new
    # evaluations; each of the four members has 101, so that the end is far away.
    ends = [
        (0, signal.SIGKILL),
        (20, signal.SIGKILL),
        (20, signal.SIGKILL),
        (10, signal.SIGINT),
    ]
    exit_codes = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
    for new_evaluations, signal_number in ends:
        wanted = evaluations_written(*folders) + new_evaluations
        process = start_forked(*command, "--resume", "--quiet", cwd=tmp_path)
        wait_until(lambda: member_processes(runs), 30, "no member started")
        wait_until(
            lambda wanted=wanted: evaluations_written(*folders) >= wanted,
            60,
            "no progress",
        )
        assert process.pid
        os.kill(process.pid, signal_number)
        process.join(30)
        assert process.exitcode == exit_codes[signal_number]
        wait_until(lambda: not member_processes(runs), 5, "a member outlives its comparison")
    ended = [folder for folder in folders if (folder / "summary.json").exists()]
    assert "interrupted" in {read_summary(folder)["status"] for folder in ended}
    assert invoke(*command, "--resume", "--quiet") == (0, "", "")
    assert (runs / "report.html").exists()
    for folder in folders:
        whole = tmp_path / "whole" / folder.relative_to(runs)
        assert read_config(folder)["seed"] == int(folder.name[-1])
        invoke_ok("run", folder / "config.toml", "--out", whole)
        assert_same_run(folder, whole)


def test_variables_of_clients_survive_kills(tmp_path: Path) -> None:
    text = EXPERIMENT.replace('"quadratic"', '"tests.support.owners:client_owned_y"')
    file = write(tmp_path / "a.toml", text)
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    invoke_ok("run", file, "--out", whole)
    total = evaluations_written(whole)
    draw = random.Random(6)
    for wanted in sorted(draw.sample(range(1, total - 8), 4)):
        process = start_forked("run", file, "--out", run, "--resume", "--quiet", cwd=tmp_path)
        wait_until(lambda wanted=wanted: evaluations_written(run) >= wanted, 60, "no progress")
        time.sleep(draw.uniform(0, 0.015))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    invoke_ok("run", file, "--out", run, "--resume")
    assert_same_run(run, whole)
    resumed, expected = fb.load_run(run), fb.load_run(whole)
    for client in range(3):
        _, y = resumed.personal(client)
        assert torch.equal(y["y"], expected.personal(client)[1]["y"])
        assert y["y"].norm() > 0
