"""Baselines for personal models: their updates by hand, and plain loops on the same data."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from tests.support.cases import client_means
from tests.support.owners import client_owned
from tests.support.plain_loops import compare

OWN_HEADS = ["fedper", "fedrep", "fedbabu"]


def solve(algorithm: Any, rounds: int, task: Any = None, **environment: Any) -> fb.Result:
    task = task or client_owned("y", clients=3)
    return fb.solve(
        task.problem,
        task.clients,
        algorithm,
        rounds=rounds,
        environment=fb.Environment(**environment),
    )


def by_hand(name: str, rounds: int) -> tuple[Tensor, list[Tensor]]:
    """x and all y_i after rounds of 2 + 1 steps (of 2 for FedPer), with tensors alone."""
    parts = client_means(client_owned("y", clients=3))
    x = torch.zeros(5, dtype=torch.float64)
    ys = [torch.zeros(4, dtype=torch.float64) for _ in parts]
    for _ in range(rounds):
        ends = []
        for i, (A, B, c, *_) in enumerate(parts):
            x_i = x
            y_i = ys[i]
            for step in range(3 if name == "fedrep" else 2):
                g_x, g_y = -B.T @ y_i, A @ y_i - B @ x_i - c
                if name in ("fedper", "fedbabu") or step == 2:
                    x_i = x_i - 0.1 * g_x
                if name == "fedper" or (name == "fedrep" and step < 2):
                    y_i = y_i - 0.3 * g_y
            ys[i] = y_i
            ends.append(x_i)
        x = torch.stack(ends).mean(0)
    if name == "fedbabu":
        for i, (A, B, c, *_) in enumerate(parts):
            for _ in range(4):
                ys[i] = ys[i] - 0.3 * (A @ ys[i] - B @ x - c)
    return x, ys


@pytest.mark.parametrize("name", OWN_HEADS)
def test_own_heads_are_those_computed_by_hand(name: str) -> None:
    settings: dict[str, Any] = {"lr_x": 0.1, "lr_y": 0.3}
    rounds = 5
    if name == "fedrep":
        settings |= {"head_steps": 2, "body_steps": 1}
    if name == "fedbabu":
        settings |= {"training_iterations": 5, "fine_tune_steps": 4}
        rounds = 6
    result = solve(fb.algorithms.get(name)(**settings), rounds, local_steps=2)
    x, ys = by_hand(name, 5)
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=1e-12)
    for client, y in enumerate(ys):
        own = result.personal(client)[1]["y"]
        torch.testing.assert_close(own, y, rtol=0, atol=1e-12)
        assert own.norm() > 0.1


@pytest.mark.parametrize("name", OWN_HEADS)
def test_own_heads_need_a_problem_whose_y_belongs_to_the_clients(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    with pytest.raises(ValueError, match=f"{name} learns a y for every client.*'y' to the server"):
        solve(name, 1, task)


def test_ditto_stays_where_the_pull_balances_the_gradient() -> None:
    """v_i solves A_i v + lambda (v - w) = c_i with w = y*(0), the limit of FedAvg."""
    task = fb.tasks.load("quadratic", clients=3, condition=3.0, seed=3)
    method = fb.algorithms.Ditto(lr_y=0.4, pull=0.5, train="y")
    result = solve(method, 200, task)
    w = task.y_star(task.problem.x)["y"]
    for client, (A, _, c, *_) in enumerate(client_means(task)):
        v = torch.linalg.solve(A + 0.5 * torch.eye(4).double(), c + 0.5 * w)
        torch.testing.assert_close(result.personal(client)[1]["y"], v, rtol=0, atol=1e-8)


def test_pfedme_keeps_proximal_points() -> None:
    task = fb.tasks.load("quadratic", clients=3, seed=3)
    method = fb.algorithms.PFedMe(lr_y=0.5, pull=1.0, personal_lr=0.4, train="y")
    result = solve(method, 300, task)
    for client, (A, _, c, *_) in enumerate(client_means(task)):
        theta = torch.linalg.solve(A + torch.eye(4).double(), c + result.y["y"])
        torch.testing.assert_close(result.personal(client)[1]["y"], theta, rtol=0, atol=1e-8)


def test_per_fedavg_keeps_the_model_after_one_step() -> None:
    task = fb.tasks.load("quadratic", clients=3, seed=3)
    method = fb.algorithms.PerFedAvg(lr_y=0.2, inner_lr=0.3, train="y")
    before = solve(method, 2, task).y["y"]
    result = solve(method, 3, task)
    for client, (A, _, c, *_) in enumerate(client_means(task)):
        adapted = before - 0.3 * (A @ before - c)
        torch.testing.assert_close(result.personal(client)[1]["y"], adapted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_a_plain_loop_from_the_paper_ends_at_the_same_accuracy(name: str) -> None:
    options = {"data": "digits", "held_out": 0.3, "clients": 10}
    plain, ours, start = compare(
        name, rounds=40, participation=5, lr=0.2, batch_size=16, hidden=32, options=options
    )
    assert fmean(start) < 0.3
    assert fmean(plain) > 0.95
    assert fmean(ours) == pytest.approx(fmean(plain), abs=0.01)
