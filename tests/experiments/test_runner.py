"""The run that a config describes: its target accuracy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel import report
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare_run
from fedbilevel.runs.recorder import Recorder
from fedbilevel.tasks.classification import ClassificationData


def counting_task(correct: int = 9_000) -> fb.tasks.Task:
    """Return a task of 10,000 test samples; from round 2 on, `correct` of them are correct."""
    labels = torch.zeros(10_000, dtype=torch.int64)
    data = ClassificationData(labels, labels, [], (labels, labels), classes=2)
    quadratic = fb.tasks.load("quadratic", clients=2)
    evaluations = 0

    def evaluate(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        nonlocal evaluations
        right = correct if evaluations >= 2 else 8_999
        evaluations += 1
        is_wrong = torch.arange(10_000) >= right

        def scores(x: fb.Tree, y: fb.Tree, inputs: Tensor) -> Tensor:
            return torch.stack([~is_wrong, is_wrong], dim=-1).long()[: len(inputs)]

        return data.accuracies(scores, x, y)

    return fb.tasks.Task(quadratic.problem, quadratic.clients, evaluate)


@pytest.mark.parametrize(("correct", "stops_at"), [(9_000, 2), (8_999, 5)])
def test_9000_of_10000_reach_a_target_of_90_percent(
    correct: int, stops_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbilevel.tasks.classification.PREDICTION_BATCH", 10_000)
    task = f"{__name__}:counting_task"
    config = configs.resolve(
        *configs.read("digits"),
        settings=[f"task={task}", f"task.correct={correct}", "stop.test_accuracy=0.9"],
        overrides={"rounds": 5, "environment.participation": 2},
    )
    recorder = Recorder(prepare_run(config), tmp_path / "run", config.table)
    rounds = [metrics["round"] for metrics in recorder]
    assert rounds == [*range(stops_at + 1)]
    reached = stops_at if correct == 9_000 else None
    assert recorder.summary()["rounds_to"]["0.9"] == reached
    (row,) = report.ranked([tmp_path])
    cost = row.cost["round"][0.9]
    assert (cost.mean if cost else None) == reached
