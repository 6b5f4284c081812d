"""SDBO and ADBO: updates by hand on several clients, planes, who is waited for, and costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import ADBO, SDBO
from fedbilevel.core.tree import is_finite
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Stragglers, Trace
from fedbilevel.runs.run import Run
from tests.support.cases import (
    CASES,
    client_means,
    cutting_planes,
    lower_consensus,
    neumann,
    where_planes_end,
)
from tests.support.conformance import iterate, tensors

SETTINGS = CASES["sdbo"].settings


def load_quadratic(**options: Any) -> Any:
    return fb.tasks.load("quadratic", **{"clients": 5, "condition": 3.0, "seed": 3} | options)


@pytest.mark.parametrize(
    "changes", [{"plane_steps": 1}, {"plane_steps": 3}, {"plane_every": 2, "lr_dual_planes": 0.5}]
)
def test_several_clients_by_hand(changes: dict[str, Any]) -> None:
    task = load_quadratic()
    weights = [0.1, 0.3, 0.2, 0.15, 0.25]
    settings = SETTINGS | changes
    state = iterate(task, SDBO(**settings), 25, weights=weights).state
    x, y = cutting_planes(client_means(task), [5 * p for p in weights], settings, 25)
    assert min(x.norm(), y.norm()) > 0.05
    torch.testing.assert_close(state.x["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.y["y"], y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_planes_are_tangents_of_h_and_cut_off_no_point_where_it_is_zero(steps: int) -> None:
    """For quadratics h is a quadratic, too, with phi_i and y' held fixed.

    So its central differences are those of the plane, exactly.
    """
    task = load_quadratic()
    weights = [1.5, 0.5, 0.75, 1.25, 1.0]
    settings = SETTINGS | {"plane_steps": steps, "plane_every": 7}
    # The second plane is added in the last of the 8 iterations, at the point where they end.
    s = iterate(task, SDBO(**settings), 8, weights=[w / 5 for w in weights]).state
    x = s.x["x"]
    y = s.y["y"]
    ys = torch.stack([client["y"]["y"] for client in s.clients])
    b = torch.stack([client["b"]["y"][-1] for client in s.clients])
    w = torch.tensor(weights, dtype=x.dtype)
    parts = client_means(task)
    responses, mean = lower_consensus(parts, weights, settings, x, ys.unbind(), y)

    def responses_at(other_x: Tensor) -> Tensor:
        """y'_i is affine in x."""
        eye = settings["penalty"] * torch.eye(4)
        moved = []
        for (A, B, *_), response in zip(parts, responses, strict=True):
            change = neumann(A + eye, B @ (other_x - x), settings["lr_y"], steps - 1)
            moved.append(response + change)
        return torch.stack(moved)

    def h(x: Tensor, ys: Tensor, y: Tensor) -> Tensor:
        return w @ (ys - responses_at(x)).square().sum(1) + (y - mean).square().sum()

    def plane(x: Tensor, ys: Tensor, y: Tensor) -> Tensor:
        return s.a["x"][-1] @ x + w @ (b * ys).sum(1) + s.c["y"][-1] @ y + s.kappa[-1]

    point = (x, ys, y)
    assert h(*point) > 1e-3
    torch.testing.assert_close(plane(*point), h(*point), rtol=0, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        move = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in point]
        ahead = [part + change for part, change in zip(point, move, strict=True)]
        behind = [part - change for part, change in zip(point, move, strict=True)]
        slope = plane(*ahead) - plane(*behind)
        torch.testing.assert_close(slope, h(*ahead) - h(*behind), rtol=0, atol=1e-10)
        feasible = (ahead[0], responses_at(ahead[0]), mean)
        assert h(*feasible) < 1e-20
        assert plane(*feasible) < 0


def test_planes_without_a_multiplier_are_dropped() -> None:
    settings = SETTINGS | {"plane_every": 2, "prune_below": 0.0}
    run = iterate(load_quadratic(), SDBO(**settings), 9)
    s = run.state
    lam = torch.tensor([0.3, 1e-11, 0.2, 0.0, 1e-9], dtype=torch.float64)
    assert len(s.lam) == 5
    pruned = SDBO(**SETTINGS).add_plane(s._replace(lam=lam), run.fed)
    assert pruned.lam.tolist() == [0.3, 0.2, 1e-9, 0.0]
    rows = [(pruned.a["x"], s.a["x"]), (pruned.c["y"], s.c["y"]), (pruned.kappa, s.kappa)]
    for new, old in zip(pruned.clients, s.clients, strict=True):
        rows.append((new["b"]["y"], old["b"]["y"]))
    for new_rows, old_rows in rows:
        assert len(new_rows) == 4
        assert torch.equal(new_rows[:3], old_rows[[0, 2, 4]])


