"""MAML: its gradients against finite differences and against autograd by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

import fedbilevel as fb
from fedbilevel.algorithms import MAML
from fedbilevel.core.tree import Tree
from tests.support.episodes import curved, lower, run, upper


def adapted(x: Tree, y: Tree, client: fb.ClientData, steps: int) -> tuple[Tree, Tree]:
    """x and y after some steps of size 0.2 on the client's lower loss."""
    for _ in range(steps):
        g_x, g_y = grad(lower, argnums=(0, 1))(x, y, client.train)
        x = x - 0.2 * g_x
        y = y - 0.2 * g_y
    return x, y


def test_maml_is_the_derivative_through_its_steps() -> None:
    problem, clients = curved()
    x, y = problem.start

    def outer(x: Tree, y: Tree) -> Tensor:
        losses = [upper(*adapted(x, y, client, 3), client.val) for client in clients]
        return torch.stack(losses).mean()

    after = run(problem, clients, MAML(lr_x=1.0, lr_y=1.0, inner_lr=0.2, inner_steps=3))
    v = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    h = 1e-5
    rise_x = outer(Tree(x=x["x"] + h * v), y) - outer(Tree(x=x["x"] - h * v), y)
    rise_y = outer(x, Tree(y=y["y"] + h * v)) - outer(x, Tree(y=y["y"] - h * v))
    moved_x = after.state.x["x"] - x["x"]
    moved_y = after.state.y["y"] - y["y"]
    assert float(-moved_x @ v) == pytest.approx(float(rise_x / (2 * h)), rel=1e-6)
    assert float(-moved_y @ v) == pytest.approx(float(rise_y / (2 * h)), rel=1e-6)
    assert after.fed.ledger.totals()["gradients"] == len(clients) * (3 * 3 + 1)


def test_first_order_maml_takes_the_gradient_at_the_end() -> None:
    problem, clients = curved()
    x, y = problem.start
    d_x = torch.zeros(3, dtype=torch.float64)
    d_y = torch.zeros(3, dtype=torch.float64)
    for client in clients:
        f_x, f_y = grad(upper, argnums=(0, 1))(*adapted(x, y, client, 2), client.val)
        d_x = d_x + f_x["x"] / 2
        d_y = d_y + f_y["y"] / 2
    method = MAML(lr_x=0.3, lr_y=0.4, inner_lr=0.2, inner_steps=2, first_order=True)
    after = run(problem, clients, method)
    torch.testing.assert_close(after.state.x["x"], x["x"] - 0.3 * d_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.state.y["y"], y["y"] - 0.4 * d_y, rtol=0, atol=1e-12)
    assert after.fed.ledger.totals()["gradients"] == len(clients) * (2 + 1)
