"""Metrics of single clients, and their distribution."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbilevel as fb
from fedbilevel.core.tree import Tree
from fedbilevel.runs import clients
from fedbilevel.runs.clients import ClientMetrics, distribution
from tests.support.owners import client_owned


def test_distribution_is_that_of_numpy_and_knows_which_side_is_worse() -> None:
    values = [0.9, 0.1, 0.4, 0.8, 0.7]
    accuracy = distribution("accuracy", values)
    assert accuracy["mean"] == pytest.approx(np.mean(values))
    assert accuracy["worst"] == 0.1
    assert accuracy["p10"] == pytest.approx(np.quantile(values, 0.1))
    assert accuracy["spread"] == pytest.approx(np.std(values))
    loss = distribution("test_loss", values)
    assert loss["worst"] == 0.9
    assert loss["p10"] == pytest.approx(np.quantile(values, 0.9))
    assert loss["median"] == 0.7


def test_every_client_is_evaluated_at_its_own_point() -> None:
    task = client_owned("y")
    seen: dict[int, torch.Tensor] = {}

    def evaluate(x: Tree, y: Tree, client: int) -> dict[str, torch.Tensor]:
        seen[client] = y["y"]
        return {"norm": y["y"].norm()}

    options = {"evaluate_client": evaluate, "every": 20}
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=20, **options)
    for client in range(5):
        assert torch.equal(seen[client], result.personal(client)[1]["y"])
    norms = [float(y.norm()) for y in seen.values()]
    assert result.history[-1]["norm_worst"] == pytest.approx(min(norms))
    assert len(set(norms)) == 5


def test_of_many_clients_some_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 3)
    task = client_owned("y", clients=7)
    fed = fb.simulated_federation(task.problem, task.clients, seed=1)
    metrics = ClientMetrics(lambda x, y, client: {"number": client}, fed)
    first = metrics(*task.problem.start)
    assert metrics(*task.problem.start) == first
    assert len(set(metrics.clients)) == 3
    other = fb.simulated_federation(task.problem, task.clients, seed=2)
    assert ClientMetrics(lambda x, y, client: {}, other).clients != metrics.clients


def test_a_metric_must_be_a_number() -> None:
    task = client_owned("y")
    options = {"evaluate_client": lambda x, y, client: {"norm": y["y"]}}
    with pytest.raises(TypeError, match=r"evaluate_client returned norm = .*must be a number"):
        fb.solve(task.problem, task.clients, "simfbo", rounds=1, **options)


def test_personal_of_a_shared_problem_is_the_result() -> None:
    task = fb.tasks.load("quadratic", clients=3)
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=2)
    assert torch.equal(result.personal(1)[1]["y"], result.y["y"])
    with pytest.raises(ValueError, match="client is 3; it must be 0 to 2"):
        result.personal(3)
    with pytest.raises(LookupError, match="no federation"):
        dataclasses.replace(result, federation=None).personal(1)


def test_the_summary_has_the_clients_and_survives_a_resumed_run(tmp_path: Path) -> None:
    task = client_owned("y")

    def evaluate(x: Tree, y: Tree, client: int) -> dict[str, float]:
        norm = float(y["y"].norm())
        return {"norm": norm} if client != 3 else {"norm": norm, "rare": 1.0}

    options = {"evaluate_client": evaluate, "out": tmp_path / "run"}
    result = fb.solve(task.problem, task.clients, "simfbo", rounds=4, **options)
    file = tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text())["client_metrics"]
    norms = [float(result.personal(client)[1]["y"].norm()) for client in range(5)]
    assert summary["norm"]["clients"] == [0, 1, 2, 3, 4]
    assert summary["norm"]["values"] == norms
    assert summary["norm"]["worst"] == min(norms)
    assert summary["norm"]["spread"] == pytest.approx(np.std(norms))
    assert summary["rare"]["clients"] == [3]
    file.unlink()
    fb.solve(task.problem, task.clients, "simfbo", rounds=4, resume=True, **options)
    assert json.loads(file.read_text())["client_metrics"] == summary
