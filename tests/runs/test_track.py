"""Trackers from `fb.solve`: TensorBoard, MLflow, and Weights & Biases offline, read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb


@pytest.fixture(scope="module")
def task() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4)


def solve(task: fb.tasks.Task, **options: Any) -> fb.Result:
    return fb.solve(
        task.problem, task.clients, "simfbo", rounds=3, evaluate=task.evaluate, **options
    )


def losses(result: fb.Result) -> list[tuple[int, float]]:
    return [(int(m["round"]), m["upper_loss"]) for m in result.history]


def test_tensorboard_gets_every_metric_with_and_without_a_folder(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    for out, folder in ((tmp_path / "run", "run/tensorboard"), (None, "runs")):
        result = solve(task, track="tensorboard", out=out)
        (file,) = (tmp_path / folder).rglob("events*")
        events = EventAccumulator(str(file.parent))
        events.Reload()
        assert set(events.Tags()["scalars"]) == set(result.history[-1])
        found = [(event.step, event.value) for event in events.Scalars("upper_loss")]
        assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(result)]


def test_mlflow_gets_every_metric_and_the_settings(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = solve(task, track=["mlflow"])
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fedbilevel").experiment_id])
    assert (run.info.run_name, run.info.status) == ("simfbo", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "upper_loss")
    assert [(entry.step, entry.value) for entry in history] == losses(result)
    assert set(run.data.metrics) == set(result.history[-1])
    (config,) = (tmp_path / "store").rglob("config.json")
    assert json.loads(config.read_text())["algorithm"]["name"] == "simfbo"


def test_a_run_that_fails_has_failed_for_its_tracker(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(fb.callbacks.Callback):
        def on_iteration(self, run: fb.Run) -> None:
            raise RuntimeError("no more")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with pytest.raises(RuntimeError, match="no more"):
        solve(task, track="mlflow", callbacks=[Fails()])
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fedbilevel").experiment_id])
    assert run.info.status == "FAILED"


def logged_records(content: bytes) -> Iterator[bytes]:
    """The records of a file that W&B writes offline: a LevelDB log with a header of 7 bytes."""
    position = 7
    record = b""
    while position < len(content):
        left = 32768 - position % 32768  # in this block; a record's header has 7 bytes
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_offline_gets_every_metric_and_the_settings(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    result = solve(task, track="wandb", out=tmp_path / "run")
    (file,) = tmp_path.rglob("*.wandb")
    assert tmp_path / "run" in file.parents
    found = []
    settings = {}
    exit_code = None
    for data in logged_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            row = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            found.append(row)
        if record.HasField("run"):
            settings = {item.key: item.value_json for item in record.run.config.update}
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    assert [(row["round"], row["upper_loss"]) for row in found] == losses(result)
    assert set(result.history[-1]) <= set(found[-1])
    assert json.loads(settings["algorithm"])["name"] == "simfbo"
    assert exit_code == 0


def test_an_unknown_tracker_is_refused(task: fb.tasks.Task) -> None:
    with pytest.raises(ValueError, match="track is 'visdom'; it must be one of"):
        solve(task, track="visdom")
