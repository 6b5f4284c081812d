"""Tasks with a linear classifier on breast-cancer data, in float64, for closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev

import fedbilevel as fb
from fedbilevel.core import rng
from fedbilevel.core.tree import dot, flatten, unflatten

KEY = rng.root(0, "test")


def load_in_double(name: str, **options: Any) -> tuple[fb.Problem, list[fb.ClientData]]:
    """Return the problem and the clients of a task in float64, at a random x and y.

    Breast-cancer data have few features and two classes, so that y is small.
    """
    arguments = {"samples": 60, "clients": 3, **options}
    task = fb.tasks.load(name, data="breast-cancer", **arguments)
    x, y = (
        tree.map(lambda t: rng.normal(KEY, t.shape, torch.float64)) for tree in task.problem.start
    )
    clients = []
    for client in task.clients:
        train = tuple(map(_to_double, client.train))
        val = tuple(map(_to_double, client.val))
        clients.append(fb.ClientData(train=train, val=val))
    return replace(task.problem, x=x, y=y), clients


def _to_double(values: Any) -> Any:
    return values.double() if values.is_floating_point() else values


def check_strong_convexity(name: str) -> None:
    """Check that the ridge is the least curvature of the lower level in y, whatever x."""
    ridge = 1e-3
    problem, clients = load_in_double(name, ridge=ridge)
    x, y = problem.start
    gradient = grad(problem.lower, argnums=1)
    for point in (x, x.map(lambda t: torch.full_like(t, -50.0))):

        def flat_gradient(v: Tensor, x: fb.Tree = point) -> Tensor:
            return flatten(gradient(x, unflatten(v, y), clients[0].train, KEY))

        hessian = jacrev(flat_gradient)(flatten(y))
        assert float(torch.linalg.eigvalsh(hessian).min()) == pytest.approx(ridge)


def check_hypergradient(name: str) -> None:
    """Compare the hypergradient along a random direction with differences of the objective."""
    problem, clients = load_in_double(name, ridge=0.05)
    x, _ = problem.start
    hypergradient = fb.hypergradient(problem, clients, x)
    key = rng.root(1, "test")
    direction = hypergradient.map(lambda t: rng.normal(key, t.shape, torch.float64))
    expected = fb.finite_difference(problem, clients, x, direction)
    assert float(dot(hypergradient, direction)) == pytest.approx(expected, rel=1e-6)
