"""`fedbilevel run`: what it prints, the files it leaves, full disks and interruptions."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.cli.run import resolve_run
from tests.support.terminal import run_on_terminal
from tests.support.tool import (
    assert_refused,
    invoke,
    invoke_ok,
    read_metrics,
    read_summary,
    start_process,
    write,
)

COST_KEYS = {"bytes_up", "bytes_down", "samples", "gradients", "flops", "peak_bytes"}
TIME_KEYS = {"virtual_s", "wall_s"}
METRICS_KEYS = {"round", "iteration", "upper_loss", "lower_loss"} | COST_KEYS | TIME_KEYS
SUMMARY_KEYS = {"algorithm", "task", "data", "seed", "status", "reason", "rounds", "rounds_to"}
SUMMARY_KEYS |= {"final_test_accuracy", "best_test_accuracy", "refused_replies", "clients"}
SUMMARY_KEYS |= COST_KEYS | TIME_KEYS
RISING_TASK = """
from fedbilevel import tasks

accuracies = iter([0.5, float("nan"), 0.85, 0.92, 0.81, float("nan"), 0.96])

def evaluate(x, y):
    return {"test_accuracy": next(accuracies)}

def task():
    quadratic = tasks.load("quadratic", clients=2)
    return tasks.Task(quadratic.problem, quadratic.clients, evaluate)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.toml")


# What it prints.


def test_it_prints_how_the_run_ended_and_its_folder(file: Path, tmp_path: Path) -> None:
    outcome = invoke("run", file, "--out", tmp_path / "run")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "simfbo: completed after 4 rounds, upper loss 3.5066",
        f"folder: {tmp_path / 'run'}",
    ]
    first, *_, last = outcome.err.splitlines()
    assert first.startswith("a simfbo seed 0  round 0/4  loss ")
    assert last.startswith("a simfbo seed 0  round 4/4  loss ")
    assert "\x1b" not in outcome.err


def test_quiet_prints_nothing_and_json_one_object(file: Path, tmp_path: Path) -> None:
    assert invoke("run", file, "--out", tmp_path / "quiet", "--quiet") == (0, "", "")
    code, out, err = invoke("run", file, "--out", tmp_path / "json", "--json")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert json.loads(out) == read_summary(tmp_path / "json")


def test_a_terminal_shows_a_bar(file: Path, tmp_path: Path) -> None:
    out, shown = run_on_terminal("run", file, "--out", tmp_path / "run", cwd=tmp_path)
    assert all(part in shown for part in ("━", "4/4", "loss", "MB", "\x1b["))
    assert "\x1b" not in out


