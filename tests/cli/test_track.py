"""Trackers: TensorBoard and MLflow get every metric; a missing package is named."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.tool import assert_refused, invoke, invoke_ok, read_metrics, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.toml")


def test_tensorboard_gets_every_metric(file: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert invoke("run", file, "--out", tmp_path / "run", "--tensorboard", "--quiet") == (0, "", "")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = read_metrics(tmp_path / "run")
    assert {*lines[0], *lines[1], "wall_s"} == set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("upper_loss")]
    assert found == [(line["round"], pytest.approx(line["upper_loss"], rel=1e-6)) for line in lines]


def test_mlflow_gets_every_metric(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert invoke("run", file, "--out", tmp_path / "run", "--mlflow", "--quiet") == (0, "", "")
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("fedbilevel")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    lines = read_metrics(tmp_path / "run")
    history = client.get_metric_history(run.info.run_id, "upper_loss")
    assert [(m.step, m.value) for m in history] == [
        (line["round"], line["upper_loss"]) for line in lines
    ]
    assert {*lines[0], *lines[1], "wall_s"} == set(run.data.metrics)
    (config,) = (tmp_path / "store").rglob("config.json")
    assert json.loads(config.read_text())["algorithm"]["name"] == "simfbo"


@pytest.mark.parametrize(
    ("flag", "package"), [("--tensorboard", "torch.utils.tensorboard"), ("--mlflow", "mlflow")]
)
def test_a_missing_package_is_named_and_nothing_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    outcome = invoke("run", file, "--out", tmp_path / "run", flag)
    assert_refused(outcome, package, "pip install 'fedbilevel[track]'")
    assert list(tmp_path.iterdir()) == [file]


def test_a_store_that_cannot_be_reached_is_named_and_nothing_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    assert_refused(invoke("run", file, "--out", tmp_path / "run", "--mlflow"), "nonsense")
    assert list(tmp_path.iterdir()) == [file]


def test_without_an_account_of_weights_and_biases_it_is_named_and_the_run_can_go_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login`.\nMore.")

    monkeypatch.setattr(wandb, "init", refuse)
    command = ["run", file, "--out", tmp_path / "run"]
    outcome = invoke(*command, "--wandb")
    assert_refused(outcome, "Weights & Biases", "No API key configured", "WANDB_MODE=offline")
    invoke_ok(*command, "--resume")
