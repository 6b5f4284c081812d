"""The commands: exit codes, what they print, what they leave behind; comparisons; real processes where it matters."""

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedbilevel as fb
from fedbilevel import data
from fedbilevel.experiments import config as configs
from tests.support.tool import (
    QUADRATIC,
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    run_forked,
    run_process,
    start_process,
    write,
)

SUMMARY = {
    *(
        "algorithm",
        "task",
        "data",
        "seed",
        "status",
        "reason",
        "rounds",
        "final_test_accuracy",
        "best_test_accuracy",
    ),
    *(
        "rounds_to",
        "bytes_up",
        "bytes_down",
        "samples",
        "gradients",
        "virtual_s",
        "wall_s",
        "refused_replies",
    ),
    *("flops", "peak_bytes", "clients"),
}
METRICS = {
    *(
        "round",
        "iteration",
        "bytes_up",
        "bytes_down",
        "samples",
        "gradients",
        "virtual_s",
        "wall_s",
    ),
    *("flops", "peak_bytes", "upper_loss", "lower_loss"),
}
EXPERIMENT = 'algorithm = "simfbo"\ncompare = ["simfbo", "asfbo"]' + QUADRATIC


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.toml")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    invoke_ok("run", "digits", "--rounds", 3, "--out", folder)
    return folder


# What is printed


def test_a_run_tells_how_it_ended_and_where_it_is(file: Path, tmp_path: Path) -> None:
    outcome = invoke("run", file, "--out", tmp_path / "run")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "simfbo: completed after 4 rounds",
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


def test_a_folder_holds_what_the_contract_says(digits: Path, tmp_path: Path) -> None:
    assert {entry.name for entry in digits.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "checkpoint",
    }
    told, lines = (
        read_summary(digits),
        [json.loads(line) for line in (digits / "metrics.jsonl").read_text().splitlines()],
    )
    assert told.keys() >= SUMMARY
    assert list(told["rounds_to"]) == ["0.8", "0.9", "0.93", "0.95", "0.97"]
    assert (told["task"], told["data"], told["rounds"]) == ("hyper-representation", "digits", 3)
    assert all(line.keys() >= {*METRICS, "train_accuracy", "test_accuracy"} for line in lines)
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert told["final_test_accuracy"] == lines[-1]["test_accuracy"]
    assert told["best_test_accuracy"] == max(line["test_accuracy"] for line in lines)
    invoke_ok("run", write(tmp_path / "a.toml"), "--out", tmp_path / "run")
    assert all(
        line.keys() >= {*METRICS, "hypergradient_norm"} - {"wall_s"}
        for line in read_metrics(tmp_path / "run")
    )
    assert read_summary(tmp_path / "run")["final_test_accuracy"] is None


def test_rounds_to_a_target_and_accuracies_that_are_not_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "rising.py",
        """
        from fedbilevel import tasks
        accuracies = iter([0.5, float("nan"), 0.85, 0.92, 0.81, float("nan"), 0.96])
        def task():
            made = tasks.load("quadratic", clients=2)
            return tasks.Task(made.problem, made.clients, lambda x, y: {"test_accuracy": next(accuracies)})
        """.replace("\n        ", "\n"),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rising = write(tmp_path / "rising.toml", 'task = "rising:task"\nstop.test_accuracy = 0.99')
    invoke_ok("run", rising, "--rounds", 5, "--out", "run")
    told = json.loads(Path("run/summary.json").read_text(), parse_constant=pytest.fail)
    assert told["rounds_to"] == {"0.8": 2, "0.9": 3, "0.93": None, "0.95": None, "0.97": None}
    assert (told["final_test_accuracy"], told["best_test_accuracy"]) == (0.81, 0.92)
    assert read_metrics(Path("run"))[1]["test_accuracy"] is None
    invoke_ok("run", rising, "--rounds", 6, "--out", "run", "--resume")
    assert read_summary(Path("run"))["rounds_to"]["0.95"] == 6


def test_lists_version_and_help() -> None:
    for what, expected in (
        ("algorithms", fb.algorithms.names()),
        ("tasks", fb.tasks.names()),
        ("experiments", configs.names()),
        ("data", ["digits", "mnist"]),
    ):
        code, out, err = invoke("list", what)
        assert (code, err) == (0, "")
        assert {line.split()[0] for line in out.splitlines()} >= set(expected)
    assert_refused(invoke("list", "task"), "'task'", "did you mean 'tasks'")
    assert invoke("--version") == (0, f"fedbilevel {fb.__version__}\n", "")
    assert invoke() == invoke("--help")
    for command in ([], ["run"], ["compare"], ["tune"], ["report"], ["export"], ["list"]):
        code, out, err = invoke(*command, "--help")
        assert (code, err) == (0, "")
        assert f"Example: fedbilevel {' '.join(command)}" in " ".join(out.split())


