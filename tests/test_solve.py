"""`solve`: budgets, evaluation, divergence, interruption, and bad input at the earliest moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.federation import ClientError
from fedbilevel.runs.run import Run


@pytest.fixture(scope="module")
def task() -> Any:
    return fb.tasks.load("quadratic", clients=4, samples=3, noise=0.3)


def test_evaluates_before_round_0_then_at_each_multiple_of_every_and_at_the_end(task: Any) -> None:
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=7, every=3)
    assert [metrics["round"] for metrics in result.history] == [0, 3, 6, 7]
    assert [metrics["iteration"] for metrics in result.history] == [0, 3, 6, 7]
    assert result.status == "completed"
    keys = {
        "round",
        "iteration",
        "bytes_up",
        "bytes_down",
        "samples",
        "gradients",
        "flops",
        "peak_bytes",
    }
    assert keys | {"virtual_s", "wall_s", "upper_loss", "lower_loss"} <= result.history[0].keys()


def test_zero_rounds_return_the_start(task: Any) -> None:
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=0)
    assert torch.equal(result.x["x"], task.problem.x["x"])
    assert len(result.history) == 1


def test_losses_are_the_weighted_means_over_the_clients(task: Any) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    history = fb.solve(task.problem, task.clients, "simfbo", rounds=1, weights=weights).history
    x, y = task.problem.start
    expected = sum(
        w / 10 * task.problem.upper(x, y, c.val, ())
        for w, c in zip(weights, task.clients, strict=True)
    )
    assert history[0]["upper_loss"] == pytest.approx(float(expected))


def test_evaluate_and_recorded_numbers_are_in_the_metrics(task: Any) -> None:
    result = fb.solve(
        task.problem,
        task.clients,
        "simfbo",
        rounds=2,
        evaluate=lambda x, y: {"size": float(len(x))},
    )
    assert result.history[-1]["size"] == 1.0
    assert result.history[-1]["projection_active"] == 0.0


def test_the_callers_tensors_are_left_alone(task: Any) -> None:
    x = {"x": torch.ones(5, dtype=torch.float64)}
    problem = fb.Problem(upper=task.problem.upper, lower=task.problem.lower, x=x, y=task.problem.y)
    fb.solve(problem, task.clients, "simfbo", rounds=2)
    assert torch.equal(x["x"], torch.ones(5, dtype=torch.float64))
    assert torch.equal(problem.x["x"], x["x"])


def test_divergence_is_named_and_the_last_good_state_kept(task: Any) -> None:
    wild = fb.algorithms.SimFBO(server_lr_y=1e150, server_lr_x=1e150)
    result = fb.solve(task.problem, task.clients, wild, rounds=50)
    assert result.status == "diverged"
    assert "round" in result.reason
    assert torch.isfinite(result.x["x"]).all()
    far = fb.solve(
        task.problem, task.clients, fb.algorithms.SimFBO(server_lr_x=50.0), rounds=50, every=1
    )
    assert far.status == "diverged"
    assert "upper_loss" in far.reason
    assert "times its start" in far.reason


def test_an_interrupted_iteration_leaves_no_trace(task: Any) -> None:
    algorithm = fb.algorithms.SimFBO()
    environment = fb.Environment(participation=2, batch_size=2)

    def run() -> Run:
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(algorithm, fed, {"rounds": 6})

    whole, stopped = run(), run()
    list(whole)
    calls, ask = 0, stopped.fed.ask

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        reply = ask(*args, **kwargs)
        if calls == 4:
            raise KeyboardInterrupt
        return reply

    stopped.fed.ask = interrupt  # type: ignore[method-assign]
    list(stopped)
    assert (stopped.status, stopped.reason) == ("interrupted", "interrupted in round 4")
    assert stopped.fed.ledger.rounds == 3
    stopped.status = "completed"
    list(stopped)
    assert torch.equal(stopped.state.x["x"], whole.state.x["x"])
    assert stopped.fed.ledger.phases == whole.fed.ledger.phases


def test_an_interrupt_after_the_last_exchange_leaves_no_trace_either(task: Any) -> None:
    """The state is assigned, the iteration is not counted: both go back."""
    environment = fb.Environment(participation=2, batch_size=2)

    def run() -> Run:
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        return Run(fb.algorithms.SimFBO(), fed, {"rounds": 6})

    whole, stopped = run(), run()
    list(whole)
    settle = stopped.fed.settle

    def interrupt() -> None:
        settle()
        if stopped.fed.iteration == 4 and not stopped.reason:
            raise KeyboardInterrupt

    stopped.fed.settle = interrupt  # type: ignore[method-assign]
    list(stopped)
    assert (stopped.status, stopped.fed.iteration, stopped.fed.ledger.rounds) == (
        "interrupted",
        3,
        3,
    )
    stopped.status = "completed"
    list(stopped)
    assert torch.equal(stopped.state.x["x"], whole.state.x["x"])


def classifier() -> fb.Problem:
    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (
            F.cross_entropy(torch.tanh(batch[0] @ x["w"]) @ y["v"], batch[1])
            + 0.1 * (y["v"] ** 2).sum()
        )

    return fb.Problem(upper=loss, lower=loss, x={"w": torch.ones(2, 3)}, y={"v": torch.ones(3, 4)})


def clients(labels: int = 4, count: int = 3) -> list[fb.ClientData]:
    made = []
    for i in range(count):
        side = (
            torch.linspace(-1, 1, 12).reshape(6, 2),
            torch.arange(6) % (labels if i == 1 else 4),
        )
        made.append(fb.ClientData(train=side, val=side))
    return made


def test_labels_out_of_range_name_the_client_before_round_1() -> None:
    with pytest.raises(
        ClientError, match=r"^client 1, before round 1: IndexError: Target 4 is out of bounds"
    ):
        fb.solve(classifier(), clients(labels=6), "simfbo", rounds=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"algorithm": "simbfo"},
            r"algorithm is 'simbfo'; it must be one of .*; did you mean 'simfbo'\?",
        ),
        ({"rounds": -1}, "rounds is -1; it must be at least 0"),
        ({"rounds": 1.5}, "rounds is 1.5; it must be a whole number"),
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"seed": -3}, "seed is -3; it must be at least 0"),
        (
            {"weights": "sample"},
            "weights is 'sample'; it must be one of 'uniform', 'samples'; did you mean 'samples'",
        ),
        ({"weights": [1.0]}, "weights has 1 entries; there are 3 clients"),
        ({"clients": []}, "clients is empty"),
    ],
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    given = {"clients": clients(), "algorithm": "simfbo", "rounds": 1} | arguments
    with pytest.raises((ValueError, TypeError), match=message) as error:
        fb.solve(classifier(), **given)
    assert "\n" not in str(error.value)


def test_a_constraint_on_x_holds_for_the_server_and_the_clients(task: Any) -> None:
    from dataclasses import replace

    seen: list[bool] = []

    def lower(x: fb.Tree, y: fb.Tree, batch: Any, rng: Any) -> Tensor:
        value = x["x"]
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        seen.append(bool((value >= 0.2).all()))
        return task.problem.lower(x, y, batch, rng)

    problem = replace(
        task.problem,
        lower=lower,
        x={"x": torch.ones(5, dtype=torch.float64)},
        project_x=lambda x: x.map(lambda t: t.clamp(min=0.2)),
    )
    result = fb.solve(
        problem, task.clients, "simfbo", rounds=40, environment=fb.Environment(local_steps=3)
    )
    assert all(seen)
    assert float(result.x["x"].min()) == pytest.approx(0.2)
    assert float(result.x["x"].max()) > 0.2


def test_dropout_draws_by_key_and_runs_repeat() -> None:
    net = torch.nn.Sequential()
    net.add_module(
        "backbone",
        torch.nn.Sequential(torch.nn.Linear(2, 8), fb.nets.Dropout(0.5), torch.nn.ReLU()),
    )
    net.add_module("head", torch.nn.Linear(8, 4))
    apply, x, y = fb.split_module(net, lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        with fb.nets.randomness(rng):
            return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    problem = fb.Problem(upper=loss, lower=loss, x=x, y=y)
    runs = []
    for mode, seed in (("stack", 0), ("loop", 0), ("stack", 1)):
        fed = fb.simulated_federation(problem, clients(), mode=mode, seed=seed)
        runs.append(Run(fb.algorithms.LAASFBO(), fed, {"rounds": 3}))
        list(runs[-1])
    first, loop, other = (run.state.x["backbone.0.weight"] for run in runs)
    torch.testing.assert_close(first, loop)
    assert not torch.allclose(first, other)


def test_a_run_from_python_leaves_a_folder_and_goes_on(task: Any, tmp_path: Any) -> None:
    options = {"environment": fb.Environment(participation=2, batch_size=2), "seed": 3}
    whole = fb.solve(task.problem, task.clients, "la-asfbo", rounds=9, **options)
    fb.solve(task.problem, task.clients, "la-asfbo", rounds=4, out=tmp_path / "run", **options)
    with pytest.raises(FileExistsError, match="holds a run already"):
        fb.solve(task.problem, task.clients, "la-asfbo", rounds=9, out=tmp_path / "run", **options)
    resumed = fb.solve(
        task.problem,
        task.clients,
        "la-asfbo",
        rounds=9,
        out=tmp_path / "run",
        resume=True,
        **options,
    )
    assert torch.equal(resumed.x["x"], whole.x["x"])
    loaded = fb.load_run(tmp_path / "run")
    assert torch.equal(loaded.y["y"], whole.y["y"])
    assert [m["upper_loss"] for m in loaded.history] == [m["upper_loss"] for m in whole.history]
    other = fb.algorithms.LAASFBO(lr_x=0.5)
    with pytest.raises(ValueError, match=r"was run with algorithm.lr_x = 0.01, not 0.5"):
        fb.solve(
            task.problem,
            task.clients,
            other,
            rounds=9,
            out=tmp_path / "run",
            resume=True,
            **options,
        )


def test_a_federation_of_ones_own_is_used_and_nothing_else(task: Any) -> None:
    environment = fb.Environment(participation=2)
    fed = fb.simulated_federation(task.problem, task.clients, environment, seed=3)
    result = fb.solve(task.problem, task.clients, "asfbo", rounds=3, federation=fed)
    assert result.history[-1]["round"] == fed.ledger.rounds == 3
    alone = fb.solve(task.problem, task.clients, "asfbo", rounds=3, environment=environment, seed=3)
    assert torch.equal(result.x["x"], alone.x["x"])
    sentence = "^federation is given and so is environment; a federation has its own$"
    with pytest.raises(ValueError, match=sentence):
        fb.solve(task.problem, task.clients, rounds=3, federation=fed, environment=environment)
    with pytest.raises(ValueError, match="resume is True but out is not given"):
        fb.solve(task.problem, task.clients, "simfbo", rounds=3, resume=True)
