"""Penalty methods beyond the conformance suite: closed forms at a fixed penalty, and their bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import F2SA, MeFBO, MemFBO
from fedbilevel.federation.delays import LogNormal
from tests.support.cases import client_means

MEMFBO: dict[str, Any] = {"server_lr_x": 0.06, "server_lr_y": 0.4, "server_lr_u": 0.4}
MEFBO: dict[str, Any] = MEMFBO | {"server_lr_u": 0.3}
F2SA_STEPS: dict[str, Any] = {"lr_x": 0.06, "lr_y": 0.4, "lr_u": 0.4}


def quadratic() -> Any:
    return fb.tasks.load("quadratic", clients=4, condition=3.0, heterogeneity=1.0, seed=3)


def penalised_solution(task: Any, penalty: float, pull: float = 0.0) -> tuple[Tensor, ...]:
    """x, y and u where all three mean directions are 0; `pull` is 1 / envelope."""
    A, B, c, e, t, D = (
        torch.stack(parts).mean(0) for parts in zip(*client_means(task), strict=True)
    )
    p = len(t)
    d = len(c)
    eye = torch.eye(d, dtype=torch.float64)
    rows = [
        torch.cat([torch.eye(p, dtype=torch.float64), penalty * B.T, D.T - penalty * B.T], dim=1),
        torch.cat([-B, A + pull * eye, -pull * eye], dim=1),
        torch.cat([D / penalty - B, pull * eye, A + (1 / penalty - pull) * eye], dim=1),
    ]
    right = torch.cat([t, c, c + e / penalty])
    return torch.linalg.solve(torch.cat(rows), right).split([p, d, d])


@pytest.mark.parametrize(
    ("method", "rounds", "pull"),
    [
        (MemFBO(**MEMFBO, penalty=5.0), 400, 0.0),
        (MeFBO(**MEFBO, penalty=5.0, envelope=2.0), 800, 0.5),
        (F2SA(**F2SA_STEPS, penalty=5.0, inner_rounds=2), 1200, 0.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_at_a_fixed_penalty_it_ends_at_the_closed_form(
    method: Any, rounds: int, pull: float
) -> None:
    task = quadratic()
    x, y, _ = penalised_solution(task, 5.0, pull)
    assert (x - task.x_star()["x"]).norm() > 0.05, "the bias does not show on this fixture"
    result = fb.solve(task.problem, task.clients, method, rounds=rounds, every=rounds)
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.y["y"], y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [MemFBO, F2SA])
def test_the_error_halves_when_the_penalty_doubles(kind: Any) -> None:
    task = quadratic()
    steps = MEMFBO if kind is MemFBO else F2SA_STEPS
    errors = []
    for penalty in (20.0, 40.0):
        method = kind(**steps, penalty=penalty)
        result = fb.solve(task.problem, task.clients, method, rounds=300, every=300)
        errors.append(float((result.x["x"] - task.x_star()["x"]).norm()))
    assert errors[0] > 1e-4
    assert 1.7 < errors[0] / errors[1] < 2.3


def test_a_growing_penalty_goes_to_the_solution_of_the_bilevel_problem() -> None:
    task = quadratic()
    method = MemFBO(**MEMFBO, penalty=fb.schedules.Linear(2.0, increase=0.2))
    result = fb.solve(task.problem, task.clients, method, rounds=1500, every=1500)
    assert (result.x["x"] - task.x_star()["x"]).norm() < 1e-2


def test_unequal_local_steps_on_unequal_clients_lead_to_the_same_solution() -> None:
    task = quadratic()
    steps = [1, 1, 1, 5]
    x, _, _ = penalised_solution(task, 5.0)
    assert (x - task.x_star(weights=steps)["x"]).norm() > 0.1, "unequal steps would not show"
    method = MemFBO(**MEMFBO, lr_x=1e-7, lr_y=1e-7, lr_u=1e-7, penalty=5.0)
    environment = fb.Environment(local_steps=steps)
    result = fb.solve(
        task.problem, task.clients, method, rounds=400, every=400, environment=environment
    )
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [MemFBO, MeFBO])
def test_without_a_barrier_slow_clients_count_once(kind: Any) -> None:
    task = quadratic()
    steps = MEMFBO if kind is MemFBO else MEFBO
    pull = 0.0 if kind is MemFBO else 1.0
    slow = fb.Environment(delay=LogNormal())
    method = kind(**steps, penalty=5.0, barrier=False)
    result = fb.solve(task.problem, task.clients, method, rounds=1200, every=1200, environment=slow)
    x, _, _ = penalised_solution(task, 5.0, pull)
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=1e-5)


def test_adaptive_steps_lead_to_the_same_solution() -> None:
    task = quadratic()
    lr = fb.schedules.Power(0.1, power=2.0, after=200)
    method = MemFBO(server_lr_x=0.06, server_lr_y=lr, server_lr_u=lr, penalty=5.0, adaptive=True)
    result = fb.solve(task.problem, task.clients, method, rounds=500, every=500)
    x, y, _ = penalised_solution(task, 5.0)
    torch.testing.assert_close(result.x["x"], x, rtol=0, atol=2e-3)
    torch.testing.assert_close(result.y["y"], y, rtol=0, atol=2e-3)


def test_adaptive_steps_on_y_and_u_are_divided_by_one_scale() -> None:
    """One round by hand: Adam's first step is lr times the direction over the larger of the two."""
    task = quadratic()
    method = MemFBO(server_lr_y=0.1, server_lr_u=0.1, penalty=0.5, adaptive=True)
    federation = fb.simulated_federation(task.problem, task.clients)
    job = fb.Run(method, federation, {"rounds": 1})
    _, _, c, e, _, _ = (torch.stack(part).mean(0) for part in zip(*client_means(task), strict=True))
    d_y = -c  # at x = y = u = 0
    d_u = -c - e / 0.5
    job.advance()
    larger = torch.maximum(d_y.abs(), d_u.abs())
    torch.testing.assert_close(job.state.y["y"], -0.1 * d_y / larger)
    torch.testing.assert_close(job.state.u["y"], -0.1 * d_u / larger)


