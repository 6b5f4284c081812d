"""The loop of a run: budgets, evaluations, divergence and interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.linear import UnsolvedError
from fedbilevel.core.tree import flatten
from fedbilevel.runs.run import Run
from tests.support.cases import CASES


@pytest.fixture(scope="module")
def task() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4, samples=3, noise=0.3)


def six_rounds(task: fb.tasks.Task) -> Run:
    """A run of SimFBO that draws cohorts and batches."""
    environment = fb.Environment(participation=2, batch_size=2)
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    return Run(fb.algorithms.SimFBO(), fed, {"rounds": 6})


def test_evaluates_before_round_0_then_at_each_multiple_of_every_and_at_the_end(
    task: fb.tasks.Task,
) -> None:
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=7, every=3)
    assert [metrics["round"] for metrics in result.history] == [0, 3, 6, 7]
    assert [metrics["iteration"] for metrics in result.history] == [0, 3, 6, 7]
    assert result.status == "completed"
    costs = {"bytes_up", "bytes_down", "samples", "gradients", "flops", "peak_bytes"}
    others = {"round", "iteration", "virtual_s", "wall_s", "upper_loss", "lower_loss"}
    assert costs | others <= result.history[0].keys()


def test_zero_rounds_return_the_start(task: fb.tasks.Task) -> None:
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=0)
    assert torch.equal(result.x["x"], task.problem.x["x"])
    assert len(result.history) == 1


def test_evaluate_and_recorded_numbers_are_in_the_metrics(task: fb.tasks.Task) -> None:
    def evaluate(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        return {"size": float(len(x))}

    result = fb.solve(task.problem, task.clients, "simfbo", rounds=2, evaluate=evaluate)
    assert result.history[-1]["size"] == 1.0
    assert result.history[-1]["projection_active"] == 0.0


def test_a_run_that_is_not_finite_has_diverged_and_keeps_its_last_good_state(
    task: fb.tasks.Task,
) -> None:
    wild = fb.algorithms.SimFBO(server_lr_y=1e150, server_lr_x=1e150)
    result = fb.solve(task.problem, task.clients, wild, rounds=50)
    assert result.status == "diverged"
    assert "round" in result.reason
    assert torch.isfinite(result.x["x"]).all()


def test_a_run_far_above_its_first_upper_loss_has_diverged(task: fb.tasks.Task) -> None:
    wild = fb.algorithms.SimFBO(server_lr_x=50.0)
    result = fb.solve(task.problem, task.clients, wild, rounds=50, every=1)
    assert result.status == "diverged"
    assert "upper_loss" in result.reason
    assert "times its start" in result.reason


@pytest.mark.parametrize("name", ["adbo", "afbo", "aggitd", "fednest", "rabo", "simfbo", "unifbo"])
@pytest.mark.parametrize("lr", [1e30, 1e200])
def test_a_step_so_long_that_it_cannot_be_evaluated_is_a_divergence(
    name: str, lr: float, task: fb.tasks.Task
) -> None:
    """The task evaluates a hypergradient, for which the lower level must be solved."""
    method = fb.algorithms.get(name)
    step = "server_lr_x" if hasattr(method, "server_lr_x") else "lr_x"
    wild = method(**{**CASES[name].settings, step: lr})
    result = fb.solve(task.problem, task.clients, wild, rounds=4, evaluate=task.evaluate)
    assert result.status == "diverged"
    assert result.reason.startswith("round ")
    assert flatten(result.x).abs().max() < 1e6  # of the last evaluation before
    assert "hypergradient_norm" in result.history[0]


def test_clients_that_cannot_be_evaluated_are_a_divergence(task: fb.tasks.Task) -> None:
    points = []

    def evaluate_client(x: fb.Tree, y: fb.Tree, client: int) -> dict[str, float]:
        points.append(x)
        if len(points) > 2 * len(task.clients):
            raise UnsolvedError("not solved")
        return {"norm": float(flatten(x).norm())}

    result = fb.solve(
        task.problem, task.clients, "simfbo", rounds=4, evaluate_client=evaluate_client
    )
    assert (result.status, result.reason) == ("diverged", "round 2: not solved")
    assert torch.equal(flatten(result.x), flatten(points[-2]))  # of the evaluation before
    assert not torch.equal(flatten(result.x), flatten(points[-1]))


def test_a_start_that_cannot_be_evaluated_is_an_error(task: fb.tasks.Task) -> None:
    def evaluate(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        raise UnsolvedError("not solved")

    with pytest.raises(UnsolvedError, match="not solved"):
        fb.solve(task.problem, task.clients, "simfbo", rounds=2, evaluate=evaluate)


def test_a_run_that_diverges_while_it_is_stopped_has_diverged(task: fb.tasks.Task) -> None:
    fed = fb.simulated_federation(task.problem, task.clients)
    run = Run(fb.algorithms.SimFBO(server_lr_y=1e150, server_lr_x=1e150), fed, {"rounds": 50})

    def stop_once_diverged() -> None:
        if run.status == "diverged":
            run.stop()

    run.after_iteration = stop_once_diverged
    list(run)
    assert run.status == "diverged"


def test_an_interrupted_iteration_is_undone(task: fb.tasks.Task) -> None:
    whole = six_rounds(task)
    list(whole)
    interrupted = six_rounds(task)
    calls = 0
    ask = interrupted.fed.ask

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        reply = ask(*args, **kwargs)
        if calls == 4:
            raise KeyboardInterrupt
        return reply

    interrupted.fed.ask = interrupt  # type: ignore[method-assign]
    list(interrupted)
    assert interrupted.status == "interrupted"
    assert interrupted.reason == "interrupted in round 4; x and y are those after round 3"
    assert interrupted.fed.ledger.rounds == 3
    interrupted.status = "completed"
    list(interrupted)
    assert torch.equal(interrupted.state.x["x"], whole.state.x["x"])
    assert interrupted.fed.ledger.phases == whole.fed.ledger.phases


def test_an_iteration_that_is_interrupted_after_its_last_exchange_is_undone(
    task: fb.tasks.Task,
) -> None:
    """At that moment the new state is assigned and the iteration is counted: both are undone."""
    whole = six_rounds(task)
    list(whole)
    interrupted = six_rounds(task)
    check_pending = interrupted.fed.check_pending

    def interrupt() -> None:
        check_pending()
        if interrupted.fed.iteration == 4 and not interrupted.reason:
            raise KeyboardInterrupt

    interrupted.fed.check_pending = interrupt  # type: ignore[method-assign]
    list(interrupted)
    assert interrupted.status == "interrupted"
    assert interrupted.fed.iteration == 3
    assert interrupted.fed.ledger.rounds == 3
    interrupted.status = "completed"
    list(interrupted)
    assert torch.equal(interrupted.state.x["x"], whole.state.x["x"])


def test_an_iteration_that_is_interrupted_after_its_evaluation_is_undone(
    task: fb.tasks.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At that moment the evaluation is in the history, and its state is the last good one."""
    interrupted = six_rounds(task)
    measure = interrupted._measure

    def interrupt() -> None:
        measure()
        if interrupted.fed.iteration == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, "_measure", interrupt)
    list(interrupted)
    assert interrupted.status == "interrupted"
    assert [row["iteration"] for row in interrupted.history] == list(range(4))
    assert interrupted.good_state is interrupted.state


