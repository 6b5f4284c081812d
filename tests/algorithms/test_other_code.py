"""The claims of docs/other-code.md: methods of public code, typed out by hand, against ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from tests.support.conformance import iterate
from tests.support.small_net import advance, small_net_run

Data = tuple[Tensor, Tensor]


def draw(name: str, *shape: int) -> Tensor:
    return normal(root(7, name), shape, torch.float64)


def lower(x: Tensor, y: Tensor, data: Data) -> Tensor:
    """Logistic regression; x holds the logarithms of its ridge weights."""
    features, labels = data
    return F.softplus(-labels * (features @ y)).mean() + 0.5 * (x.exp() * y**2).sum()


def upper(x: Tensor, y: Tensor, data: Data) -> Tensor:
    """The loss without ridge, and a term in x alone."""
    features, labels = data
    return F.softplus(-labels * (features @ y)).mean() + 0.05 * (x - 1).square().sum()


def logistic_task(clients: int) -> Any:
    """The two losses as a problem, and unrelated data for each client."""

    def side(name: str) -> Data:
        features = draw(f"features of {name}", 12, 3)
        return features, draw(f"labels of {name}", 12).sign()

    held = [fb.ClientData(side(f"train {i}"), side(f"val {i}")) for i in range(clients)]
    start = torch.zeros(3, dtype=torch.float64)
    problem = fb.Problem(
        upper=lambda x, y, batch: upper(x["x"], y["y"], batch),
        lower=lambda x, y, batch: lower(x["x"], y["y"], batch),
        x={"x": start},
        y={"y": start + 0.1},
    )
    return fb.tasks.Task(problem, held)


def products(x: Tensor, y: Tensor, v: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """d2xy g v and d2yy g v."""

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return grad(lower, argnums=1)(x, y, data) @ v

    return grad(inner, argnums=(0, 1))(x, y)


def check(state: Any, **expected: Tensor) -> None:
    """Compare trees of one tensor with tensors."""
    for name, value in expected.items():
        (tensor,) = getattr(state, name).values()
        torch.testing.assert_close(tensor, value, rtol=0, atol=1e-13)


def test_simfbo_on_one_client_is_soba() -> None:
    """SOBA moves y, v and x at once, v with the step of y (Dagréou et al. 2022)."""
    task = logistic_task(1)
    (client,) = task.clients
    step = 0.5
    outer_step = 0.1
    x = task.problem.x["x"]
    y = task.problem.y["y"]
    v = torch.zeros_like(y)
    for _ in range(30):
        f_x, f_y = grad(upper, argnums=(0, 1))(x, y, client.val)
        g_y = grad(lower, argnums=1)(x, y, client.train)
        cross, hessian = products(x, y, v, client.train)
        x = x - outer_step * (f_x - cross)
        y = y - step * g_y
        v = v - step * (hessian - f_y)
    method = fb.algorithms.SimFBO(
        server_lr_x=outer_step, server_lr_y=step, server_lr_z=step, radius=1000.0
    )
    assert v.norm() > 0.05
    check(iterate(task, method, 30).state, x=x, y=y, z=v)


def test_fednest_on_one_client_is_stocbio() -> None:
    """StocBiO: steps on y, a Neumann sum of N products, a step on x (Ji, Yang and Liang 2021)."""
    task = logistic_task(1)
    (client,) = task.clients
    inner_steps, terms, inner_lr, neumann_lr, outer_lr = 4, 6, 0.5, 0.4, 0.1
    x = task.problem.x["x"]
    y = task.problem.y["y"]
    for _ in range(15):
        for _ in range(inner_steps):
            y = y - inner_lr * grad(lower, argnums=1)(x, y, client.train)
        f_x, f_y = grad(upper, argnums=(0, 1))(x, y, client.val)
        term = f_y
        total = f_y
        for _ in range(terms):
            term = term - neumann_lr * products(x, y, term, client.train)[1]
            total = total + term
        x = x - outer_lr * (f_x - products(x, y, neumann_lr * total, client.train)[0])
    method = fb.algorithms.FedNest(
        lr_x=outer_lr,
        lr_y=inner_lr,
        neumann_lr=neumann_lr,
        neumann_steps=terms,
        lower="sgd",
        lower_steps=inner_steps,
        upper_steps=1,
    )
    check(iterate(task, method, 15).state, x=x, y=y)


def test_heterofl_cuts_the_first_units_and_averages_over_their_holders() -> None:
    """8 units: capacities 1, 0.6 and 0.3 hold 8, 5 and 3 of them (Diao, Ding and Tarokh 2021)."""
    capacity = [1.0, 0.6, 0.3, 0.3]
    method = fb.algorithms.HeteroFL(lr_x=0.3, lr_y=0.2)
    conditions = {"batch_size": None, "local_steps": 1}
    run = small_net_run(method, capacity, clients=4, environment=conditions)
    net = {**run.state.x, **run.state.y}
    sums = {name: torch.zeros_like(w) for name, w in net.items()}
    counts = {name: torch.zeros_like(w) for name, w in net.items()}
    for rate, client in zip(capacity, run.fed.transport.executor.clients, strict=True):
        units = slice(math.ceil(8 * rate))
        cuts: dict[str, Any] = {
            "backbone.1.weight": units,
            "backbone.1.bias": units,
            "head.weight": (slice(None), units),
            "head.bias": slice(None),
        }
        images, labels = client.train

        def loss(w: dict[str, Tensor], images: Tensor = images, labels: Tensor = labels) -> Tensor:
            hidden = F.linear(images.flatten(1), w["backbone.1.weight"], w["backbone.1.bias"])
            outputs = F.linear(hidden.relu(), w["head.weight"], w["head.bias"])
            ridge = w["head.weight"].square().sum() + w["head.bias"].square().sum()
            return F.cross_entropy(outputs, labels) + 0.01 * ridge

        cut = {name: net[name][cuts[name]] for name in net}
        slopes = grad(loss)(cut)
        for name, w in cut.items():
            lr = 0.2 if name.startswith("head") else 0.3
            sums[name][cuts[name]] += w - lr * slopes[name]
            counts[name][cuts[name]] += 1
    assert counts["backbone.1.bias"].tolist() == [4, 4, 4, 2, 2, 1, 1, 1]
    advance(run, 1)
    for name, w in {**run.state.x, **run.state.y}.items():
        torch.testing.assert_close(w, sums[name] / counts[name], rtol=0, atol=1e-13)


@dataclass(frozen=True)
class DelayPerClient:
    """A client's tasks take always the same time."""

    durations: Sequence[float]

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        return [self.durations[i] for i in clients]