def test_markup_in_names_is_plain_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a[b][red][.toml")
    outcome = invoke("run", file, "--rounds", 1, "--out", tmp_path / "[red]")
    assert outcome.code == 0
    assert outcome.err.startswith("a[b][red][ simfbo seed 0")
    assert f"folder: {tmp_path / '[red]'}" in outcome.out


# Which run it is, and where.


def test_the_default_folder_is_the_first_free_one_below_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        invoke_ok("run", file, "--rounds", 0)
    names = {folder.name for folder in Path("runs").iterdir()}
    assert names == {"a-simfbo-seed-0", "a-simfbo-seed-0-2", "a-simfbo-seed-0-3"}


def test_if_fewer_clients_are_asked_for_than_take_part_all_of_them_take_part() -> None:
    title, config = resolve_run("digits", 4)
    assert title == "digits simfbo seed 0"
    assert config.environment.participation == 4
    assert len(config.load_task(None).clients) == 4


# The run folder.


def test_the_run_folder_holds_the_documented_files_and_keys(tmp_path: Path) -> None:
    run = tmp_path / "run"
    invoke_ok("run", "digits", "--rounds", 3, "--out", run)
    files = {"config.toml", "metrics.jsonl", "summary.json", "checkpoint"}
    assert {entry.name for entry in run.iterdir()} == files
    summary = read_summary(run)
    evaluations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary.keys() >= SUMMARY_KEYS
    assert list(summary["rounds_to"]) == ["0.8", "0.9", "0.93", "0.95", "0.97"]
    assert summary["task"] == "hyper-representation"
    assert summary["data"] == "digits"
    assert summary["rounds"] == 3
    assert [evaluation["round"] for evaluation in evaluations] == [0, 1, 2, 3]
    for evaluation in evaluations:
        assert evaluation.keys() >= {*METRICS_KEYS, "train_accuracy", "test_accuracy"}
    accuracies = [evaluation["test_accuracy"] for evaluation in evaluations]
    assert summary["final_test_accuracy"] == accuracies[-1]
    assert summary["best_test_accuracy"] == max(accuracies)


def test_a_task_without_accuracy_has_other_metrics(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    invoke_ok("run", file, "--out", run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).keys() >= {*METRICS_KEYS, "hypergradient_norm"}
    assert read_summary(run)["final_test_accuracy"] is None


def test_the_summary_has_rounds_to_targets_and_ignores_accuracies_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rising.py", RISING_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rising = write(tmp_path / "rising.toml", 'task = "rising:task"\nstop.test_accuracy = 0.99')
    invoke_ok("run", rising, "--rounds", 5, "--out", "run")
    summary = json.loads(Path("run/summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["rounds_to"] == {"0.8": 2, "0.9": 3, "0.93": None, "0.95": None, "0.97": None}
    assert summary["final_test_accuracy"] == 0.81
    assert summary["best_test_accuracy"] == 0.92
    assert read_metrics(Path("run"))[1]["test_accuracy"] is None
    invoke_ok("run", rising, "--rounds", 6, "--out", "run", "--resume")
    assert read_summary(Path("run"))["rounds_to"]["0.95"] == 6


# Full disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of six pages."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk could be mounted: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_leaves_nothing_or_a_run_that_can_be_resumed(
    file: Path, small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(16_000))
    run = small_disk / "run"
    assert_refused(invoke("run", file, "--out", run, "--quiet"), "run cannot be written: No space")
    assert list(small_disk.iterdir()) == [filler]
    filler.unlink()
    outcome = invoke("run", file, "--rounds", 45, "--out", run, "--quiet")
    assert_refused(outcome, str(run), "No space left on device")
    assert not (run / "summary.json").exists()
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    invoke_ok("run", file, "--rounds", 45, "--out", run, "--resume")
    invoke_ok("run", file, "--rounds", 45, "--out", tmp_path / "whole")
    assert read_metrics(run) == read_metrics(tmp_path / "whole")


@pytest.mark.parametrize("fails", ["metrics.jsonl", "config.toml.new", "latest.safetensors.new"])
def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    open_path = Path.open

    def open_or_fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)
    assert_refused(
        invoke("run", file, "--out", tmp_path / "run", "--quiet"),
        "run cannot be written: No space left on device",
    )
    assert list(tmp_path.iterdir()) == [file]
    existing = tmp_path / "existing"
    existing.mkdir()
    refused = invoke("run", file, "--out", existing, "--quiet")
    assert_refused(refused, "existing cannot be written")
    monkeypatch.undo()
    invoke_ok("run", file, "--out", existing)  # without --resume: there is no run yet


def test_a_data_dir_that_does_not_exist_is_refused(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = invoke("run", file, "--data-dir", tmp_path / "elsewhere", "--out", run)
    assert_refused(refused, f"--data-dir is {str(tmp_path / 'elsewhere')!r}; it must be a folder")
    assert not run.exists()


# Interruptions.


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_second_interrupt_ends_a_long_iteration(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ["--set", f"environment.local_steps={10**9}", "--out", run]
    with start_process("run", file, *endless, cwd=tmp_path) as process:
        wait_for_lines(run / "metrics.jsonl", 1, process)
        time.sleep(1.0)  # the first iteration begins once this evaluation is in a checkpoint
        for _ in range(2):  # these two count once, as those of a terminal and a comparison
            process.send_signal(signal.SIGINT)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.count("Ctrl-C again stops at once") == 1
    assert "Traceback" not in err
    assert read_summary(run)["reason"].startswith("interrupted in round 1; x and y are those after")


def test_resuming_what_never_ran_says_so(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with caplog.at_level("WARNING", logger="fedbilevel"):
        assert invoke("run", file, "--out", run, "--resume").code == 0
        assert invoke("run", file, "--out", run, "--resume", "--rounds", 5).code == 0
    assert caplog.messages == [f"{run} holds no run to resume; starting from the beginning"]


def test_an_interrupted_run_resumes_and_ends_the_same(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_process("run", file, "--rounds", 10**6, "--out", run, cwd=tmp_path) as process:
        wait_for_lines(run / "metrics.jsonl", 15, process)
        second = invoke("run", file, "--rounds", 10**6, "--out", run, "--resume")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert_refused(second, str(run), "another process")
    assert process.returncode == 130
    assert "Traceback" not in err
    summary = read_summary(run)
    rounds = summary["rounds"]
    assert summary["status"] == "interrupted"
    assert rounds == len(read_metrics(run)) - 1
    assert summary["reason"] == f"interrupted after round {rounds}"
    line = out.splitlines()[0]
    assert line.startswith(f"simfbo: interrupted after {rounds} rounds, upper loss ")
    whole = tmp_path / "whole"
    invoke_ok("run", file, "--rounds", rounds + 5, "--out", run, "--resume")
    invoke_ok("run", file, "--rounds", rounds + 5, "--out", whole)
    assert read_metrics(run) == read_metrics(whole)
    resumed_result = fb.load_run(run)
    whole_result = fb.load_run(whole)
    assert torch.equal(resumed_result.x["x"], whole_result.x["x"])
    assert torch.equal(resumed_result.y["y"], whole_result.y["y"])
    assert {**read_summary(run), "wall_s": 0} == {**read_summary(whole), "wall_s": 0}
