"""Recorded runs: what is resumed, what is refused, and what a folder holds afterwards."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

import fedbilevel as fb
from fedbilevel.runs import checkpoint, recorder
from tests.support.tool import (
    QUADRATIC,
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    read_metrics,
    read_summary,
    write,
)
from tests.support.values import identical


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment and its run."""
    folder = tmp_path_factory.mktemp("finished")
    invoke_ok("run", write(folder / "a.toml"), "--out", folder / "run")
    return folder


# Damaged and foreign checkpoints

Damage = Callable[[Path], object]


class TouchWhenUnpickled:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def foreign(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def of_another_version(path: Path) -> None:
    save_file({}, path, {"fedbilevel": "1", "plain": "{}", "digest": ""})


def malicious(path: Path) -> None:
    path.write_bytes(pickle.dumps(TouchWhenUnpickled(path.parents[2] / "touched")))


def malicious_torch(path: Path) -> None:
    torch.save(TouchWhenUnpickled(path.parents[2] / "touched"), path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(length: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def flipped(position: int, after: bytes = b"") -> Damage:
    """Flip a bit so many bytes after the first occurrence of some text."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[data.index(after) + position] ^= 1
        path.write_bytes(data)

    return flip


DAMAGE: dict[str, Damage] = {
    "cut to nothing": cut(0),
    "cut in its length": cut(4),
    "cut in its header": cut(100),
    "cut by a byte": cut(-1),
    "flipped in its length": flipped(1),
    "flipped in its header": flipped(100),
    "flipped in the digest of its record": flipped(20, after=b"record_digest"),
    "flipped in its tensors": flipped(-1),
    "foreign": foreign,
    "of another version": of_another_version,
    "a pickle": malicious,
    "a torch file": malicious_torch,
    "a folder": folder_instead,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_foreign_checkpoints_are_refused_and_nothing_overwritten(
    finished: Path, tmp_path: Path, damage: str
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    for name in ("latest", "previous"):
        DAMAGE[damage](run / "checkpoint" / f"{name}.safetensors")
    before = contents(tmp_path)
    outcome = invoke("run", finished / "a.toml", "--rounds", 8, "--out", run, "--resume")
    assert_refused(outcome, str(run / "checkpoint" / "latest.safetensors"))
    with pytest.raises(ValueError, match=r"latest\.safetensors"):
        fb.load_run(run)
    assert_refused(invoke("export", run, "--out", tmp_path / "model.safetensors"))
    assert contents(tmp_path) == before  # nothing was unpickled either


# Resuming


def test_lost_metrics_are_noticed(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    command = ["run", finished / "a.toml", "--out", run, "--resume"]
    (run / "metrics.jsonl").write_bytes(b"")
    before = contents(run)
    assert_refused(invoke(*command), "metrics.jsonl", "lost")
    (run / "metrics.jsonl").unlink()
    assert_refused(invoke(*command), "metrics.jsonl")
    del before["metrics.jsonl"]
    assert contents(run) == before


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (["--algorithm", "asfbo"], ["algorithm", "'simfbo'", "'asfbo'"]),
        (["--set", "algorithm.lr_x=0.2"], ["algorithm.lr_x = 0.05, not 0.2"]),
        (["--seed", 1], ["seed = 0, not 1"]),
        (
            ["--set", "environment.local_steps=[1, 3]"],
            ["environment.local_steps = [1, 2], not [1, 3]"],
        ),
        (["--set", "task.noise=0.4"], ["task.noise = 0.3, not 0.4"]),
        (["--set", "runtime.threads=2"], ["runtime.threads = 1, not 2"]),
    ],
)
def test_a_run_is_not_resumed_under_other_settings(
    finished: Path, tmp_path: Path, options: list[object], mentions: list[str]
) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    before = contents(run)
    command = ["run", finished / "a.toml", "--out", run]
    assert_refused(invoke(*command, "--resume", *options), str(run), *mentions)
    assert_refused(invoke(*command, *options), str(run), "--resume")
    assert contents(run) == before


def test_a_raised_budget_gives_the_longer_run(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    whole = tmp_path / "whole"
    resume = ["run", finished / "a.toml", "--out", run, "--resume", "--rounds", 7]
    invoke_ok(*resume)
    invoke_ok("run", finished / "a.toml", "--out", whole, "--rounds", 7)
    assert read_metrics(run) == read_metrics(whole)
    assert identical(fb.load_run(run).x, fb.load_run(whole).x)
    assert {**read_summary(run), "wall_s": 0} == {**read_summary(whole), "wall_s": 0}
    assert (run / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    invoke_ok(*resume)  # there is nothing left to do
    assert read_metrics(run) == read_metrics(whole)
    assert {**read_summary(run), "wall_s": 0} == {**read_summary(whole), "wall_s": 0}


def test_a_run_with_stages_is_resumed(tmp_path: Path) -> None:
    """Stages are tables in a list, with tuples in them."""
    stages = "environment.stages=[{ stage = 'half', values = ['dx'] }, { stage = 'half' }]"
    file = write(tmp_path / "a.toml")
    command = ["run", file, "--set", stages, "--out", tmp_path / "run"]
    invoke_ok(*command)
    invoke_ok(*command, "--resume", "--rounds", 5)


def test_lines_after_the_checkpoint_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.toml")
    run = tmp_path / "run"
    command = ["run", file, "--out", run, "--set", "every=4", "--set", "checkpoint_every=1"]
    invoke_ok(*command, "--rounds", 4)
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"round": 99}\n{"round"')  # as a run leaves them that was killed later
    lengths = []
    save = checkpoint.save

    def watched_save(path: Path, value: Any, record: Any, previous: Path) -> None:
        lengths.append((record["metrics_bytes"], (run / "metrics.jsonl").stat().st_size))
        save(path, value, record, previous)

    monkeypatch.setattr(checkpoint, "save", watched_save)
    invoke_ok(*command, "--rounds", 8, "--resume")
    assert len(lengths) == 5
    assert all(saved == actual for saved, actual in lengths)
    assert [line["round"] for line in read_metrics(run)] == [0, 4, 8]


def test_a_folder_has_one_writer(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "LOCK_WAIT_S", 0.01)
    run = shutil.copytree(finished / "run", tmp_path / "run")
    before = contents(run)
    command = ["run", finished / "a.toml", "--rounds", 9, "--out", run, "--resume"]
    with FileLock(run / "checkpoint" / "lock"):
        assert_refused(invoke(*command), f"{run} is being written by another process")
        assert contents(run) == before
    invoke_ok(*command)


def test_a_folder_that_another_process_has_written_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """Both runs find an empty folder; the second one begins when the first one has ended."""
    task = fb.tasks.load("quadratic", clients=3)
    config = {"algorithm": {"name": "simfbo"}, "seed": 0}
    recorders = []
    for _ in range(2):
        fed = fb.simulated_federation(task.problem, task.clients)
        run = fb.Run(fb.algorithms.SimFBO(), fed, {"rounds": 2})
        recorders.append(recorder.Recorder(run, tmp_path / "run", config))
    first, second = recorders
    list(first)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="was written by another process in the meantime"):
        list(second)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("when", ["at once", "after its checkpoint vanished"])
def test_a_run_that_fails_leaves_the_files_of_others(tmp_path: Path, when: str) -> None:
    run = tmp_path / "run"
    task = fb.tasks.load("quadratic", clients=3)

    def evaluate(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        if not (run / "checkpoint").exists():
            return {}
        (run / "notes.txt").write_text("mine")
        if (run / "checkpoint" / "latest.safetensors").exists():
            shutil.rmtree(run / "checkpoint")
        return {"metric": object()}  # type: ignore[dict-item]

    fed = fb.simulated_federation(task.problem, task.clients)
    fb_run = fb.Run(fb.algorithms.SimFBO(), fed, {"rounds": 2}, evaluate)
    recording = recorder.Recorder(fb_run, run, {"algorithm": {"name": "simfbo"}, "seed": 0})
    if when == "at once":
        recording._save = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="a metric must be a number"):
        list(recording)
    expected = {"notes.txt"}
    if when != "at once":
        expected |= {"config.toml", "metrics.jsonl"}
    assert set(contents(run)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.toml", QUADRATIC), ("config.toml", "[server]\nport = 1\n"), ("metrics.jsonl", "1\n")],
)
def test_a_run_does_not_overwrite_files_of_others(tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path / "a.toml", QUADRATIC)
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text(text)
    for options in ([], ["--resume"]):
        refused = invoke("run", file, "--out", run, "--quiet", *options)
        assert_refused(refused, f"{run / name} was not written by a run")
    assert contents(run) == {name: text.encode()}


def test_a_diverged_run_keeps_its_last_good_state_and_stays_diverged(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "algorithm.server_lr_x = 1e150" + QUADRATIC)
    run = tmp_path / "run"
    assert invoke("run", file, "--rounds", 9, "--out", run, "--quiet") == (3, "", "")
    summary = read_summary(run)
    assert summary["status"] == "diverged"
    assert summary["rounds"] == read_metrics(run)[-1]["round"]
    assert summary["reason"].startswith(f"round {summary['rounds']}: ")
    assert "finite" in summary["reason"] or "times its start" in summary["reason"]
    loaded = fb.load_run(run)
    assert loaded.status == "diverged"
    for tensor in (*loaded.x.values(), *loaded.y.values()):
        assert torch.isfinite(tensor).all()
    before = read_metrics(run)
    assert invoke("run", file, "--rounds", 20, "--out", run, "--resume", "--quiet").code == 3
    assert read_metrics(run) == before
    assert read_summary(run)["reason"] == summary["reason"]