PLANES = {
    "lr_x": 0.2,
    "lr_y": 0.4,
    "server_lr_x": 0.05,
    "server_lr_y": 0.03,
    "lr_dual_planes": 0.5,
    "lr_dual_consensus": 0.5,
    "c1": 0.05,
    "c2": 0.005,
    "penalty": 1.0,
    "plane_every": 4,
    "plane_steps": 2,
}


class ADBOServer:
    """ADBO's published code with its three defects repaired, as one loop over arrivals.

    a, b and c are of the same step, theta starts at 0, and a plane is taken at the newest y_i.
    """

    def __init__(self, clients: Sequence[Any], durations: Sequence[float]) -> None:
        self.clients = clients
        self.durations = durations
        self.everyone = range(len(clients))
        self.x = torch.zeros(3, dtype=torch.float64)
        self.y = self.x + 0.1
        self.xs = [self.x for _ in clients]
        self.ys = [self.y for _ in clients]
        self.thetas = [self.x for _ in clients]
        self.planes: list[tuple[Tensor, list[Tensor], Tensor, Tensor]] = []
        self.lam: list[float] = []
        self.now = 0.0
        self.arrivals: dict[int, float] = {}
        self.pushes: dict[int, Tensor] = {}

    def send(self, i: int) -> None:
        """Give client i a task, with sum_l lambda_l b_il as it is now."""
        push = torch.zeros_like(self.y)
        for lam, (_, b, _, _) in zip(self.lam, self.planes, strict=True):
            push = push + lam * b[i]
        self.pushes[i] = push
        self.arrivals[i] = self.now + self.durations[i]

    def receive(self, i: int) -> None:
        """Take the step of client i."""
        self.now = max(self.now, self.arrivals.pop(i))
        x = self.xs[i]
        y = self.ys[i]
        f_x, f_y = grad(upper, argnums=(0, 1))(x, y, self.clients[i].val)
        self.xs[i] = x - PLANES["lr_x"] * (f_x + self.thetas[i])
        self.ys[i] = y - PLANES["lr_y"] * (f_y + self.pushes[i])

    def run(self, iterations: int, active: int) -> None:
        """Let the server iterate, with the next `active` arrivals each time."""
        idle = list(self.everyone)
        for t in range(iterations):
            for i in idle:
                self.send(i)
            idle = sorted(self.arrivals, key=self.arrivals.__getitem__)[:active]
            for i in idle:
                self.receive(i)
            self.move(idle)
            if t % PLANES["plane_every"] == 0:
                for i in sorted(self.arrivals):
                    self.receive(i)
                self.add_plane()
                self.now += PLANES["plane_steps"] * max(self.durations)
                idle = list(self.everyone)

    def move(self, heard: Sequence[int]) -> None:
        """Move x and y, then lambda, then the theta_i of those heard."""
        d_x = -sum(self.thetas, start=torch.zeros_like(self.x))
        d_y = torch.zeros_like(self.y)
        for lam, (a, _, c, _) in zip(self.lam, self.planes, strict=True):
            d_x = d_x + lam * a
            d_y = d_y + lam * c
        self.x = self.x - PLANES["server_lr_x"] * d_x
        self.y = self.y - PLANES["server_lr_y"] * d_y
        for j, (a, b, c, kappa) in enumerate(self.planes):
            value = a @ self.x + c @ self.y + kappa
            value = value + sum(b[i] @ self.ys[i] for i in self.everyone)
            slope = float(value) - PLANES["c1"] * self.lam[j]
            self.lam[j] = max(0.0, self.lam[j] + PLANES["lr_dual_planes"] * slope)
        for i in heard:
            gap = self.xs[i] - self.x - PLANES["c2"] * self.thetas[i]
            self.thetas[i] = self.thetas[i] + PLANES["lr_dual_consensus"] * gap

    def add_plane(self) -> None:
        """Drop idle planes; add one, with a by automatic differentiation through all steps."""
        x = self.x.clone().requires_grad_()
        ends = [y.clone().requires_grad_() for y in self.ys]
        end = self.y
        phis = [torch.zeros_like(self.y) for _ in self.everyone]
        for _ in range(int(PLANES["plane_steps"])):
            moved = []
            for i in self.everyone:
                loss = lower(x, ends[i], self.clients[i].train) + phis[i] @ ends[i]
                loss = loss + PLANES["penalty"] / 2 * (ends[i] - end).square().sum()
                (slope,) = torch.autograd.grad(loss, ends[i], create_graph=True)
                moved.append(ends[i] - PLANES["lr_y"] * slope)
            ends = moved
            gaps = [y_i.detach() - end for y_i in ends]
            pull = sum(phis[i] + PLANES["penalty"] * gaps[i] for i in self.everyone)
            phis = [phis[i] + PLANES["lr_y"] * gaps[i] for i in self.everyone]
            end = end + PLANES["server_lr_y"] * pull
        distances = [(self.ys[i] - ends[i]).square().sum() for i in self.everyone]
        distance = torch.stack(distances).sum()
        (a,) = torch.autograd.grad(distance, x)
        b = [2 * (self.ys[i] - ends[i].detach()) for i in self.everyone]
        c = 2 * (self.y - end)
        kappa = distance.detach() + (self.y - end).square().sum() - a @ self.x - c @ self.y
        kappa = kappa - sum(b[i] @ self.ys[i] for i in self.everyone)
        kept = [j for j, lam in enumerate(self.lam) if lam >= 1e-10]
        self.planes = [self.planes[j] for j in kept] + [(a, b, c, kappa)]
        self.lam = [self.lam[j] for j in kept] + [0.0]


@pytest.mark.parametrize("active", [2, 4])
def test_adbo_is_its_published_code_with_three_repairs(active: int) -> None:
    """Four clients with delays of their own, two or all of whom are waited for."""
    task = logistic_task(4)
    durations = (1.0, 1.37, 2.9, 1.71)
    server = ADBOServer(task.clients, durations)
    server.run(14, active)
    method = fb.algorithms.ADBO(**PLANES, max_delay=100)
    conditions = {"participation": active, "delay": DelayPerClient(durations)}
    run = iterate(task, method, 14, environment=conditions)
    assert len(server.lam) > 1
    assert max(server.lam) > 1e-3
    check(run.state, x=server.x, y=server.y)
    torch.testing.assert_close(run.state.lam.tolist(), server.lam, rtol=0, atol=1e-13)
    assert run.fed.now == pytest.approx(server.now)
