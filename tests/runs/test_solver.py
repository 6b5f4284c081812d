"""`fb.solve`: arguments, wrong input, constraints, randomness, runs recorded from Python."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.federation import ClientError
from fedbilevel.runs.run import Run
from fedbilevel.runs.solver import Interrupted


@pytest.fixture(scope="module")
def task() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4, samples=3, noise=0.3)


def classifier() -> fb.Problem:
    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.tanh(batch[0] @ x["w"]) @ y["v"]
        return F.cross_entropy(logits, batch[1]) + 0.1 * (y["v"] ** 2).sum()

    return fb.Problem(upper=loss, lower=loss, x={"w": torch.ones(2, 3)}, y={"v": torch.ones(3, 4)})


def clients(labels_of_client_1: int = 4) -> list[fb.ClientData]:
    """Data of three clients with four labels; another number of labels for the second client."""
    inputs = torch.linspace(-1, 1, 12).reshape(6, 2)
    data = []
    for labels in (4, labels_of_client_1, 4):
        side = (inputs, torch.arange(6) % labels)
        data.append(fb.ClientData(train=side, val=side))
    return data


def test_losses_are_the_weighted_means_over_the_clients(task: fb.tasks.Task) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    history = fb.solve(task.problem, task.clients, "simfbo", rounds=1, weights=weights).history
    x, y = task.problem.start
    upper = 0.0
    for weight, client in zip(weights, task.clients, strict=True):
        upper += weight / 10 * float(task.problem.upper(x, y, client.val, ()))
    assert history[0]["upper_loss"] == pytest.approx(upper)


def test_the_callers_tensors_are_left_alone(task: fb.tasks.Task) -> None:
    x = {"x": torch.ones(5, dtype=torch.float64)}
    problem = fb.Problem(upper=task.problem.upper, lower=task.problem.lower, x=x, y=task.problem.y)
    fb.solve(problem, task.clients, "simfbo", rounds=2)
    assert torch.equal(x["x"], torch.ones(5, dtype=torch.float64))
    assert torch.equal(problem.x["x"], x["x"])


def test_labels_out_of_range_name_the_client_before_round_1() -> None:
    message = r"^client 1, before round 1: IndexError: Target 4 is out of bounds"
    with pytest.raises(ClientError, match=message):
        fb.solve(classifier(), clients(labels_of_client_1=6), "simfbo", rounds=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"algorithm": "simbfo"},
            r"algorithm is 'simbfo' \(did you mean 'simfbo'\?\); it must be one of ",
        ),
        ({"rounds": -1}, "rounds is -1; it must be at least 0"),
        ({"rounds": 1.5}, "rounds is 1.5; it must be a whole number"),
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"seed": -3}, "seed is -3; it must be at least 0"),
        (
            {"weights": "sample"},
            r"weights is 'sample' \(did you mean 'samples'\?\); it must be one of 'uniform', 'sam",
        ),
        ({"weights": [1.0]}, "weights has 1 entries; there are 3 clients"),
        ({"clients": []}, "clients is empty"),
        (
            {"clients": clients()[0]},
            "clients is ClientData; it must be a sequence with a ClientDat",
        ),
        ({"clients": [(1, 2)]}, r"clients\[0\] is tuple; it must be an object of ClientData"),
        ({"problem": clients()}, "problem is list; it must be an object of Problem"),
        (
            {"algorithm": fb.algorithms.SimFBO},
            "algorithm is the class SimFBO; it must be an object of Algorithm",
        ),
        ({"environment": {"local_steps": 2}}, "environment is dict; it must be an object of Envi"),
        ({"metric": "mae"}, "metric is str; it must be an object of Metric"),
        ({"evaluate": 0.3}, "evaluate is 0.3; it must be a function"),
        ({"evaluate": lambda x, y: "good"}, "evaluate returned 'good'; it must return a dict"),
        (
            {"callbacks": fb.callbacks.EarlyStopping(patience=1)},
            "callbacks is EarlyStopping; it must be a list of them",
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    usual = {"problem": classifier(), "clients": clients(), "algorithm": "simfbo", "rounds": 1}
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fb.solve(**{**usual, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_constraint_on_x_holds_for_the_server_and_the_clients(task: fb.tasks.Task) -> None:
    feasible: list[bool] = []

    def lower(x: fb.Tree, y: fb.Tree, batch: Any, rng: Any) -> Tensor:
        value = x["x"]
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        feasible.append(bool((value >= 0.2).all()))
        return task.problem.lower(x, y, batch, rng)

    problem = replace(
        task.problem,
        lower=lower,
        x={"x": torch.ones(5, dtype=torch.float64)},
        project_x=lambda x: x.map(lambda tensor: tensor.clamp(min=0.2)),
    )
    environment = fb.Environment(local_steps=3)
    result = fb.solve(problem, task.clients, "simfbo", rounds=40, environment=environment)
    assert feasible
    assert all(feasible)
    assert float(result.x["x"].min()) == pytest.approx(0.2)
    assert float(result.x["x"].max()) > 0.2


def test_dropout_draws_depend_on_the_seed_and_not_on_the_mode() -> None:
    backbone = torch.nn.Sequential(torch.nn.Linear(2, 8), fb.nets.Dropout(0.5), torch.nn.ReLU())
    net = torch.nn.Sequential()
    net.add_module("backbone", backbone)
    net.add_module("head", torch.nn.Linear(8, 4))
    apply, x, y = fb.split_module(net, lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        with fb.nets.randomness(rng):
            return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    problem = fb.Problem(upper=loss, lower=loss, x=x, y=y)
    weights = []
    for mode, seed in (("stack", 0), ("loop", 0), ("stack", 1)):
        fed = fb.simulated_federation(problem, clients(), mode=mode, seed=seed)
        run = Run(fb.algorithms.LAASFBO(), fed, {"rounds": 3})
        list(run)
        weights.append(run.state.x["backbone.0.weight"])
    stack, loop, other_seed = weights
    torch.testing.assert_close(stack, loop)
    assert not torch.allclose(stack, other_seed)


def test_a_run_from_python_is_recorded_and_resumed(task: fb.tasks.Task, tmp_path: Path) -> None:
    environment = fb.Environment(participation=2, batch_size=2)

    def solve(algorithm: str | fb.algorithms.Algorithm, rounds: int, **options: Any) -> fb.Result:
        return fb.solve(
            task.problem,
            task.clients,
            algorithm,
            rounds=rounds,
            environment=environment,
            seed=3,
            **options,
        )

    whole = solve("la-asfbo", 9)
    solve("la-asfbo", 4, out=tmp_path / "run")
    with pytest.raises(FileExistsError, match="already holds a run"):
        solve("la-asfbo", 9, out=tmp_path / "run")
    resumed = solve("la-asfbo", 9, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x["x"], whole.x["x"])
    loaded = fb.load_run(tmp_path / "run")
    assert torch.equal(loaded.y["y"], whole.y["y"])
    assert [m["upper_loss"] for m in loaded.history] == [m["upper_loss"] for m in whole.history]
    other = fb.algorithms.LAASFBO(lr_x=0.5)
    with pytest.raises(ValueError, match=r"was run with algorithm.lr_x = 0.01, not 0.5"):
        solve(other, 9, out=tmp_path / "run", resume=True)


def test_a_federation_is_used_instead_of_a_simulated_one(task: fb.tasks.Task) -> None:
    environment = fb.Environment(participation=2)
    fed = fb.simulated_federation(task.problem, task.clients, environment, seed=3)
    result = fb.solve(task.problem, task.clients, "asfbo", rounds=3, federation=fed)
    assert result.history[-1]["round"] == fed.ledger.rounds == 3
    other = fb.solve(task.problem, task.clients, "asfbo", rounds=3, environment=environment, seed=3)
    assert torch.equal(result.x["x"], other.x["x"])
    message = "^federation is given and so is environment; a federation has its own$"
    with pytest.raises(ValueError, match=message):
        fb.solve(task.problem, task.clients, rounds=3, federation=fed, environment=environment)


def test_resume_needs_a_folder(task: fb.tasks.Task) -> None:
    with pytest.raises(ValueError, match="resume is True but out is not given"):
        fb.solve(task.problem, task.clients, "simfbo", rounds=3, resume=True)


def test_ctrl_c_ends_a_loop_over_methods_and_keeps_the_last_finished_iteration(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Run.advance

    def press_ctrl_c(run: Run) -> None:
        if run.fed.iteration == 5:
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", press_ctrl_c)
    started = []

    def solve_with_both() -> None:
        for name in ("simfbo", "fedbio"):
            started.append(name)
            out = tmp_path / name
            fb.solve(task.problem, task.clients, name, rounds=1000, every=1000, out=out)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        solve_with_both()
    monkeypatch.undo()
    assert started == ["simfbo"]
    assert isinstance(interrupt.value, Interrupted)
    result = interrupt.value.result
    assert result.status == "interrupted"
    assert result.reason == "interrupted in round 6; x and y are those after round 5"
    assert str(interrupt.value) == result.reason
    expected = fb.solve(task.problem, task.clients, "simfbo", rounds=5)
    loaded = fb.load_run(tmp_path / "simfbo")
    assert (loaded.status, loaded.reason) == (result.status, result.reason)
    for actual in (result, loaded):
        assert torch.equal(actual.x["x"], expected.x["x"])
        assert torch.equal(actual.y["y"], expected.y["y"])


def test_a_killed_run_is_loaded_as_of_its_last_checkpoint(
    task: fb.tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Run) -> None:
        if run.fed.iteration == 25:
            raise MemoryError
        advance(run)

    advance = Run.advance
    monkeypatch.setattr(Run, "advance", fail)
    with pytest.raises(MemoryError):
        fb.solve(task.problem, task.clients, rounds=1000, every=1000, out=tmp_path / "run")
    monkeypatch.undo()
    expected = fb.solve(task.problem, task.clients, rounds=20)
    loaded = fb.load_run(tmp_path / "run")
    assert loaded.status == "unfinished"
    assert torch.equal(loaded.x["x"], expected.x["x"])