AS_CODED = SETTINGS | {"plane_every": 6, "prune_below": 0.0}


class PublishedServer:
    """The published code, without repairs, on quadratics: one loop over the queue of messages.

    Args:
        task: The quadratic task.
        durations: How long each worker takes for a message.
        active: How many messages the server waits for.
    """

    def __init__(self, task: Any, durations: list[float], active: int) -> None:
        self.parts = client_means(task)
        self.durations = durations
        self.active = active
        self.n = range(len(self.parts))
        self.v = task.problem.x["x"]
        self.z = task.problem.y["y"]
        self.hps = [self.v for _ in self.n]
        self.ws = [self.z for _ in self.n]  # as the server has them
        self.own_hps = [self.v for _ in self.n]  # as the workers have them
        self.own_ws = [self.z for _ in self.n]
        self.thetas = [self.v for _ in self.n]
        self.planes: list[tuple[Tensor, list[Tensor], Tensor, Tensor]] = []
        self.lam: list[Tensor] = []
        self.now = 0.0
        self.queue: dict[int, float] = {}

    def step_outer(self, i: int) -> None:
        """Worker i gets lambda and theta_i, and steps; its message arrives later."""
        _, _, _, e, t, D = self.parts[i]
        x, y = self.own_hps[i], self.own_ws[i]
        push = torch.zeros_like(y)
        for lam, (_, b, _, _) in zip(self.lam, self.planes, strict=True):
            push = push + lam * b[i]
        self.own_hps[i] = x - AS_CODED["lr_x"] * (x - t + D.T @ y + self.thetas[i])
        self.own_ws[i] = y - AS_CODED["lr_y"] * (y - e + D @ x + push)
        self.queue[i] = self.now + self.durations[i]

    def run(self, epochs: int) -> None:
        for i in self.n:
            self.step_outer(i)
        for k in range(epochs):
            nodes = sorted(self.queue, key=self.queue.__getitem__)[: self.active]
            for i in nodes:
                self.now = max(self.now, self.queue.pop(i))
                self.hps[i] = self.own_hps[i]
                self.ws[i] = self.own_ws[i]
            self.move(nodes)
            for i in nodes:
                self.step_outer(i)
            if k % AS_CODED["plane_every"] == 0:
                self.now = max(self.queue.values())  # the messages are taken; ws stays
                self.new_plane()
                for i in self.n:
                    self.step_outer(i)

    def move(self, nodes: list[int]) -> None:
        v, z = self.v, self.z
        for lam, (a, _, c, _) in zip(self.lam, self.planes, strict=True):
            v = v - AS_CODED["server_lr_x"] * lam * a
            z = z - AS_CODED["server_lr_y"] * lam * c
        self.v = v + AS_CODED["server_lr_x"] * torch.stack(self.thetas).sum(0)
        self.z = z
        for j, (a, b, c, kappa) in enumerate(self.planes):
            value = a @ self.v + c @ z + kappa + sum(b[i] @ self.ws[i] for i in self.n)
            slope = value - AS_CODED["c1"] * self.lam[j]
            self.lam[j] = (self.lam[j] + AS_CODED["lr_dual_planes"] * slope).clamp(min=0)
        for i in nodes:
            gap = self.hps[i] - self.v - AS_CODED["c2"] * self.thetas[i]
            self.thetas[i] = self.thetas[i] + AS_CODED["lr_dual_consensus"] * gap

    def new_plane(self) -> None:
        """K steps for b, c and the constant, one more for a; the target is ws."""
        v = self.v.clone().requires_grad_()
        ends = self.own_ws
        z = self.z
        phis = [torch.zeros_like(z) for _ in self.n]
        for step in range(AS_CODED["plane_steps"] + 1):
            if step == AS_CODED["plane_steps"]:
                b = [2 * (self.ws[i] - ends[i].detach()) for i in self.n]
                c = 2 * (self.z - z)
            moved = []
            for i, (A, B, const, *_) in enumerate(self.parts):
                d = A @ ends[i] - B @ v - const + phis[i] + AS_CODED["penalty"] * (ends[i] - z)
                moved.append(ends[i] - AS_CODED["lr_y"] * d)
            ends = moved
            gaps = [end.detach() - z for end in ends]
            pull = torch.stack(phis).sum(0) + AS_CODED["penalty"] * torch.stack(gaps).sum(0)
            phis = [phis[i] + AS_CODED["lr_y"] * gaps[i] for i in self.n]
            z = z + AS_CODED["server_lr_y"] * pull
        distance = torch.stack([(self.ws[i] - ends[i]).square().sum() for i in self.n]).sum()
        (a,) = torch.autograd.grad(distance, v)
        kappa = -(a @ self.v) + c @ c / 4 - c @ self.z
        for i in self.n:
            kappa = kappa + b[i] @ b[i] / 4 - b[i] @ self.ws[i]
        kept = [j for j, lam in enumerate(self.lam) if lam >= AS_CODED["prune_below"]]
        self.planes = [self.planes[j] for j in kept] + [(a, b, c, kappa)]
        self.lam = [self.lam[j] for j in kept] + [torch.zeros((), dtype=torch.float64)]
        self.now += (AS_CODED["plane_steps"] + 1) * max(self.durations)


