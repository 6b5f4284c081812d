"""A damaged file of a run: resuming ends with the same bits, or says what is broken.

There is no third outcome, and what is refused is left as it is.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare_run
from fedbilevel.runs import checkpoint, folder
from fedbilevel.runs.recorder import Recorder
from tests.support.damage import DAMAGE
from tests.support.processes import assert_same_run
from tests.support.tool import (
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    write,
)

EXPERIMENT = """
task = { name = "quadratic", clients = 3, samples = 3, noise = 0.3 }
algorithm = { name = "afbo", memory = "client" }
rounds = 8
checkpoint_every = 2
environment = { delay = { model = "lognormal", mean = 1.0, sigma = 0.5 } }
runtime = { threads = 1, memory = 1 }
"""
FILES = [
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoint/lock",
    "checkpoint/latest.safetensors",
    "checkpoint/previous.safetensors",
    "checkpoint/memories-0-0",
]


def kill(file: Path, run: Path, evaluations: int) -> None:
    """Leave a run as a SIGKILL does after some evaluations."""
    config = configs.resolve(*configs.read(str(file)))
    recorder = Recorder(prepare_run(config), run, config.table, checkpoint_every=2)
    for number, _ in enumerate(recorder, start=1):
        if number == evaluations:
            break


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment, its finished run, and the same run when it was killed."""
    runs = tmp_path_factory.mktemp("runs")
    file = write(runs / "a.toml", EXPERIMENT)
    invoke_ok("run", file, "--out", runs / "finished")
    kill(file, runs / "killed", evaluations=6)
    return runs


@pytest.mark.parametrize("state", ["finished", "killed"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_repaired_or_named(
    runs: Path, tmp_path: Path, name: str, state: str
) -> None:
    if state == "killed" and name == "summary.json":
        assert not (runs / state / name).exists()
        return
    assert (runs / state / name).exists()
    draw = random.Random(f"{name} {state}")
    for kind in DAMAGE:
        run = shutil.copytree(runs / state, tmp_path / kind)
        DAMAGE[kind](run / name, draw)
        before = contents(run)
        outcome = invoke("run", runs / "a.toml", "--out", run, "--resume", "--quiet")
        if outcome.code == 0:
            assert outcome == (0, "", "")
            assert_same_run(run, runs / "finished")
            assert_healthy(run)
        else:
            assert_refused(outcome, str(run))
            assert contents(run) == before


def assert_healthy(run: Path) -> None:
    """Assert that nothing damaged is left in a folder, and nothing that is not needed."""
    for name in ("latest", "previous"):
        checkpoint.load(run / "checkpoint" / f"{name}.safetensors")
    assert len(fb.load_run(run).history) > 0
    assert not list(run.rglob("*.new"))


@pytest.mark.parametrize("name", ["latest.safetensors", "metrics.jsonl", "memories-0-0"])
def test_the_checkpoint_before_is_used_if_the_last_one_does_not_hold(
    runs: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage to what was written since the checkpoint before costs these iterations only."""
    run = shutil.copytree(runs / "killed", tmp_path / "run")
    (file,) = run.rglob(name)
    content = bytearray(file.read_bytes())
    end = len(content)
    if name != "latest.safetensors":
        end = recorded_length(run, name)
    content[end - 2] ^= 1
    file.write_bytes(content)
    with caplog.at_level("WARNING", logger="fedbilevel"):
        assert invoke("run", runs / "a.toml", "--out", run, "--resume").code == 0
    assert_same_run(run, runs / "finished")
    assert_healthy(run)
    (message,) = caplog.messages
    assert str(file) in message
    assert message.endswith("; the run resumes from the checkpoint before")


def recorded_length(run: Path, name: str) -> int:
    """The length of a file at the last checkpoint."""
    file = run / "checkpoint" / "latest.safetensors"
    if name == "metrics.jsonl":
        length: int = folder.read_record(file)["metrics_bytes"]
        return length
    (executor,) = checkpoint.load(file)["federation"]["transport"]["executors"]
    return int(executor["memories"][1])


def test_without_any_checkpoint_a_run_is_neither_resumed_nor_overwritten(
    runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "killed", tmp_path / "run")
    shutil.rmtree(run / "checkpoint")
    before = contents(run)
    command = ["run", runs / "a.toml", "--out", run]
    assert_refused(invoke(*command, "--resume"), "latest.safetensors is missing")
    assert_refused(invoke(*command), "already holds a run")
    assert contents(run) == before


def test_an_edited_config_is_refused_and_a_missing_one_written_again(
    runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "killed", tmp_path / "run")
    config = run / "config.toml"
    original = config.read_text()
    config.write_text(original.replace("noise = 0.3", "noise = 0.4"))
    before = contents(run)
    for experiment in (runs / "a.toml", config):
        outcome = invoke("run", experiment, "--out", run, "--resume")
        assert_refused(outcome, str(run), "task.noise", "0.3", "0.4")
    assert_refused(invoke("report", run, "--out", tmp_path / "page.html"), str(config))
    assert contents(run) == before
    config.unlink()
    invoke_ok("run", runs / "a.toml", "--out", run, "--resume")
    assert config.read_text() == original


def test_what_a_checkpoint_refers_to_is_on_the_disk_before_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves what was synced, and no name is given to a file that was not."""
    synced: dict[int, int] = {}  # by the number of a file: its length when it was synced
    replaced: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    def assert_synced(*files: Path) -> None:
        for file in files:
            assert synced.get(file.stat().st_ino) == file.stat().st_size, file

    def note_replace(source: Path, target: Path) -> None:
        assert_synced(source)
        if target.name == "latest.safetensors":
            assert_synced(run / "metrics.jsonl", *run.glob("checkpoint/memories-*"))
        replace(source, target)
        replaced.append(target.name)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    run = tmp_path / "run"
    invoke_ok("run", runs / "a.toml", "--out", run)
    assert set(replaced) == {"config.toml", "latest.safetensors", "summary.json"}
    assert list(run.glob("checkpoint/memories-*"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_flipped_byte_is_not_reported(runs: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(runs / "finished", tmp_path / "run")
    content = (run / name).read_text()
    (run / name).write_text(content.replace("1", "2", 1))
    outcome = invoke("report", run, "--out", tmp_path / "page.html")
    assert_refused(outcome, f"{run / name} is damaged")
    assert not (tmp_path / "page.html").exists()


def test_other_versions_are_named(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(runs / "killed", tmp_path / "run")
    monkeypatch.setattr(fb, "__version__", "7.1")
    with caplog.at_level("WARNING", logger="fedbilevel"):
        assert invoke("run", runs / "a.toml", "--out", run, "--resume").code == 0
    (message,) = caplog.messages
    assert "fedbilevel 0.1.0, now 7.1" in message
    assert "torch" not in message
