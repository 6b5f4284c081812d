"""Callbacks: when they are called, early stopping, and the best state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedbilevel as fb
from fedbilevel.runs.metric import Metrics
from fedbilevel.runs.run import Run


@pytest.fixture(scope="module")
def task() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4)


class Record(fb.callbacks.Callback):
    """Writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, run: Run) -> None:
        self.calls.append("start")

    def on_iteration(self, run: Run) -> None:
        self.calls.append(f"iteration {run.fed.iteration}")

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        assert metrics is run.history[-1]
        self.calls.append(f"evaluation {metrics['round']}")

    def on_end(self, run: Run) -> None:
        self.calls.append("end")


def solve(task: fb.tasks.Task, *callbacks: fb.callbacks.Callback, **options: Any) -> fb.Result:
    return fb.solve(task.problem, task.clients, "simfbo", callbacks=callbacks, **options)


def test_a_callback_is_called_after_iterations_and_evaluations(task: fb.tasks.Task) -> None:
    record = Record()
    solve(task, record, rounds=3, every=2)
    assert record.calls == [
        "start",
        "evaluation 0",
        "iteration 1",
        "evaluation 2",
        "iteration 2",
        "evaluation 3",
        "iteration 3",
        "end",
    ]


def test_callbacks_do_not_change_what_is_computed(task: fb.tasks.Task) -> None:
    alone = solve(task, rounds=4)
    watched = solve(task, Record(), fb.callbacks.EarlyStopping(100), rounds=4)
    assert torch.equal(alone.x["x"], watched.x["x"])
    assert torch.equal(alone.y["y"], watched.y["y"])


def test_an_error_of_a_callback_ends_the_run_and_the_other_callbacks(task: fb.tasks.Task) -> None:
    class Fails(fb.callbacks.Callback):
        def on_evaluation(self, run: Run, metrics: Metrics) -> None:
            raise RuntimeError("no more")

    record = Record()
    with pytest.raises(RuntimeError, match="no more"):
        solve(task, record, Fails(), rounds=3)
    assert record.calls == ["start", "evaluation 0", "end"]


def test_ctrl_c_in_a_callback_interrupts_after_the_iteration(task: fb.tasks.Task) -> None:
    class Interrupts(fb.callbacks.Callback):
        def on_iteration(self, run: Run) -> None:
            if run.fed.iteration == 2:
                raise KeyboardInterrupt

    with pytest.raises(fb.Interrupted) as raised:
        solve(task, Interrupts(), rounds=9)
    assert raised.value.result.reason == "interrupted after round 2"


def test_a_callback_may_end_a_run_between_two_evaluations(task: fb.tasks.Task) -> None:
    class Ends(fb.callbacks.Callback):
        def on_iteration(self, run: Run) -> None:
            if run.fed.iteration == 3:
                run.finish("three are enough")

    result = solve(task, Ends(), rounds=100, every=50)
    assert (result.status, result.reason) == ("completed", "three are enough")
    assert [metrics["iteration"] for metrics in result.history] == [0, 3]


class Scripted:
    """An `evaluate` that returns given values."""

    def __init__(self, values: list[float]) -> None:
        self.values = iter(values)

    def __call__(self, x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        return {"score": next(self.values)}


@pytest.mark.parametrize(
    ("direction", "values", "rounds"),
    [
        ("maximize", [1, 2, 3, 3, 2, 9], 4),  # 3 again is no improvement
        ("minimize", [1, 2, 3, 4, 5], 2),
        ("minimize", [5, 4, float("nan"), 3, 3, 3, 0], 5),
        ("minimize", [5, 4, 3, 2], 3),
    ],
)
def test_early_stopping_waits_for_as_many_evaluations_as_its_patience(
    task: fb.tasks.Task, direction: str, values: list[float], rounds: int
) -> None:
    metric = fb.Metric("score", direction)  # type: ignore[arg-type]
    early = fb.callbacks.EarlyStopping(patience=2)
    result = solve(
        task, early, rounds=3 + (rounds > 3) * 9, evaluate=Scripted(values), metric=metric
    )
    assert result.history[-1]["round"] == rounds
    expected = "score has not improved in 2 evaluations" if rounds != 3 else ""
    assert result.reason == expected


def test_a_resumed_run_that_was_stopped_early_stays_ended(
    task: fb.tasks.Task, tmp_path: Path
) -> None:
    early = fb.callbacks.EarlyStopping(patience=2, least_change=1e9)
    first = solve(task, early, rounds=9, out=tmp_path)
    again = solve(task, early, rounds=9, out=tmp_path, resume=True)
    assert [metrics["round"] for metrics in first.history] == [0, 1, 2]
    assert again.history == first.history
    assert again.reason == first.reason == "upper_loss has not improved by 1e+09 in 2 evaluations"
    assert fb.load_run(tmp_path).reason == first.reason


def test_the_best_state_is_saved(task: fb.tasks.Task, tmp_path: Path) -> None:
    states = []

    class Keep(fb.callbacks.Callback):
        def on_evaluation(self, run: Run, metrics: Metrics) -> None:
            states.append(run.state.x["x"].clone())

    file = tmp_path / "folder" / "best.safetensors"
    best = fb.callbacks.SaveBest(file)
    metric = fb.Metric("score", "maximize")
    evaluate = Scripted([1, 5, 2, 5, float("nan")])
    solve(task, best, Keep(), rounds=4, evaluate=evaluate, metric=metric)
    assert torch.equal(load_file(file)["x"], states[1])
