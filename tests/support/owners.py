"""Quadratic tasks whose x or y belongs to the clients, and their closed forms.

    g_i = 1/2 y' A_i y - y' (B_i x + c_i),
    f_i = 1/2 ||y - e_i||^2 + 1/2 ||x - t_i||^2 + y' D_i x,

with x_i or y_i in place of x or y. Everything is typed out with plain tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fedbilevel as fb
from tests.support.cases import client_means


def client_owned(level: str, **options: Any) -> Any:
    """A heterogeneous quadratic task whose x or y ("x" or "y") belongs to the clients."""
    options = {"clients": 5, "condition": 1.5, "heterogeneity": 1.0, "seed": 3, **options}
    task = fb.tasks.load("quadratic", **options)
    problem = dataclasses.replace(task.problem, owner={level: "client"})
    return dataclasses.replace(task, problem=problem, evaluate=lambda x, y: {})


def client_owned_x(clients: int, dim_x: int = 5, samples: int = 1, noise: float = 0.0) -> Any:
    """A task for experiments, by `module:function`."""
    return client_owned("x", clients=clients, dim_x=dim_x, samples=samples, noise=noise)


def client_owned_y(clients: int, dim_x: int = 5, samples: int = 1, noise: float = 0.0) -> Any:
    """A task for experiments, by `module:function`."""
    return client_owned("y", clients=clients, dim_x=dim_x, samples=samples, noise=noise)


def own_y_solution(task: Any, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """x* and the stack of y_i*(x*), where y belongs to the clients.

    y_i* = M_i x + m_i with M_i = A_i^-1 B_i and m_i = A_i^-1 c_i, so that x* solves
    sum p_i (I + M_i'M_i + D_i'M_i + M_i'D_i) x = sum p_i (t_i + M_i'(e_i - m_i) - D_i'm_i).
    """
    matrix: Any = 0
    right: Any = 0
    for p, (A, B, c, e, t, D) in zip(weights, client_means(task), strict=True):
        M = torch.linalg.solve(A, B)
        m = torch.linalg.solve(A, c)
        matrix = matrix + p * (torch.eye(len(t)).double() + M.T @ M + D.T @ M + M.T @ D)
        right = right + p * (t + M.T @ (e - m) - D.T @ m)
    x = torch.linalg.solve(matrix, right)
    ys = [torch.linalg.solve(A, B @ x + c) for A, B, c, *_ in client_means(task)]
    return x, torch.stack(ys)


def own_y_gradient(task: Any, x: Tensor, weights: Sequence[float]) -> Tensor:
    """grad Phi(x) = sum p_i (x - t_i + D_i'y_i + B_i' A_i^-1 (y_i - e_i + D_i x))."""
    total = torch.zeros_like(x)
    for p, (A, B, c, e, t, D) in zip(weights, client_means(task), strict=True):
        y = torch.linalg.solve(A, B @ x + c)
        total = total + p * (x - t + D.T @ y + B.T @ torch.linalg.solve(A, y - e + D @ x))
    return total


def own_x_gradient(task: Any, xs: Tensor, weights: Sequence[float]) -> Tensor:
    """The gradient of Phi in every x_i, as a stack: p_i (x_i - t_i + D_i'y + B_i'z).

    y = A^-1 sum p_i (B_i x_i + c_i) and z = A^-1 sum p_i (y - e_i + D_i x_i), A = sum p_i A_i.
    """
    parts = list(zip(weights, xs, client_means(task), strict=True))
    A = torch.stack([p * m[0] for p, _, m in parts]).sum(0)
    y = torch.linalg.solve(A, torch.stack([p * (m[1] @ x + m[2]) for p, x, m in parts]).sum(0))
    gaps = [p * (y - m[3] + m[5] @ x) for p, x, m in parts]
    z = torch.linalg.solve(A, torch.stack(gaps).sum(0))
    return torch.stack([p * (x - m[4] + m[5].T @ y + m[1].T @ z) for p, x, m in parts])


def own_x_solution(task: Any, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The stack of x_i* and y*, where x belongs to the clients."""
    n, p = len(task.clients), len(task.problem.x["x"])

    def gradient(flat: Tensor) -> Tensor:
        return own_x_gradient(task, flat.reshape(n, p), weights).flatten()

    start = torch.zeros(n * p, dtype=torch.float64)
    matrix = torch.func.jacrev(gradient)(start)
    xs = torch.linalg.solve(matrix, -gradient(start)).reshape(n, p)
    means = client_means(task)
    A = sum(w * m[0] for w, m in zip(weights, means, strict=True))
    right = sum(w * (m[1] @ x + m[2]) for w, x, m in zip(weights, xs, means, strict=True))
    return xs, torch.linalg.solve(A, right)


def personal(result: fb.Result, level: str, clients: int) -> Tensor:
    """What the clients own of "x" or "y", as a stack."""
    points = [dict(zip("xy", result.personal(i), strict=True)) for i in range(clients)]
    return torch.stack([point[level][level] for point in points])