@pytest.mark.parametrize(("kind", "active"), [(SDBO, 5), (ADBO, 5), (ADBO, 2)])
def test_reference_is_the_published_code(kind: Any, active: int, tmp_path: Path) -> None:
    task = load_quadratic()
    start = dataclasses.replace(task.problem, x={"x": torch.full((5,), 0.3, dtype=torch.float64)})
    task = dataclasses.replace(task, problem=start)
    durations = [1.0, 1.37, 2.9, 1.71, 2.23]
    file = tmp_path / "durations.csv"
    file.write_text("".join(f"{i},{seconds}\n" for i, seconds in enumerate(durations)))
    environment = {"participation": active, "delay": Trace(str(file))}
    changes = {"max_delay": 100} if kind is ADBO else {}
    server = PublishedServer(task, durations, active)
    server.run(20)

    def run(**changes: Any) -> Run:
        return iterate(task, kind(**AS_CODED | changes), 20, environment=environment)

    coded = run(compat="reference", **changes)
    assert len(server.lam) > 2
    assert float(max(server.lam)) > 1e-3
    torch.testing.assert_close(coded.state.x["x"], server.v, rtol=0, atol=1e-12)
    torch.testing.assert_close(coded.state.y["y"], server.z, rtol=0, atol=1e-12)
    torch.testing.assert_close(coded.state.lam, torch.stack(server.lam), rtol=0, atol=1e-12)
    assert coded.fed.now == pytest.approx(server.now)
    assert (run(**changes).state.x["x"] - server.v).norm() > 1e-2, "the repairs do not show"


def test_without_delays_and_with_everyone_adbo_is_sdbo() -> None:
    task = load_quadratic(samples=4, noise=1.0)
    environment = {"batch_size": 2, "delay": Constant(1.0)}
    asynchronous = iterate(task, ADBO(**SETTINGS), 25, environment=environment)
    synchronous = iterate(task, SDBO(**SETTINGS), 25, environment=environment)
    assert all(map(torch.equal, tensors(asynchronous.state), tensors(synchronous.state)))
    assert asynchronous.fed.ledger.phases == synchronous.fed.ledger.phases
    assert asynchronous.fed.now == synchronous.fed.now


def test_a_plane_is_charged_as_the_barriers_it_is() -> None:
    """Every task takes a second: 20 iterations, and 2 planes of 3 steps."""
    environment = {"delay": Constant(1.0)}
    method = SDBO(**SETTINGS | {"plane_steps": 3})
    fed = iterate(load_quadratic(), method, 20, environment=environment).fed
    rounds = {name: cost.rounds for name, cost in fed.ledger.phases.items()}
    assert rounds == {"gradients": 20, "settle": 4, "cut": 2}
    assert fed.now == 20 + 2 * 3


def test_adbo_waits_for_replies_under_way_before_it_adds_a_plane() -> None:
    """Four clients answer after 1 s, the straggler after 4 s; each step of the plane takes 4 s."""
    environment = {"delay": Constant(1.0), "stragglers": Stragglers(1, 4.0), "participation": 4}
    method = ADBO(**SETTINGS | {"plane_steps": 3})
    fed = iterate(load_quadratic(), method, 1, environment=environment).fed
    assert fed.ledger.phases["gradients"].rounds == 2
    assert fed.now == 4 + 3 * 4


@pytest.mark.parametrize(("max_delay", "worst"), [(1, 0), (3, 2), (6, 5)])
def test_nobody_is_heard_later_than_max_delay_allows(max_delay: int, worst: int) -> None:
    environment = {
        "participation": 2,
        "delay": LogNormal(1.0, 1.0),
        "stragglers": Stragglers(2, 20.0),
    }
    method = ADBO(**SETTINGS | {"max_delay": max_delay, "plane_every": 100})
    run = iterate(load_quadratic(clients=8), method, 40, environment=environment)
    assert run.fed.records()["max_staleness"] == worst
    assert run.fed.ledger.phases["gradients"].rounds > 40, "it had to wait for nobody"
    assert all(run.state.t - client["last_heard"] <= max_delay for client in run.state.clients)


