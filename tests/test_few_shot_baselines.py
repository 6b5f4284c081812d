"""ProtoNet, MAML, and what FedAvg and FedMBO do with episodes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

import fedbilevel as fb
from fedbilevel.algorithms import MAML, FedAvg, FedMBO, ProtoNet
from fedbilevel.algorithms.protonet import prototype_loss
from fedbilevel.core.tree import Tree, dot
from fedbilevel.runs.run import Run


def classes(clients: int = 1, embed: Any = None) -> tuple[fb.Problem, list[fb.ClientData]]:
    """Numbers of two classes, and a scale x that embeds them."""

    def scale(x: Tree, data: Any) -> dict[str, Tensor]:
        return {"features": x["scale"] * data["numbers"], "labels": data["labels"]}

    def loss(x: Tree, y: Tree, batch: Any) -> Tensor:
        return dot(y, y)

    one = torch.ones((), dtype=torch.float64)
    problem = fb.Problem(
        loss, loss, {"scale": 0.8 * one}, {"y": one}, lower_level="private", embed=embed or scale
    )
    labels, held = torch.tensor([0, 1]), []
    for i in range(clients):
        support, query = ([[0.3 + i], [2.0]], [[0.9 + i], [1.0]])
        sides = [
            {"numbers": torch.tensor(side, dtype=torch.float64), "labels": labels}
            for side in (support, query)
        ]
        held.append(fb.ClientData(*sides))
    return problem, held


def run(problem: fb.Problem, clients: Any, method: Any, iterations: int = 1, **options: Any) -> Run:
    environment = fb.Environment(**options.pop("environment", {}))
    started = Run(method, fb.simulated_federation(problem, clients, environment, **options), {})
    for _ in range(iterations):
        started.advance()
    return started


def test_prototypes_are_class_means() -> None:
    """Against the loss with the classes written out; they need not be equally many."""
    draw = torch.Generator().manual_seed(0)
    support = {
        "features": torch.randn(7, 4, generator=draw),
        "labels": torch.tensor([2, 0, 1, 0, 2, 2, 1]),
    }
    query = {"features": torch.randn(5, 4, generator=draw), "labels": torch.tensor([0, 1, 2, 2, 0])}
    means = torch.stack([support["features"][support["labels"] == k].mean(0) for k in range(3)])
    distances = torch.cdist(query["features"], means) ** 2
    expected = torch.nn.functional.cross_entropy(-distances, query["labels"])
    torch.testing.assert_close(prototype_loss(support, query), expected)


def test_protonet_in_closed_form() -> None:
    """Prototypes s a and s b, queries s q: the loss is log(1 + exp(s^2 d)), d = (q - own)^2 - (q - other)^2."""
    s, lr, slopes = 0.8, 0.1, []
    for i in range(3):
        a, b, first, second = 0.3 + i, 2.0, 0.9 + i, 1.0
        differences = [(first - a) ** 2 - (first - b) ** 2, (second - b) ** 2 - (second - a) ** 2]
        slopes.append(sum(2 * s * d / (1 + math.exp(-(s**2) * d)) for d in differences) / 2)
    problem, clients = classes(3)
    after = run(problem, clients, ProtoNet(lr_x=lr), environment={"local_steps": 2})
    assert abs(sum(slopes)) > 0.1
    assert float(after.state.x["scale"]) == pytest.approx(s - lr * sum(slopes) / 3, abs=1e-12)
    assert float(after.state.y["y"]) == 1.0
    totals = after.fed.ledger.totals()
    assert (totals["gradients"], totals["bytes_down"], totals["bytes_up"]) == (
        3 * 2 * 2,
        3 * 16,
        3 * 8,
    )
    loop = run(problem, clients, ProtoNet(lr_x=lr), environment={"local_steps": 2}, mode="loop")
    torch.testing.assert_close(loop.state.x["scale"], after.state.x["scale"], rtol=0, atol=1e-14)


def test_protonet_says_what_it_needs() -> None:
    problem, clients = classes()
    with pytest.raises(
        ValueError, match=r"^protonet compares features; this problem has no embed to give them$"
    ):
        run(dataclasses.replace(problem, embed=None), clients, ProtoNet())
    problem, clients = classes(embed=lambda x, data: (x["scale"] * data["numbers"],))
    with pytest.raises(
        ValueError,
        match="embed returned a tuple; protonet needs a dict with 'features' and 'labels'",
    ):
        run(problem, clients, ProtoNet())
    problem, clients = classes(embed=lambda x, data: {"features": x["scale"] * data["numbers"]})
    with pytest.raises(ValueError, match="embed returned a dict with features; protonet needs"):
        run(problem, clients, ProtoNet())


def upper(x: Tree, y: Tree, batch: Any) -> Tensor:
    return ((batch[0] @ (y["y"] + x["x"].sin())).cosh()).mean()


def lower(x: Tree, y: Tree, batch: Any) -> Tensor:
    return ((batch[0] @ (y["y"] * x["x"].exp()) - 1) ** 2).mean() + 0.1 * dot(y, y)


def curved(clients: int = 2) -> tuple[fb.Problem, list[fb.ClientData]]:
    """Losses of which no derivative is constant."""
    draw = torch.Generator().manual_seed(3)

    def vector(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    problem = fb.Problem(upper, lower, {"x": vector(3)}, {"y": vector(3)}, lower_level="private")
    return problem, [fb.ClientData((vector(4, 3),), (vector(4, 3),)) for _ in range(clients)]


def test_maml_is_the_derivative_through_its_steps() -> None:
    problem, clients = curved()
    x, y = problem.start

    def outer(x: Tree, y: Tree) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for client in clients:
            x_k, y_k = x, y
            for _ in range(3):
                g_x, g_y = grad(lower, argnums=(0, 1))(x_k, y_k, client.train)
                x_k, y_k = x_k - 0.2 * g_x, y_k - 0.2 * g_y
            total = total + upper(x_k, y_k, client.val) / len(clients)
        return total

    after = run(problem, clients, MAML(lr_x=1.0, lr_y=1.0, inner_lr=0.2, inner_steps=3))
    h, v = 1e-5, torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    for moved, rise in (
        (
            after.state.x["x"] - x["x"],
            outer(Tree(x=x["x"] + h * v), y) - outer(Tree(x=x["x"] - h * v), y),
        ),
        (
            after.state.y["y"] - y["y"],
            outer(x, Tree(y=y["y"] + h * v)) - outer(x, Tree(y=y["y"] - h * v)),
        ),
    ):
        assert float(-moved @ v) == pytest.approx(float(rise / (2 * h)), rel=1e-6)
    assert after.fed.ledger.totals()["gradients"] == len(clients) * (3 * 3 + 1)


def test_first_order_maml_takes_the_gradient_at_the_end() -> None:
    problem, clients = curved()
    (x, y), d_x, d_y = problem.start, torch.zeros(3).double(), torch.zeros(3).double()
    for client in clients:
        x_k, y_k = x, y
        for _ in range(2):
            g_x, g_y = grad(lower, argnums=(0, 1))(x_k, y_k, client.train)
            x_k, y_k = x_k - 0.2 * g_x, y_k - 0.2 * g_y
        f_x, f_y = grad(upper, argnums=(0, 1))(x_k, y_k, client.val)
        d_x, d_y = d_x + f_x["x"] / 2, d_y + f_y["y"] / 2
    after = run(
        problem, clients, MAML(lr_x=0.3, lr_y=0.4, inner_lr=0.2, inner_steps=2, first_order=True)
    )
    torch.testing.assert_close(after.state.x["x"], x["x"] - 0.3 * d_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.state.y["y"], y["y"] - 0.4 * d_y, rtol=0, atol=1e-12)
    assert after.fed.ledger.totals()["gradients"] == len(clients) * (2 + 1)


def test_fedavg_on_episodes() -> None:
    """x goes on from episode to episode, y begins each at the shared one."""
    problem, clients = curved(1)
    x, y = problem.start
    x_i, dy = x, torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        y_i = y
        for _ in range(3):
            (g_x, g_y), (f_x, f_y) = (
                grad(loss, argnums=(0, 1))(x_i, y_i, data)
                for loss, data in ((lower, clients[0].train), (upper, clients[0].val))
            )
            x_i, y_i = x_i - 0.1 * 0.5 * (g_x + f_x), y_i - 0.2 * 0.5 * (g_y + f_y)
        dy = dy + (y_i["y"] - y["y"]) / 2
    method = FedAvg(lr_x=0.1, lr_y=0.2, episode_steps=3, server_lr=0.6)
    after = run(problem, clients, method, environment={"local_steps": 2})
    torch.testing.assert_close(
        after.state.x["x"], x["x"] + 0.6 * (x_i["x"] - x["x"]), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(after.state.y["y"], y["y"] + 0.6 * dy, rtol=0, atol=1e-12)
    assert after.fed.ledger.totals()["gradients"] == 2 * 3 * 2
    still = run(problem, clients, dataclasses.replace(method, train="y"))
    assert torch.equal(still.state.x["x"], x["x"])


def test_fedmbo_on_episodes_is_one_of_its_chains() -> None:
    """T = 2 steps on y from the shared start, then a chain of 0, 1 or 2 factors, each as likely."""
    task = fb.tasks.load("quadratic", clients=1, condition=3.0, seed=2)
    problem = dataclasses.replace(task.problem, lower_level="private")
    A, B, c, e, t, D = (part[0] for part in (*task.clients[0].train, *task.clients[0].val))
    y = torch.zeros_like(c)
    for _ in range(2):
        y = y - 0.4 * (A @ y - c)
    chains, r = [], 0.5 * 3 * (y - e)
    for _ in range(3):
        chains.append(-0.1 * (-t + D.T @ y + B.T @ r))
        r = r - 0.5 * A @ r
    method, met = FedMBO(lr_x=0.1, lr_y=0.4, neumann_lr=0.5, neumann_steps=3, inner_rounds=2), []
    for seed in range(12):
        after = run(problem, task.clients, method, seed=seed)
        torch.testing.assert_close(after.state.y["y"], y, rtol=0, atol=1e-12)
        met.append(min(range(3), key=lambda k: float((after.state.x["x"] - chains[k]).norm())))
        torch.testing.assert_close(after.state.x["x"], chains[met[-1]], rtol=0, atol=1e-12)
    assert set(met) == {0, 1, 2}
    totals = after.fed.ledger.totals()
    assert (totals["rounds"], totals["gradients"]) == (1, 2 + 1 + 2 * 2 + 1 + 2)