def test_the_first_free_folder_below_runs_is_taken(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        invoke_ok("run", file, "--rounds", 0)
    assert {folder.name for folder in Path("runs").iterdir()} == {
        "a-simfbo-seed-0",
        "a-simfbo-seed-0-2",
    }


def test_markup_in_names_is_only_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a[b][red][.toml")
    outcome = invoke("run", file, "--rounds", 1, "--out", tmp_path / "[red]")
    assert outcome.code == 0
    assert outcome.err.startswith("a[b][red][ simfbo seed 0")
    assert f"folder: {tmp_path / '[red]'}" in outcome.out


# Reading back


def test_a_run_is_read_back_and_exported(digits: Path, tmp_path: Path) -> None:
    run = fb.load_run(digits)
    assert (run.status, run.config["algorithm"]["name"]) == ("completed", "simfbo")
    assert [line["round"] for line in run.history] == [0, 1, 2, 3]
    outcome = invoke("export", digits, "--out", tmp_path / "model.safetensors")
    assert outcome == (0, f"written: {tmp_path / 'model.safetensors'}\n", "")
    net = fb.nets.mlp(64, 64, 10)
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images, labels = data.load("digits").test
    with torch.no_grad():
        accuracy = float((net(images).argmax(-1) == labels).float().mean())
    assert accuracy == read_summary(digits)["final_test_accuracy"]
    assert_refused(
        invoke("export", digits, "--out", tmp_path / "no" / "model.safetensors"), "model.safetensors"
    )
    assert_refused(invoke("export", tmp_path, "--out", tmp_path / "model"), "config.toml")


# Wrong input, as real processes


def test_a_dozen_wrong_calls_as_processes(tmp_path: Path) -> None:
    write(tmp_path / "a.toml")
    invoke_ok("run", tmp_path / "a.toml", "--rounds", 1, "--out", tmp_path / "finished")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "junk.toml").write_bytes(bytes(range(256)))
    write(tmp_path / "nan.toml", "algorithm.lr_x = nan" + QUADRATIC)
    write(tmp_path / "key.toml", "ronds = 3" + QUADRATIC)
    cases: list[tuple[list[str], list[str]]] = [
        (["run", "missing.toml"], ["missing.toml", "No such file"]),
        (["run", "folder.toml"], ["folder.toml is a folder"]),
        (["run", "junk.toml"], ["junk.toml", "UTF-8"]),
        (["run", "nan.toml"], ["nan.toml", "lr_x is nan", "finite"]),
        (["run", "key.toml"], ["key.toml", "'ronds'", "did you mean 'rounds'"]),
        (["run", "a.toml", "--rounds", "x"], ["--rounds", "integer"]),
        (["run", "a.toml", "--rounds", "-1"], ["rounds is -1"]),
        (["run", "a.toml", "--seed", "1" + 30 * "0"], ["seed", "64 bits"]),
        (["run", "a.toml", "--algorithm", "simfb"], ["'simfb'", "did you mean 'simfbo'"]),
        (
            ["run", "a.toml", "--out", "a.toml/run"],
            ["a.toml/run cannot be written: Not a directory"],
        ),
        (["run", "a.toml", "--out", "/proc/run"], ["/proc/run cannot be written"]),
        (["run", "a.toml", "--out", "finished"], ["finished", "--resume"]),
        (["walk"], ["'walk'"]),
    ]
    assert_refused(run_process("run", cwd=tmp_path), "Missing argument")
    before = contents(tmp_path)
    for arguments, mentions in cases:
        assert_refused(run_forked(*arguments, cwd=tmp_path), *mentions)
    assert {
        name: data for name, data in contents(tmp_path).items() if not name.startswith("forked.")
    } == before
    assert not (tmp_path / "runs").exists()


def test_wrong_calls_of_the_other_commands(file: Path, tmp_path: Path) -> None:
    assert_refused(invoke("run", "digts"), "'digts'", "did you mean 'digits'")
    assert_refused(
        invoke("compare", file, "--algorithms", "simfbo,adam", "--out", tmp_path / "runs"), "'adam'"
    )
    assert_refused(invoke("compare", file, "--seeds", 0, "--out", tmp_path / "runs"), "--seeds")
    assert_refused(invoke("report", tmp_path / "missing"), "missing is not a folder")
    assert_refused(invoke("run", file, "--fast"), "--fast")
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of six pages."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk could be mounted: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_leaves_nothing_or_a_run_that_goes_on(
    file: Path, small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(16_000))
    assert_refused(
        invoke("run", file, "--out", small_disk / "run", "--quiet"), "run cannot be written: No space"
    )
    assert list(small_disk.iterdir()) == [filler]
    filler.unlink()
    outcome = invoke("run", file, "--rounds", 45, "--out", small_disk / "run", "--quiet")
    assert_refused(outcome, str(small_disk / "run"), "No space left on device")
    assert not (small_disk / "run" / "summary.json").exists()
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    invoke_ok("run", file, "--rounds", 45, "--out", small_disk / "run", "--resume")
    invoke_ok("run", file, "--rounds", 45, "--out", tmp_path / "whole")
    assert read_metrics(small_disk / "run") == read_metrics(tmp_path / "whole")


