"""Simulated federations: what is noticed about losses and data before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.federation import ClientError


@pytest.fixture(scope="module")
def task() -> fb.tasks.Task:
    return fb.tasks.load("quadratic", clients=4, samples=3)


class Files(Sequence[fb.ClientData]):
    """Clients that are loaded on access; the file of client 2 is broken."""

    def __init__(self, clients: Sequence[fb.ClientData], error: Exception) -> None:
        self.clients = clients
        self.error = error

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: Any) -> Any:
        if client == 2:
            raise self.error
        return self.clients[client]


def warnings_of(problem: fb.Problem, task: fb.tasks.Task, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged before round 0; also within `torch.no_grad`, which must not matter."""
    with torch.no_grad():
        fb.solve(problem, task.clients, rounds=0, environment=fb.Environment(batch_size=2))
    return caplog.text


def test_an_upper_loss_without_a_graph_is_warned_of(
    task: fb.tasks.Task, caplog: pytest.LogCaptureFixture
) -> None:
    upper = task.problem.upper

    def detached(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return upper(x, y, batch, ()).detach()

    warning = "the upper loss depends on neither x nor y"
    assert warning in warnings_of(replace(task.problem, upper=detached), task, caplog)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("detached", ["y", "all"])
def test_a_lower_loss_without_a_graph_to_y_is_warned_of(
    task: fb.tasks.Task, caplog: pytest.LogCaptureFixture, detached: str
) -> None:
    lower = task.problem.lower

    def lower_loss(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        if detached == "all":
            return lower(x, y, batch, ()).detach()
        return lower(x, y.map(Tensor.detach), batch, ())

    warning = "the lower loss does not depend on y, which stays where it starts"
    assert warning in warnings_of(replace(task.problem, lower=lower_loss), task, caplog)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("level", ["x", "y"])
def test_an_upper_loss_of_one_of_x_and_y_is_not_warned_of(
    task: fb.tasks.Task, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    def upper(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return ({"x": x, "y": y}[level][level] ** 2).sum()

    assert not warnings_of(replace(task.problem, upper=upper), task, caplog)


def test_hyper_cleaning_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    task = fb.tasks.load("hyper-cleaning", data="digits", clients=2, samples=32)
    assert not warnings_of(task.problem, task, caplog)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("torn"), ClientError), (ValueError("torn"), ValueError)]
)
def test_the_broken_file_of_a_client_names_the_client(
    task: fb.tasks.Task,
    weights: str,
    mode: Literal["stack", "loop"],
    error: Exception,
    kind: type[Exception],
) -> None:
    clients = Files(task.clients, error)

    def solve() -> None:
        fed = fb.simulated_federation(task.problem, clients, weights=weights, mode=mode)
        fb.solve(task.problem, clients, rounds=1, federation=fed)

    with pytest.raises(kind, match=r"^client 2, before round 1: .*torn$"):
        solve()