def test_a_step_uses_the_multipliers_of_its_task() -> None:
    """The straggler answers 3.5 s after its task; lambda has moved in the four rounds since."""
    task = load_quadratic(clients=3)
    environment = {"participation": 2, "delay": Constant(1.0), "stragglers": Stragglers(1, 3.5)}
    run = iterate(task, ADBO(**SETTINGS | {"plane_every": 100}), 1, environment=environment)
    run.state = run.state._replace(lam=torch.ones(1, dtype=torch.float64))
    (straggler,) = run.fed.transport.outcomes.slow_clients  # type: ignore[attr-defined]
    run.advance()
    before = run.state.clients[straggler]
    for _ in range(3):
        run.advance()
    after = run.state.clients[straggler]
    assert (before["last_heard"], after["last_heard"], run.state.t) == (0, 4, 5)
    x = before["x"]["x"]
    y = before["y"]["y"]
    _, _, _, e, t, D = client_means(task)[straggler]
    expected_x = x - SETTINGS["lr_x"] * (x - t + D.T @ y + before["theta"]["x"])
    expected_y = y - SETTINGS["lr_y"] * (y - e + D @ x + before["b"]["y"][0])
    torch.testing.assert_close(after["x"]["x"], expected_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(after["y"]["y"], expected_y, rtol=0, atol=1e-12)
    assert abs(float(run.state.lam) - 1) > 0.01


def count_left_out(run: Run) -> tuple[int, int]:
    """How many pairs of a client and a plane have no part in each other, and how many there are."""
    left_out = 0
    total = 0
    for client in run.state.clients:
        for row in client["b"]["y"]:
            left_out += not row.any()
            total += 1
    return left_out, total


def test_lost_replies_leave_a_client_out_of_a_plane() -> None:
    task = load_quadratic(samples=3, noise=0.1)
    environment = {
        "participation": 3,
        "delay": LogNormal(1.0, 0.5),
        "faults": Faults(drop=0.2, corrupt=0.1, duplicate=0.1, leave=0.1),
    }
    run = iterate(task, ADBO(**SETTINGS | {"plane_every": 4}), 20, environment=environment)
    assert run.fed.ledger.lost_tasks > 10
    assert run.fed.ledger.refused_replies > 5
    left_out, total = count_left_out(run)
    assert 0 < left_out < total / 2
    assert is_finite(tuple(run.state))
    assert task.gradient(run.state.x)["x"].norm() < task.gradient(task.problem.x)["x"].norm()


def test_on_identical_clients_the_bias_goes_with_more_steps_and_less_penalty() -> None:
    """The bias is then that of q alone, K terms of a Neumann sum of H + mu.

    Both at the closed form of where planes end, and at the end of a run by hand.
    """
    task = load_quadratic(clients=3, condition=1.5, heterogeneity=0.0)
    settings = SETTINGS | {"penalty": 0.05, "server_lr_y": 0.1, "c1": 0.002}
    at_start = task.gradient(task.problem.x)["x"].norm()

    def relative_gradient(x: Tensor) -> float:
        return float(task.gradient({"x": x})["x"].norm() / at_start)

    def at_end(**changes: Any) -> float:
        return relative_gradient(where_planes_end(task, settings | changes))

    assert at_end(plane_steps=1) > 0.3
    assert at_end(plane_steps=6) < 0.06
    assert at_end(plane_steps=60, penalty=1e-4) < 1e-3
    for steps, low, high in ((1, 0.3, 0.5), (6, 0.0, 0.1)):
        changed = settings | {"plane_steps": steps}
        x, _ = cutting_planes(client_means(task), [1.0] * 3, changed, 300)
        assert low < relative_gradient(x) < high


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plane_every": 0}, "plane_every is 0; it must be at least 1"),
        ({"plane_steps": 0}, "plane_steps is 0; it must be at least 1"),
        ({"max_delay": 0}, "max_delay is 0; it must be at least 1"),
        ({"c1": -1.0}, "c1 is -1.0; it must not be negative"),
        ({"c2": -1.0}, "c2 is -1.0; it must not be negative"),
        ({"penalty": -1.0}, "penalty is -1.0; it must not be negative"),
        ({"prune_below": -1.0}, "prune_below is -1.0; it must not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ADBO(**settings)