def test_an_iteration_that_is_interrupted_in_its_evaluation_is_undone(
    task: fb.tasks.Task,
) -> None:
    whole = six_rounds(task)
    list(whole)
    interrupted = six_rounds(task)

    def interrupt(x: fb.Tree, y: fb.Tree) -> dict[str, float]:
        if interrupted.fed.iteration == 4:
            raise KeyboardInterrupt
        return {}

    interrupted.evaluate = interrupt
    list(interrupted)
    assert interrupted.status == "interrupted"
    assert [metrics["round"] for metrics in interrupted.history] == [0, 1, 2, 3]
    interrupted.status = "completed"
    interrupted.evaluate = None
    list(interrupted)
    for actual, expected in zip(interrupted.history, whole.history, strict=True):
        assert {**actual, "wall_s": 0} == {**expected, "wall_s": 0}


def test_a_run_that_is_interrupted_in_its_checkpoint_ends_after_that_iteration(
    task: fb.tasks.Task,
) -> None:
    run = six_rounds(task)

    def interrupt() -> None:
        if run.fed.iteration == 4:
            raise KeyboardInterrupt

    run.after_iteration = interrupt
    list(run)
    assert run.status == "interrupted"
    assert run.reason == "interrupted after round 4"
    assert run.result.x is run.state.x


def test_an_interrupted_run_that_is_not_finite_returns_its_last_evaluation(
    task: fb.tasks.Task,
) -> None:
    fed = fb.simulated_federation(task.problem, task.clients)
    wild = fb.algorithms.SimFBO(server_lr_y=1e150, server_lr_x=1e150)
    run = Run(wild, fed, {"rounds": 50}, every={"rounds": 40})

    def stop_once_not_finite() -> None:
        if not torch.isfinite(run.state.x["x"]).all():
            run.stop()

    run.after_iteration = stop_once_not_finite
    list(run)
    assert torch.equal(run.result.x["x"], task.problem.x["x"])
    assert run.reason == (
        f"interrupted after round {fed.ledger.rounds}; "
        "x and y are those after round 0, because the last ones are not finite"
    )


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.float32(0.5), np.float64(0.5), 0.5])
def test_a_metric_may_be_a_scalar_of_torch_or_numpy(
    task: fb.tasks.Task, tmp_path: Path, value: Any
) -> None:
    out = tmp_path / "run"
    fb.solve(
        task.problem, task.clients, "simfbo", rounds=1, evaluate=lambda x, y: {"a": value}, out=out
    )
    assert [metrics["a"] for metrics in fb.load_run(out).history] == [0.5, 0.5]


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(2), "0.5", None, 1j, torch.tensor(1j)])
def test_a_metric_that_is_not_a_number_is_named(task: fb.tasks.Task, value: Any) -> None:
    with pytest.raises(TypeError, match=r"^evaluate returned a = .*; a metric must be a number$"):
        fb.solve(task.problem, task.clients, rounds=1, evaluate=lambda x, y: {"a": value})


def test_an_unknown_unit_of_cost_and_a_negative_amount_are_refused(task: fb.tasks.Task) -> None:
    fed = fb.simulated_federation(task.problem, task.clients)
    with pytest.raises(ValueError, match=r"unit is 'round' .*; it must be one of 'rounds'"):
        Run(fb.algorithms.SimFBO(), fed, {"round": 6})
    with pytest.raises(ValueError, match="bytes is -1; it must not be negative"):
        Run(fb.algorithms.SimFBO(), fed, {"rounds": 6}, every={"bytes": -1})
