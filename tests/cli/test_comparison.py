"""`fedbilevel compare`: runs side by side, resumed, extended, and some of them failing."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.terminal import run_on_terminal
from tests.support.tool import (
    QUADRATIC,
    assert_refused,
    contents,
    invoke,
    read_config,
    read_metrics,
    read_summary,
    write,
)

MEMBER = "asfbo/seed-1"
EXPERIMENT = 'algorithm = "simfbo"\ncompare = ["simfbo", "asfbo"]' + QUADRATIC
FRAGILE_TASK = """
from fedbilevel import tasks

def task(seed: int = 0):
    if seed == 6:
        raise RuntimeError("seed 6 [/is] odd")
    return tasks.load("quadratic", clients=3, seed=seed)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, its comparison in runs/, and what was printed."""
    folder = tmp_path_factory.mktemp("compared")
    file = write(folder / "a.toml", EXPERIMENT)
    code, out, err = invoke("compare", file, "--seeds", 2, "--jobs", 2, "--out", folder / "runs")
    assert code == 0, (out, err)
    write(folder / "out", out)
    write(folder / "err", err)
    return folder


def run_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a comparison, without the page that every call writes."""
    files = contents(folder)
    del files["report.html"]
    return files


@pytest.mark.parametrize("names", ["asfbo,", ",asfbo", "asfbo, ,simfbo", ""])
def test_an_empty_name_in_the_list_of_algorithms_is_refused(names: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", EXPERIMENT)
    outcome = invoke("compare", file, "--algorithms", names, "--out", tmp_path / "runs")
    assert_refused(outcome, f"the list of algorithms {names!r} holds an empty name")
    assert not (tmp_path / "runs").exists()


@pytest.mark.xdist_group("compared")
def test_a_comparison_prints_one_table_and_writes_the_report(compared: Path) -> None:
    names = ["asfbo/seed-0", "asfbo/seed-1", "simfbo/seed-0", "simfbo/seed-1"]
    progress = (compared / "err").read_text().splitlines()
    for name in names:
        started = progress.index(f"{name}: started")
        (completed,) = [line for line in progress if line.startswith(f"{name}: completed")]
        assert started < progress.index(completed)
        assert "round 4/4  loss " in completed
    out = (compared / "out").read_text()
    assert out.count("┃ algorithm ") == 1
    assert out.count(" simfbo ") == 1
    assert out.count(" asfbo ") == 1
    assert out.splitlines()[-1] == f"report: {compared / 'runs' / 'report.html'}"
    assert (compared / "runs" / "report.html").read_text().startswith("<!doctype html>")
    for name in names:
        run = compared / "runs" / name
        assert read_summary(run)["status"] == "completed"
        assert read_summary(run)["seed"] == int(name[-1])
        assert read_config(run)["algorithm"]["name"] == name.split("/")[0]


@pytest.mark.xdist_group("compared")
def test_a_member_with_a_damaged_summary_is_resumed(compared: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(compared / "runs", tmp_path / "runs")
    file = runs / MEMBER / "summary.json"
    expected = file.read_bytes()
    file.write_bytes(expected[:-9])
    options = ["--seeds", 2, "--out", runs, "--resume", "--quiet"]
    assert invoke("compare", compared / "a.toml", *options) == (0, "", "")
    assert file.read_bytes() == expected


@pytest.mark.xdist_group("compared")
def test_a_terminal_shows_a_live_table(compared: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(compared / "runs", tmp_path / "runs")
    evaluations = [{**metrics, "test_accuracy": 0.5} for metrics in read_metrics(runs / MEMBER)]
    lines = [json.dumps({**metrics, "wall_s": 1.0}) + "\n" for metrics in evaluations]
    write(runs / MEMBER / "metrics.jsonl", "".join(lines))
    shutil.rmtree(runs / MEMBER / "checkpoint")  # its record is of the true metrics
    options = ["--seeds", 2, "--jobs", 2, "--out", runs, "--resume"]
    out, shown = run_on_terminal("compare", compared / "a.toml", *options, cwd=tmp_path)
    assert "preparing 4 runs" in shown
    row = next(line for line in shown.splitlines() if MEMBER in line)
    assert all(part in row for part in ("completed", "4/4", 20 * "▅", "loss", "MB"))
    assert "\x1b" not in out


class SlowMember:
    """Stands for `subprocess.Popen`: writes an evaluation, is polled, and ends."""

    def __init__(self, command: list[str], **_: object) -> None:
        self.folder = Path(command[4]).parent
        self.returncode: int | None = None
        metrics = {"round": 2, "bytes_up": 1e6, "bytes_down": 1e6, "test_accuracy": 0.5}
        write(self.folder / "metrics.jsonl", json.dumps(metrics) + "\n")

    def poll(self) -> int | None:
        before = self.returncode
        self.returncode = 0
        return before

    def communicate(self) -> None: ...


def test_without_a_terminal_lines_show_the_progress_and_the_curve_of_running_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.toml")
    monkeypatch.setattr(subprocess, "Popen", SlowMember)
    options = ["--seeds", 1, "--jobs", 1, "--out", tmp_path / "runs"]
    code, _, err = invoke("compare", file, *options)
    progress = "round 2/4  accuracy 0.5  2.0 MB  ▅▅▅▅▅▅▅▅▅▅"
    assert (code, err.splitlines()) == (
        0,
        [
            "simfbo/seed-0: started",
            f"simfbo/seed-0: {progress}",
            f"simfbo/seed-0: unfinished  {progress}",
        ],
    )


@pytest.mark.xdist_group("compared")
def test_a_finished_comparison_is_not_run_again(compared: Path) -> None:
    command = [
        "compare",
        compared / "a.toml",
        "--seeds",
        2,
        "--jobs",
        2,
        "--out",
        compared / "runs",
    ]
    before = run_files(compared / "runs")
    assert_refused(invoke(*command), "--resume")
    changed = invoke(*command, "--resume", "--set", "environment.batch_size=1")
    assert_refused(changed, "environment.batch_size = 2, not 1")
    assert invoke(*command, "--resume", "--quiet") == (0, "", "")
    code, out, err = invoke(*command, "--resume", "--json")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    printed = json.loads(out)
    seeds = {row["algorithm"]: row["seeds"] for row in printed["ranked"]}
    assert seeds == {"simfbo": 2, "asfbo": 2}
    assert printed["failed"] == {}
    assert run_files(compared / "runs") == before


@pytest.mark.xdist_group("compared")
def test_a_raised_budget_continues_runs_and_the_number_of_jobs_changes_nothing(
    compared: Path, tmp_path: Path
) -> None:
    before = compared / "runs"
    runs = tmp_path / "runs"
    shutil.copytree(before / "asfbo" / "seed-1", runs / "asfbo" / "seed-1")
    options = ["--algorithms", "asfbo", "--seeds", 2, "--jobs", 1, "--rounds", 7]
    command = ["compare", compared / "a.toml", *options, "--out", runs, "--resume", "--quiet"]
    assert invoke(*command) == (0, "", "")
    for name in ("asfbo/seed-0", "asfbo/seed-1"):
        assert [line["round"] for line in read_metrics(runs / name)] == list(range(8))
        assert read_metrics(runs / name)[:5] == read_metrics(before / name)
        assert read_config(runs / name) == {**read_config(before / name), "rounds": 7}


def test_a_member_that_fails_is_named_and_the_others_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 2, because the comparison lacks a member."""
    write(tmp_path / "fragile.py", FRAGILE_TASK)
    write(tmp_path / "typer.py", "raise SystemExit('the working folder hides a module')")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.toml", 'task = "fragile:task"\nrounds = 2')
    options = ["--seeds", 2, "--set", "seed=5", "--out", "runs"]
    code, out, err = invoke("compare", "a.toml", *options)
    assert code == 2
    (failure,) = [line for line in out.splitlines() if line.startswith("simfbo/seed-6 ")]
    reason = failure.removeprefix("simfbo/seed-6 failed: error: ")
    assert reason.endswith("task fragile:task: RuntimeError: seed 6 [/is] odd")
    assert f"simfbo/seed-6: failed: error: {reason}" in err.splitlines()
    assert "Traceback" not in err + out
    completed = read_summary(Path("runs", "simfbo", "seed-5"))
    assert (completed["status"], completed["seed"]) == ("completed", 5)
    assert Path("runs", "report.html").exists()
    code, out, err = invoke("compare", "a.toml", *options, "--resume", "--json")
    printed = json.loads(out)
    assert (code, list(printed["failed"])) == (2, ["simfbo/seed-6"])
    assert [(row["algorithm"], row["seeds"]) for row in printed["ranked"]] == [("simfbo", 1)]
    outcome = invoke("compare", "a.toml", *options, "--resume", "--quiet")
    assert_refused(outcome, "error: simfbo/seed-6 failed: ", "RuntimeError: seed 6 [/is] odd")
