"""Which steps are traced, and that a run with traced steps is the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.core.rng import normal, root
from fedbilevel.execution.stacked import _steps as steps
from fedbilevel.runs.run import Run

NEVER = 10**9  # uses before a step is traced
Advance = Callable[[int, Algorithm], Run]


def traces(run: Run) -> dict[str, Any]:
    traced: dict[str, Any] = run.fed.transport.executor.step_runner.traces  # type: ignore[attr-defined]
    return traced


@pytest.fixture
def run_rounds(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Six rounds on the digits in float64, with steps traced from some use on."""

    def run_rounds(trace_from: int, algorithm: Algorithm) -> Run:
        monkeypatch.setattr(steps, "TRACE_FROM", trace_from)
        task = fb.tasks.load("hyper-representation", data="digits", clients=6, hidden=8)
        embed = task.problem.embed
        assert embed is not None
        problem = fb.Problem(
            upper=task.problem.upper,
            lower=task.problem.lower,
            embed=lambda x, batch: embed(x, (batch[0].double(), batch[1]), ()),
            x={name: value.double() for name, value in task.problem.x.items()},
            y={name: value.double() for name, value in task.problem.y.items()},
        )
        environment = fb.Environment(participation=4, local_steps=(1, 3), batch_size=8)
        federation = fb.simulated_federation(problem, task.clients, environment)
        run = Run(algorithm, federation, {"rounds": 6})
        list(run)
        return run

    return run_rounds


def check_same(traced: Run, untraced: Run) -> None:
    assert traced.fed.ledger.phases == untraced.fed.ledger.phases
    for name, value in untraced.state.x.items():
        assert not torch.equal(value, untraced.fed.problem.x[name])
        torch.testing.assert_close(traced.state.x[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["simfbo", "la-asfbo"])
def test_a_run_with_traced_steps_is_the_same_run(run_rounds: Advance, name: str) -> None:
    algorithm = fb.algorithms.get(name)()
    untraced = run_rounds(NEVER, algorithm)
    traced = run_rounds(0, algorithm)
    assert not traces(untraced)
    assert traces(traced)
    check_same(traced, untraced)


@pytest.mark.parametrize("name", ["simfbo", "fedbio"])
def test_steps_under_a_schedule_are_traced_once(run_rounds: Advance, name: str) -> None:
    """A step size is an input of the trace: the trace of the first iteration serves the others."""
    method = fb.algorithms.get(name)
    cosine = fb.schedules.Cosine
    scheduled = method(lr_x=cosine(0.5, 0.01, 6), lr_y=cosine(0.02, 0.4, 6))
    constant = run_rounds(0, method())
    untraced = run_rounds(NEVER, scheduled)
    traced = run_rounds(0, scheduled)
    assert traces(traced).keys() == traces(constant).keys()
    assert all(traces(traced).values())
    check_same(traced, untraced)
    for key, value in traced.state.x.items():
        assert not torch.allclose(value, constant.state.x[key])


def test_steps_of_many_operations_are_never_traced(
    run_rounds: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "TRACE_BELOW", 0)
    assert not traces(run_rounds(0, fb.algorithms.SimFBO()))


def test_a_step_that_cannot_be_traced_runs_as_it_is_written(
    run_rounds: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("data-dependent")

    untraced = run_rounds(NEVER, fb.algorithms.SimFBO())
    monkeypatch.setattr(steps, "trace", refuse)
    refused = run_rounds(0, fb.algorithms.SimFBO())
    assert set(traces(refused).values()) == {None}
    assert refused.fed.ledger.phases == untraced.fed.ledger.phases
    for name, value in untraced.state.x.items():
        assert torch.equal(refused.state.x[name], value)


def test_sums_that_start_from_zero_are_part_of_the_first_step_but_values_of_a_message_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """z is 0 in the first iteration; a trace made with these zeros must not serve later."""
    monkeypatch.setattr(steps, "TRACE_FROM", 0)
    task = fb.tasks.load("quadratic", clients=3, samples=4, noise=0.5)
    environment = fb.Environment(local_steps=2, batch_size=2)
    runs = []
    for mode in ("stack", "loop"):
        federation = fb.simulated_federation(
            task.problem,
            task.clients,
            environment,
            mode=mode,  # type: ignore[arg-type]
        )
        run = Run(fb.algorithms.SimFBO(), federation, {})
        for _ in range(3):
            run.advance()
        runs.append(run)
    for stacked, reference in zip(*(run.state for run in runs), strict=True):
        torch.testing.assert_close(dict(stacked), dict(reference), rtol=0, atol=1e-12)
    inputs = []
    for traced in traces(runs[0]).values():
        graph = traced.run.__self__.graph
        inputs.append(sum(node.op == "placeholder" for node in graph.nodes))
    assert len(set(inputs)) == 2, "those of the first step, and those of later ones"
    assert max(inputs) == min(inputs) + 3, "x, y, z and their sums; the first is sent x, y, z"


def test_a_convolutional_network_with_variance_reduction_and_unequal_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first step all clients share x (stride 0), later they do not: that is two traces."""
    apply, x, y = fb.split_module(fb.nets.lenet(1, 28, 10).double(), lower="head.")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    side = (normal(root(0, "trace"), (6, 1, 28, 28), torch.float64), torch.arange(6))
    clients = [fb.ClientData(train=side, val=side)] * 3
    problem = fb.Problem(upper=loss, lower=loss, x=x, y=y)
    environment = fb.Environment(local_steps=[1, 3, 2], batch_size=4)
    states = []
    for trace_from in (0, NEVER):
        monkeypatch.setattr(steps, "TRACE_FROM", trace_from)
        federation = fb.simulated_federation(problem, clients, environment)
        run = Run(fb.algorithms.LAASFBO(), federation, {"rounds": 2})
        list(run)
        states.append(run.state.x)
    traced, untraced = states
    for name, value in untraced.items():
        torch.testing.assert_close(traced[name], value, rtol=0, atol=1e-12)
