"""Random truncation of local hypergradients: unbiased, and shared by the evaluations of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import LocalBSGM, shared
from fedbilevel.runs.run import Run
from tests.support.cases import neumann
from tests.support.conformance import iterate
from tests.support.estimators import load_quadratic, pooled_matrices

NOTHING_MOVES: dict[str, Any] = {
    "lr_x": 1e-12,
    "lr_y": 1e-12,
    "neumann_lr": 0.8,
    "neumann_steps": 4,
    "truncation": "random",
}


@pytest.mark.parametrize("name", ["localbsgm", "localbsgvr", "adafbio"])
def test_local_truncation_is_unbiased_over_all_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one client, whose Hessian is the global one."""
    task = load_quadratic(clients=1)
    A, B, _, e, t, _ = pooled_matrices(task)
    method: Any = fb.algorithms.get(name)(**NOTHING_MOVES)
    fed = fb.simulated_federation(task.problem, task.clients)
    x, y = task.problem.start
    directions = []
    for length in range(4):

        def drawn(key: Tensor, low: int, high: int, length: int = length) -> Tensor:
            return torch.tensor(length)

        monkeypatch.setattr(shared, "integers", drawn)
        directions.append(fed.ask(method.begin(), [0], x=x, y=y).mean("u")["x"])
    expected = -t + B.T @ neumann(A, -e, 0.8, 3)
    torch.testing.assert_close(torch.stack(directions).mean(0), expected, rtol=0, atol=1e-12)
    assert (directions[0] - directions[3]).norm() > 0.1


def test_local_random_truncation_has_the_expectation_of_the_sum() -> None:
    """LocalBSGM's momentum over 50 equal clients, 25 times, is within 4.5 standard errors."""
    task = load_quadratic(clients=50, heterogeneity=0.0)
    settings = {
        "lr_x": 1e-9,
        "lr_y": 1e-9,
        "neumann_lr": 0.8,
        "neumann_steps": 4,
        "momentum_weight": 1.0,
    }
    exact = iterate(task, LocalBSGM(**settings, truncation="sum"), 1).state.u["x"]
    method = LocalBSGM(**settings)
    fed = fb.simulated_federation(task.problem, task.clients)
    start = method.init(task.problem)
    sample = torch.stack([method.iterate(start, fed).u["x"] for _ in range(25)])
    error = sample.std(0) / 25**0.5
    assert ((sample.mean(0) - exact).abs() < 4.5 * error + 1e-7).all()
    assert (error > 1e-6).all()
    assert (error < 0.1 * exact.norm()).all()


@pytest.mark.parametrize("name", ["localbsgvr", "adafbio"])
def test_variance_reduction_shares_the_truncation(name: str) -> None:
    """Where x and y stay, d(new) - d(old) is 0 only if both have the same random length."""
    task = load_quadratic()
    method = fb.algorithms.get(name)(**NOTHING_MOVES, momentum_weight=1e-9)
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(local_steps=5))
    run = Run(method, fed, {})
    run.advance()
    first = run.state.u["x"]
    run.advance()
    torch.testing.assert_close(run.state.u["x"], first, rtol=0, atol=1e-7)


def test_storm_keeps_the_complement_of_the_weight() -> None:
    """With full batches the momentum equals the old direction, and the weight would not show."""
    new = fb.Tree(x=torch.tensor([5.0]))
    momentum = fb.Tree(x=torch.tensor([3.0]))
    old = fb.Tree(x=torch.tensor([1.0]))
    (renewed,) = shared.storm([new], [momentum], [old], weight=0.25)
    assert float(renewed["x"]) == 5.0 + 0.75 * (3.0 - 1.0)