@pytest.mark.parametrize("fails", ["metrics.jsonl", "config.toml.new", "latest.safetensors.new"])
def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    opened = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    assert_refused(
        invoke("run", file, "--out", tmp_path / "run", "--quiet"),
        "run cannot be written: No space left on device",
    )
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "mine").mkdir()
    assert_refused(invoke("run", file, "--out", tmp_path / "mine", "--quiet"), "mine cannot be written")
    monkeypatch.undo()
    invoke_ok("run", file, "--out", tmp_path / "mine")  # what is no run yet is begun anew


# Signals and terminals, as real processes


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_end(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_process("run", file, "--rounds", 10**6, "--out", run, cwd=tmp_path) as process:
        wait_for_lines(run / "metrics.jsonl", 15, process)
        other = invoke("run", file, "--rounds", 10**6, "--out", run, "--resume")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert_refused(other, str(run), "another process")
    assert process.returncode == 130
    assert "Traceback" not in err
    told, lines = read_summary(run), read_metrics(run)
    assert (told["status"], told["rounds"]) == ("interrupted", len(lines) - 1)
    assert told["reason"] == f"interrupted after round {told['rounds']}"
    assert out.splitlines()[0] == f"simfbo: interrupted after {told['rounds']} rounds"
    rounds = told["rounds"] + 5
    invoke_ok("run", file, "--rounds", rounds, "--out", run, "--resume")
    invoke_ok("run", file, "--rounds", rounds, "--out", tmp_path / "whole")
    assert read_metrics(run) == read_metrics(tmp_path / "whole")
    ended, whole = fb.load_run(run), fb.load_run(tmp_path / "whole")
    assert torch.equal(ended.x["x"], whole.x["x"])
    assert torch.equal(ended.y["y"], whole.y["y"])
    assert {**read_summary(run), "wall_s": 0} == {**read_summary(tmp_path / "whole"), "wall_s": 0}


def on_a_terminal(*arguments: object, cwd: Path) -> tuple[str, str]:
    """What a command writes to a pipe and shows on a terminal."""
    ours, theirs = pty.openpty()
    with start_process(*arguments, cwd=cwd, stderr=theirs, env={"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        out, _ = process.communicate(timeout=30)
    os.close(ours)
    assert process.returncode == 0
    return out, shown.decode()


def test_a_terminal_gets_a_bar(file: Path, tmp_path: Path) -> None:
    out, shown = on_a_terminal("run", file, "--out", tmp_path / "run", cwd=tmp_path)
    assert all(part in shown for part in ("━", "4/4", "loss", "MB", "\x1b["))
    assert "\x1b" not in out


def test_completion_scripts_are_made_and_complete(tmp_path: Path) -> None:
    code, out, err = run_process(cwd=tmp_path, env={"_FEDBILEVEL_COMPLETE": "source_bash"})
    assert (code, err) == (0, "")
    assert "_fedbilevel_completion" in out
    words = {
        "COMP_WORDS": "fedbilevel comp",
        "COMP_CWORD": "1",
        "_FEDBILEVEL_COMPLETE": "complete_bash",
    }
    assert run_process(cwd=tmp_path, env=words).out.split() == ["compare"]


# Comparisons


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, its comparison, and what was printed."""
    folder = tmp_path_factory.mktemp("compared")
    file = write(folder / "a.toml", EXPERIMENT)
    code, out, err = invoke("compare", file, "--seeds", 2, "--jobs", 2, "--out", folder / "runs")
    assert code == 0, (out, err)
    write(folder / "out", out)
    write(folder / "err", err)
    return folder


@pytest.mark.xdist_group("compared")
def test_a_comparison_prints_one_table_and_writes_the_report(compared: Path) -> None:
    names = {f"{algorithm}/seed-{seed}" for algorithm in ("simfbo", "asfbo") for seed in (0, 1)}
    assert sorted((compared / "err").read_text().splitlines()) == sorted(
        f"{name}: completed" for name in names
    )
    out = (compared / "out").read_text()
    assert out.count("algorithm") == 1
    assert all(out.count(f" {name} ") == 1 for name in ("simfbo", "asfbo"))
    assert out.splitlines()[-1] == f"report: {compared / 'runs' / 'report.html'}"
    assert (compared / "runs" / "report.html").read_text().startswith("<!doctype html>")
    for name in names:
        run = compared / "runs" / name
        assert (read_summary(run)["status"], read_summary(run)["seed"]) == ("completed", int(name[-1]))
        assert read_config(run)["algorithm"]["name"] == name.split("/")[0]


@pytest.mark.xdist_group("compared")
def test_a_terminal_gets_a_live_table(compared: Path) -> None:
    command = [
        "compare",
        compared / "a.toml",
        "--seeds",
        2,
        "--jobs",
        2,
        "--out",
        compared / "runs",
        "--resume",
    ]
    out, shown = on_a_terminal(*command, cwd=compared)
    row = next(line for line in shown.splitlines() if "asfbo/seed-1" in line)
    assert all(part in row for part in ("completed", "4/4", "loss", "MB"))
    assert "\x1b" not in out


@pytest.mark.xdist_group("compared")
def test_a_finished_comparison_is_not_run_again(compared: Path) -> None:
    options = ["--seeds", 2, "--jobs", 2, "--out", compared / "runs"]
    before = {
        name: data for name, data in contents(compared / "runs").items() if name != "report.html"
    }
    assert_refused(invoke("compare", compared / "a.toml", *options), "--resume")
    changed = invoke(
        "compare", compared / "a.toml", *options, "--resume", "--set", "environment.batch_size=1"
    )
    assert_refused(changed, "environment.batch_size = 2, not 1")
    assert invoke("compare", compared / "a.toml", *options, "--resume", "--quiet") == (0, "", "")
    code, out, err = invoke("compare", compared / "a.toml", *options, "--resume", "--json")
    told = json.loads(out)
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    assert {row["algorithm"]: row["seeds"] for row in told["ranked"]} == {"simfbo": 2, "asfbo": 2}
    assert told["failed"] == {}
    after = {
        name: data for name, data in contents(compared / "runs").items() if name != "report.html"
    }
    assert after == before


@pytest.mark.xdist_group("compared")
def test_a_raised_budget_goes_on_and_the_number_of_jobs_changes_nothing(
    compared: Path, tmp_path: Path
) -> None:
    runs, before = tmp_path / "runs", compared / "runs"
    shutil.copytree(before / "asfbo" / "seed-1", runs / "asfbo" / "seed-1")
    options = [
        "--algorithms",
        "asfbo",
        "--seeds",
        2,
        "--jobs",
        1,
        "--rounds",
        7,
        "--out",
        runs,
        "--resume",
    ]
    assert invoke("compare", compared / "a.toml", *options, "--quiet") == (0, "", "")
    for seed in ("asfbo/seed-0", "asfbo/seed-1"):
        assert [line["round"] for line in read_metrics(runs / seed)] == list(range(8))
        assert read_metrics(runs / seed)[:5] == read_metrics(before / seed)
        assert read_config(runs / seed) == {**read_config(before / seed), "rounds": 7}


def test_a_member_that_fails_takes_no_other_with_it_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2: a comparison that lacks a member is not what was asked for."""
    write(
        tmp_path / "fragile.py",
        """
        from fedbilevel import tasks
        def task(seed: int = 0):
            if seed == 6:
                raise RuntimeError("seed 6 [/is] odd")
            return tasks.load("quadratic", clients=3, seed=seed)
        """.replace("\n        ", "\n"),
    )
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.toml", 'task = "fragile:task"\nrounds = 2')
    options = ["--seeds", 2, "--set", "seed=5", "--out", "runs"]
    code, out, err = invoke("compare", "a.toml", *options)
    assert code == 2
    (named,) = (
        line for line in out.splitlines() if line.startswith("simfbo/seed-6 failed: error: ")
    )
    assert named.endswith("task fragile:task: RuntimeError: seed 6 [/is] odd")
    assert named.replace(" ", ": ", 1) in err.splitlines()
    assert "Traceback" not in err + out
    good = read_summary(Path("runs", "simfbo", "seed-5"))
    assert (good["status"], good["seed"]) == ("completed", 5)
    assert Path("runs", "report.html").exists()
    code, out, err = invoke("compare", "a.toml", *options, "--resume", "--json")
    told = json.loads(out)
    assert (code, list(told["failed"])) == (2, ["simfbo/seed-6"])
    assert [(row["algorithm"], row["seeds"]) for row in told["ranked"]] == [("simfbo", 1)]
