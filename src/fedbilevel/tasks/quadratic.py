"""Quadratic losses, whose solution is known in closed form; every method is checked on them.

g_i(x, y) = 1/2 y' A_i y - y' (B_i x + c_i),
f_i(x, y) = 1/2 ||y - e_i||^2 + 1/2 ||x - t_i||^2 + y' D_i x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData, client_weights
from fedbilevel.core.hypergradient import hypergradient
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, normal, root, uniform
from fedbilevel.core.tree import Tree, norm
from fedbilevel.tasks.task import Task

Weights = str | Sequence[float]


def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return g_i(x, y), from the means of A, B and c over a batch."""
    A, B, c = (part.mean(0) for part in batch)
    return 0.5 * y["y"] @ A @ y["y"] - y["y"] @ (B @ x["x"] + c)


def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return f_i(x, y), from the means of e, t and D over a batch."""
    e, t, D = (part.mean(0) for part in batch)
    return 0.5 * ((y["y"] - e) ** 2).sum() + 0.5 * ((x["x"] - t) ** 2).sum() + y["y"] @ D @ x["x"]


@dataclass(frozen=True)
class Quadratic(Task):
    """A quadratic task with its closed forms, for any client weights p."""

    def _means(self, weights: Weights) -> list[Tensor]:
        """Return A, B, c, e, t, D of the global losses: their weighted means over clients."""
        p = client_weights(weights, self.clients)
        per_client = []
        for w, client in zip(p, self.clients, strict=True):
            per_client.append([w * part.mean(0) for part in (*client.train, *client.val)])
        return [torch.stack(column).sum(0) for column in zip(*per_client, strict=True)]

    def y_star(self, x: Mapping[str, Tensor], weights: Weights = "uniform") -> Tree:
        """Return y*(x) = A^-1 (B x + c)."""
        A, B, c, *_ = self._means(weights)
        return Tree(y=torch.linalg.solve(A, B @ x["x"] + c))

    def phi(self, x: Mapping[str, Tensor], weights: Weights = "uniform") -> Tensor:
        """Return Phi(x) = F(x, y*(x)), including the terms that do not depend on x."""
        y = self.y_star(x, weights)
        p = client_weights(weights, self.clients)
        losses = [upper(Tree(x), y, client.val) for client in self.clients]  # type: ignore[arg-type]
        return torch.stack([w * loss for w, loss in zip(p, losses, strict=True)]).sum()

    def gradient(self, x: Mapping[str, Tensor], weights: Weights = "uniform") -> Tree:
        """Return grad Phi(x) = x - t + D' y + B' A^-1 (y - e + D x) at y = y*(x)."""
        A, B, _, e, t, D = self._means(weights)
        y = self.y_star(x, weights)["y"]
        return Tree(x=x["x"] - t + D.T @ y + B.T @ torch.linalg.solve(A, y - e + D @ x["x"]))

    def x_star(self, weights: Weights = "uniform") -> Tree:
        """Return the minimiser of Phi.

        With M = A^-1 B and m = A^-1 c it solves (I + M'M + D'M + M'D) x = t + M'(e - m) - D'm.
        """
        A, B, c, e, t, D = self._means(weights)
        M = torch.linalg.solve(A, B)
        m = torch.linalg.solve(A, c)
        H = torch.eye(len(t), dtype=t.dtype) + M.T @ M + D.T @ M + M.T @ D
        return Tree(x=torch.linalg.solve(H, t + M.T @ (e - m) - D.T @ m))


def quadratic(
    *,
    clients: int = 8,
    dim_x: int = 5,
    dim_y: int = 4,
    condition: float = 10.0,
    heterogeneity: float = 1.0,
    samples: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    dtype: str = "float64",
) -> Quadratic:
    """Build the quadratic task.

    Args:
        clients: The number of clients.
        dim_x: The dimension of x.
        dim_y: The dimension of y.
        condition: The eigenvalues of every A_i are in [1/condition, 1].
        heterogeneity: From 0 (all clients have the same losses) to 1 (drawn independently).
        samples: Training samples, and validation samples, per client.
        noise: The standard deviation of the samples' vectors around those of their client.
        seed: The seed of everything that is drawn.
        dtype: "float32" or "float64".

    Returns:
        The task with its closed forms. Its metric: `hypergradient_norm`.

    Raises:
        ValueError: An argument is out of range.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> float(task.gradient(task.x_star())["x"].norm()) < 1e-12
        True
    """
    checks.integer("clients", clients, least=1)
    checks.integer("dim_x", dim_x, least=1)
    checks.integer("dim_y", dim_y, least=1)
    checks.integer("samples", samples, least=1)
    if not 0 <= checks.number("heterogeneity", heterogeneity) <= 1:
        raise ValueError(f"heterogeneity is {heterogeneity}; it must be in [0, 1]")
    if checks.number("condition", condition) < 1:
        raise ValueError(f"condition is {condition}; it must be at least 1")
    checks.non_negative("noise", noise)
    tensor_dtype = getattr(torch, checks.one_of("dtype", dtype, ("float32", "float64")))

    def draw(client: int) -> list[Tensor]:
        """Return A, B, c, e, t, D of one client."""
        key = fold_in(root(seed, "quadratic"), client)
        Q, _ = torch.linalg.qr(normal(fold_in(key, 0), (dim_y, dim_y), torch.float64))
        spread = uniform(fold_in(key, 1), (dim_y,), torch.float64)
        spread[0] = 0.0
        spread[-1] = 1.0
        shapes = [(dim_y, dim_x), (dim_y,), (dim_y,), (dim_x,), (dim_y, dim_x)]
        scales = [0.5 / condition**0.5, 1.0, 1.0, 1.0, 0.1]
        parts = [Q @ torch.diag(condition ** -(1 - spread)) @ Q.T]
        for j, (shape, scale) in enumerate(zip(shapes, scales, strict=True)):
            parts.append(scale * normal(fold_in(key, 2 + j), shape, torch.float64))
        return parts

    common = draw(clients)  # a number that no client has
    client_data = []
    for client in range(clients):
        parts = []
        for j, (shared, own) in enumerate(zip(common, draw(client), strict=True)):
            part = (1 - heterogeneity) * shared + heterogeneity * own
            stack = part.expand(samples, *part.shape)
            if part.ndim == 1:
                key = fold_in(fold_in(root(seed, "quadratic samples"), client), j)
                stack = stack + noise * normal(key, stack.shape, torch.float64)
            parts.append(stack.to(tensor_dtype).contiguous())
        client_data.append(ClientData(train=tuple(parts[:3]), val=tuple(parts[3:])))
    problem = Problem(
        upper=upper,
        lower=lower,
        x={"x": torch.zeros(dim_x, dtype=tensor_dtype)},
        y={"y": torch.zeros(dim_y, dtype=tensor_dtype)},
    )

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        gradient = hypergradient(problem, client_data, x.map(Tensor.cpu))
        return {"hypergradient_norm": float(norm(gradient))}

    return Quadratic(problem, client_data, evaluate)
