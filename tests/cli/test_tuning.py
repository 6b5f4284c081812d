"""`fedbilevel tune`: the trials it runs, tuned.toml, failures, kills and interruptions."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.cli import comparison
from fedbilevel.experiments import config as configs
from tests.support.processes import evaluations_written, member_processes, wait_until
from tests.support.tool import (
    InProcessMember,
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    start_forked,
    write,
)

EXPERIMENT = """
title = "A"
task = { name = "quadratic", clients = 4, samples = 3, noise = 0.3 }
compare = ["simfbo", "asfbo"]
rounds = 40
every = 3
seed = 3
stop = { test_accuracy = 0.9 }
environment = { participation = 3, local_steps = [1, 2], batch_size = 2 }
runtime = { threads = 1 }
[algorithms.simfbo]
lr_x = 1e-3
server_lr_x = 1e-3
[algorithms.fedavg]
lr_y = 0.01
[algorithms.asfbo.environment]
local_steps = 2
"""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Members run in this process."""
    monkeypatch.setattr(subprocess, "Popen", InProcessMember)
    monkeypatch.setattr(comparison, "POLL_S", 0)
    return monkeypatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.toml", EXPERIMENT)


def read_tuned(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "tuned.toml").read_text("utf-8"))


def ended_members(err: str) -> list[str]:
    """Return how members have ended, without their last metrics, from what was shown."""
    return [line.split("  ")[0] for line in err.splitlines() if not line.endswith(": started")]


def search_results(folder: Path) -> dict[str, Any]:
    """Return the trials and tuned.toml of a search, without what differs between equal ones."""
    results: dict[str, Any] = {"tuned": (folder / "tuned.toml").read_bytes()}
    for path in folder.glob("*/trial-*"):
        summary = {**read_summary(path), "wall_s": 0}
        results[str(path.relative_to(folder))] = read_config(path), read_metrics(path), summary
    return results


# Trials and tuned.toml.