def test_an_adaptive_run_resumes_bit_for_bit(tmp_path: Any) -> None:
    task = quadratic()
    method = MemFBO(adaptive=True)

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        out = tmp_path / folder
        return fb.solve(task.problem, task.clients, method, rounds=rounds, out=out, resume=resume)

    whole = solve(4, "whole")
    solve(2, "run")
    resumed = solve(4, "run", resume=True)
    assert torch.equal(resumed.x["x"], whole.x["x"])
    assert torch.equal(resumed.y["y"], whole.y["y"])


def double_well() -> fb.Problem:
    """g = (y^2 - 1)^2 / 4 - x y, with curvature -1 at y = 0; f pulls y to 1.2 and x to 0."""

    def lower(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return ((y["y"] ** 2 - 1) ** 2 / 4 - x["x"] * y["y"]).sum()

    def upper(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return ((y["y"] - 1.2) ** 2 + x["x"] ** 2).sum() / 2

    start = torch.tensor([0.0], dtype=torch.float64)
    return fb.Problem(upper, lower, x={"x": start}, y={"y": start + 0.1})


def test_the_envelope_solves_a_lower_level_with_two_wells() -> None:
    """For a large penalty u minimises (u - 1.2)^2 / 2 + x^2 / 2 with x = u^3 - u: bisection."""
    low, high = 1.0, 1.2
    for _ in range(60):
        u = (low + high) / 2
        slope = u - 1.2 + (u**3 - u) * (3 * u**2 - 1)
        low, high = (u, high) if slope < 0 else (low, u)
    data = (torch.zeros(1),)
    method = MeFBO(server_lr_x=0.05, server_lr_y=0.3, server_lr_u=0.05, penalty=30.0, envelope=0.5)
    result = fb.solve(double_well(), [fb.ClientData(data, data)], method, rounds=1000, every=1000)
    assert float(result.y["y"]) == pytest.approx(u, abs=5e-3)
    assert float(result.x["x"]) == pytest.approx(u**3 - u, abs=5e-3)


def test_the_envelope_lets_the_upper_level_choose_between_solutions() -> None:
    """g depends on y_1 + y_2 only; the closed form is f's minimiser on that line, at any x."""
    target = torch.tensor([1.0, 2.0], dtype=torch.float64)
    problem = fb.Problem(
        lambda x, y, batch: ((y["y"] - target) ** 2).sum() + (x["x"] ** 2).sum(),
        lambda x, y, batch: ((y["y"].sum() - x["x"].sum()) ** 2) / 2,
        x={"x": torch.zeros(1, dtype=torch.float64)},
        y={"y": torch.zeros(2, dtype=torch.float64)},
    )
    data = (torch.zeros(1),)
    method = MeFBO(server_lr_x=0.05, server_lr_y=0.3, server_lr_u=0.2, penalty=20.0)
    result = fb.solve(problem, [fb.ClientData(data, data)], method, rounds=3000, every=3000)
    # min x^2 + |y - target|^2 on y_1 + y_2 = x: y = target - x, 2x = 3 - x
    torch.testing.assert_close(result.x["x"], torch.ones(1, dtype=torch.float64), rtol=0, atol=0.05)
    torch.testing.assert_close(result.y["y"], target - 1, rtol=0, atol=0.05)
