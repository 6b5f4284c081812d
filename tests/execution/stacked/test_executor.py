"""Which tasks the stacked executor stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.execution.stacked import StackedExecutor, executor
from fedbilevel.federation.task import Task
from fedbilevel.runs.run import Run

# Operations of the second convolution of LeNet for one client: samples, pixels and channels of the
# result, and the products that each of these numbers is a sum of.
LARGEST_CONVOLUTION = 4 * (10 * 10) * 16 * (6 * 25) * 2


def convolutional_problem() -> tuple[fb.Problem, list[fb.ClientData]]:
    _, x, y = fb.split_module(fb.nets.lenet(1, 28, 10).double(), lower="head.")
    below, above = fb.nets.stem(fb.nets.lenet(1, 28, 10))

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(above({**x, **y}, below(x, batch[0])), batch[1])

    side = (normal(root(0, "trace"), (6, 1, 28, 28), torch.float64), torch.arange(6))
    clients = [fb.ClientData(train=side, val=side)] * 3
    return fb.Problem(upper=loss, lower=loss, x=x, y=y), clients


@pytest.fixture
def stack_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all stacks that run, in order."""
    sizes: list[int] = []
    run_stack = StackedExecutor._run_stack

    def recorded(self: Any, tasks: Any, *rest: Any) -> Any:
        sizes.append(len(tasks))
        return run_stack(self, tasks, *rest)

    monkeypatch.setattr(StackedExecutor, "_run_stack", recorded)
    return sizes


def test_large_convolutions_are_not_stacked_on_a_cpu(
    stack_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run keeps the choice, even if the limit has changed."""
    problem, clients = convolutional_problem()
    environment = fb.Environment(batch_size=4)

    def new_run() -> Run:
        federation = fb.simulated_federation(problem, clients, environment)
        return Run(fb.algorithms.SimFBO(), federation, {"rounds": 1})

    monkeypatch.setattr(executor, "STACK_BELOW", LARGEST_CONVOLUTION)
    stacked = new_run()
    stacked.advance()
    measurement, *sizes = stack_sizes
    assert measurement == 2
    assert sizes == [3]
    snapshot = stacked.fed.snapshot()

    monkeypatch.setattr(executor, "STACK_BELOW", LARGEST_CONVOLUTION - 1)
    stack_sizes.clear()
    one_by_one = new_run()
    one_by_one.advance()
    measurement, *sizes = stack_sizes
    assert measurement == 2
    assert sizes == [1, 1, 1]
    for name, value in one_by_one.state.x.items():
        torch.testing.assert_close(stacked.state.x[name], value, rtol=0, atol=1e-12)

    stack_sizes.clear()
    resumed = new_run()
    resumed.fed.restore(snapshot)
    resumed.advance()
    assert stack_sizes == [3]


def test_a_footprint_does_not_depend_on_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run measures in a cold process what the killed one had not measured yet."""
    task = fb.tasks.load("quadratic", clients=4, samples=4)
    environment = fb.Environment(batch_size=2, local_steps=3)

    def ran() -> StackedExecutor:
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        run = Run(fb.algorithms.LFedNest(), fed, {"rounds": 1})
        list(run)
        found = fed.transport.executor  # type: ignore[attr-defined]
        assert isinstance(found, StackedExecutor)
        return found

    measured: dict[str, list[Task]] = {}
    measure = StackedExecutor._footprint

    def recorded(self: StackedExecutor, kind: str, group: list[Task]) -> int:
        measured.setdefault(kind, group)
        return measure(self, kind, group)

    monkeypatch.setattr(StackedExecutor, "_footprint", recorded)
    warm = ran()
    assert len(measured) == 2
    for kind, group in measured.items():
        cold = StackedExecutor(task.problem, task.clients, environment.batch_size)
        cold._data = dict(enumerate(task.clients))
        assert measure(cold, kind, group) == warm.footprints[kind]