def test_the_best_trial_of_each_algorithm_is_found_and_written(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = ["--rounds", 12, "--trials", 5, "--set", "environment.batch_size=3", "--out", out]
    assert invoke("tune", file, "--algorithm", "simfbo", *options, "--quiet") == (0, "", "")
    assert read_tuned(out)["compare"] == ["simfbo"]
    code, shown, err = invoke("tune", file, "--algorithm", "asfbo", *options)
    assert (code, ended_members(err)) == (0, [f"asfbo/trial-{k}: completed" for k in range(5)])
    assert shown.splitlines()[-2:] == [
        f"tuned: {out / 'tuned.toml'}",
        f"report: {out / 'report.html'}",
    ]
    page = (out / "report.html").read_text()
    assert all(f"{name} (trial-{k})" in page for name in ("simfbo", "asfbo") for k in range(5))

    _, experiment = configs.read(str(file))
    best_numbers = {}
    for name in ("simfbo", "asfbo"):
        runs = [out / name / f"trial-{k}" for k in range(5)]
        losses = []
        for run in runs:
            evaluations = read_metrics(run)
            assert len(evaluations) == 5  # the last two are the last quarter, rounded up
            losses.append(sum(evaluation["upper_loss"] for evaluation in evaluations[-2:]) / 2)
            assert read_config(run)["stop"] == {}  # trials do not use test data
        best_numbers[name] = losses.index(min(losses))
        assert f"{min(losses):.6g} *" in shown
        own = configs.resolve("test", experiment, algorithm=name).table["algorithm"]
        as_toml = {key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}
        assert read_config(runs[0])["algorithm"] == as_toml
        if name == "simfbo":  # its step sizes were much too small
            assert min(losses) < 0.7 * losses[0]

    tuned = read_tuned(out)
    assert (tuned["seed"], tuned["rounds"], tuned["compare"]) == (4, 40, ["simfbo", "asfbo"])
    assert tuned["algorithms"]["fedavg"] == {"lr_y": 0.01}
    for name, number in best_numbers.items():
        resolved = configs.resolve(*configs.read(str(out / "tuned.toml")), algorithm=name).table
        expected = {
            **read_config(out / name / f"trial-{number}"),
            "title": "A (step sizes tuned)",
            "seed": 4,
            "rounds": 40,
            "stop": {"test_accuracy": 0.9},
        }
        expected["runtime"]["derivatives"] = "auto"  # where a trial records what was chosen
        assert json.loads(json.dumps(resolved)) == expected
    text = (out / "tuned.toml").read_text()
    assert "# Step sizes tuned on seed 3, 12 rounds per trial" in text
    assert "of 5, x " in text

    command = ["tune", file, *options]
    check_other_settings_are_refused(command)
    (out / "report.html").unlink()  # every call writes it, with the date
    before = contents(out)
    code, printed, err = invoke(*command, "--resume", "--json")
    assert (code, err) == (0, "")
    (out / "report.html").unlink()
    assert contents(out) == before
    rows = json.loads(printed)["trials"]
    best_rows = {row["algorithm"]: row["trial"] for row in rows if row["best"]}
    assert best_rows == best_numbers
    assert list(rows[0].items())[:4] == [
        ("algorithm", "asfbo"),
        ("trial", 0),
        ("scale_x", 1.0),
        ("scale_y", 1.0),
    ]
    assert list(rows[0])[4:] == ["upper_loss", "metric", "final", "status", "best"]


def check_other_settings_are_refused(command: list[object]) -> None:
    """Assert that a search is resumed only on request, and only under its own settings."""
    assert_refused(invoke(*command), "--resume")
    for change, mention in (
        (["--rounds", 13], "rounds = 12, not 13"),
        (["--set", "environment.batch_size=1"], "environment.batch_size = 3, not 1"),
        (
            ["--algorithm", "simfbo", "--set", "algorithm.lr_x=0.5"],
            "algorithm.lr_x = 0.001, not 0.5",
        ),
        # Another algorithm, whose settings would be in the same tuned.toml.
        (["--algorithm", "fedavg", "--set", "seed=9"], "seed = 3, not 9"),
    ):
        refused = invoke(*command, "--resume", *change)
        assert_refused(refused, "/trial-0 was run with", mention)


def test_two_sections_of_one_algorithm_are_tuned_separately(
    tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    section = '[algorithms.slow]\nalgorithm = "simfbo"\nlr_x = 1e-4\n'
    file = write(tmp_path / "b.toml", EXPERIMENT + section)
    options = ["--trials", 1, "--rounds", 4, "--out", tmp_path / "out"]
    invoke_ok("tune", file, "--algorithm", "slow", *options)
    invoke_ok("tune", file, "--algorithm", "simfbo", *options)
    tuned = read_tuned(tmp_path / "out")
    assert sorted(tuned["compare"]) == ["simfbo", "slow"]
    assert tuned["algorithms"]["slow"]["algorithm"] == "simfbo"
    assert tuned["algorithms"]["slow"]["lr_x"] == 1e-4
    assert tuned["algorithms"]["simfbo"]["lr_x"] == 1e-3
    source, table = configs.read(str(tmp_path / "out" / "tuned.toml"))
    assert configs.resolve(source, table, algorithm="slow").label == "slow"


def test_wrong_calls_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert_refused(invoke("tune", file, "--algorithm", "adam", "--out", out), "'adam'")
    assert_refused(invoke("tune", file, "--trials", 0, "--out", out), "--trials")
    monkeypatch.setitem(sys.modules, "optuna", None)
    missing = invoke("tune", file, "--out", out)
    assert_refused(missing, "optuna", "pip install 'fedbilevel[tune]'")
    assert list(tmp_path.iterdir()) == [file]


# Trials that diverge or fail.


def test_diverged_trials_are_never_the_best(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    command = ["tune", file, "--algorithm", "simfbo", "--trials", 4, "--rounds", 8]
    always = ["--set", "algorithm.lr_y=1e9", "--set", "algorithm.server_lr_y=1e9"]
    code, shown, _ = invoke(*command, *always, "--out", tmp_path / "always")
    assert code == 3
    table, _ = shown.split("report: ")  # whose path has the name of this test
    assert table.count("diverged") == 4
    assert "*" not in shown.split("best", 1)[1]
    assert not (tmp_path / "always" / "tuned.toml").exists()
    sometimes = ["--set", "algorithm.server_lr_y=3.0", "--json"]
    code, shown, _ = invoke(*command, *sometimes, "--out", tmp_path / "sometimes")
    rows = json.loads(shown)["trials"]
    assert {row["status"] for row in rows} == {"completed", "diverged"}
    assert code == 0
    for row in rows:
        assert (row["upper_loss"] is None) == (row["status"] == "diverged")


def test_a_failed_trial_affects_no_other_and_is_repeated_on_resume(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    def kill_trial_1(name: str) -> None:
        if name == "simfbo/trial-1":
            raise MemoryError

    out = tmp_path / "out"
    command = ["tune", file, "--algorithm", "simfbo", "--trials", 4, "--rounds", 4]
    in_process.setattr(InProcessMember, "before", staticmethod(kill_trial_1))
    code, shown, err = invoke(*command, "--out", out)
    assert code == 2
    assert "simfbo/trial-1: failed: the member was killed" in err.splitlines()
    assert shown.count("completed") == 3
    assert read_tuned(out)["compare"] == ["simfbo"]
    in_process.setattr(InProcessMember, "before", staticmethod(lambda name: None))
    code, shown, err = invoke(*command, "--out", out, "--resume")
    assert (code, shown.count("completed")) == (0, 4)
    assert ended_members(err) == ["simfbo/trial-1: completed"]


def test_if_the_own_settings_of_an_algorithm_fail_there_is_no_other_trial(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    def kill(name: str) -> None:
        raise MemoryError

    in_process.setattr(InProcessMember, "before", staticmethod(kill))
    options = ["--algorithm", "simfbo", "--trials", 4, "--rounds", 4, "--out", tmp_path / "out"]
    code, _, err = invoke("tune", file, *options)
    assert (code, ended_members(err)) == (2, ["simfbo/trial-0: failed: the member was killed"])


# Kills and interruptions.


def test_a_search_that_is_interrupted_or_extended_ends_the_same(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    command = ["tune", file, "--rounds", 6, "--quiet", "--resume", "--out"]
    assert invoke(*command, tmp_path / "whole", "--trials", 4) == (0, "", "")

    def interrupt(name: str) -> None:
        if name == "asfbo/trial-2":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    in_process.setattr(InProcessMember, "before", staticmethod(interrupt))
    assert invoke(*command, out, "--trials", 4) == (130, "", "")
    assert not (out / "simfbo" / "trial-3").exists()  # no trial is started afterwards
    assert not (out / "tuned.toml").exists()
    in_process.setattr(InProcessMember, "before", staticmethod(lambda name: None))
    assert invoke(*command, out, "--trials", 3) == (0, "", "")
    assert invoke(*command, out, "--trials", 4, "--jobs", 1) == (0, "", "")
    assert search_results(out) == search_results(tmp_path / "whole")


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="processes are looked for in /proc"
)
def test_a_search_that_is_killed_twice_ends_the_same(
    file: Path, tmp_path: Path, in_process: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    trial = out / "simfbo" / "trial-2"
    command = ["tune", file, "--algorithm", "simfbo", "--resume", "--quiet", "--out"]
    assert invoke(*command, tmp_path / "whole", "--trials", 4) == (0, "", "")
    assert invoke(*command, out, "--trials", 2) == (0, "", "")
    in_process.undo()
    for evaluations in (0, 3):  # while the trial starts, and while it runs
        process = start_forked(*command, out, "--trials", 4, cwd=tmp_path)
        wait_until(lambda: member_processes(out), 30, "no member started")
        wait_until(lambda least=evaluations: evaluations_written(trial) >= least, 60, "no progress")
        process.kill()
        process.join()
        wait_until(lambda: not member_processes(out), 5, "a member outlives its search")
        assert not (trial / "summary.json").exists()
    in_process.setattr(subprocess, "Popen", InProcessMember)
    assert invoke(*command, out, "--trials", 4) == (0, "", "")
    assert search_results(out) == search_results(tmp_path / "whole")
