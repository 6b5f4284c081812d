"""What each algorithm must be, written by hand: its update on one client, its costs, and settings for the yardstick.

A registered algorithm without an entry here fails the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Matrices = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # A, B, c, e, t, D of tasks.quadratic


@dataclass(frozen=True)
class Case:
    """`settings` converge on the quadratic; `centralised` is the update with one client, typed out by hand.

    `cost` gives (rounds, bytes_down, bytes_up, gradients) of one iteration, from the cohort's steps and the bytes of x
    and of y.
    """

    settings: dict[str, Any]
    centralised: Callable[[Matrices, dict[str, Any], int, int], tuple[Tensor, Tensor]]
    cost: Callable[[Sequence[int], int, int], tuple[int, int, int, int]]
    rounds: int = 400


def directions(m: Matrices, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d_x, d_y, d_z of the quadratic."""
    A, B, c, e, t, D = m
    return x - t + D.T @ y + B.T @ z, A @ y - B @ x - c, A @ z - (y - e + D @ x)


def ball(z: Tensor, radius: float) -> Tensor:
    return z if z.norm() <= radius else z * radius / z.norm()


def simfbo(m: Matrices, h: dict[str, Any], steps: int, iterations: int) -> tuple[Tensor, Tensor]:
    x, y, z = torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])
    for _ in range(iterations):
        lx, ly, lz = x, y, z
        qx, qy, qz = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(z)
        for _ in range(steps):
            dx, dy, dz = directions(m, lx, ly, lz)
            dz = dz + h["damping"] * lz
            lx, ly, lz = lx - h["lr_x"] * dx, ly - h["lr_y"] * dy, lz - h["lr_z"] * dz
            qx, qy, qz = qx + dx, qy + dy, qz + dz
        x, y = x - h["server_lr_x"] * qx, y - h["server_lr_y"] * qy
        z = ball(z - h["server_lr_z"] * qz, h["radius"])
    return x, y


def adaptive(storm: bool) -> Callable[[Matrices, dict[str, Any], int, int], tuple[Tensor, Tensor]]:
    def run(m: Matrices, h: dict[str, Any], steps: int, iterations: int) -> tuple[Tensor, Tensor]:
        server = [torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])]
        norms, beta = [0.0, 0.0, 0.0], h["momentum_weight"]
        for _ in range(iterations):
            local, moments = list(server), list(directions(m, *server))
            total = [torch.zeros_like(v) for v in server]
            for _ in range(steps):
                total = [q + v for q, v in zip(total, moments, strict=True)]
                old = directions(m, *local)
                local = [v - h[f"lr_{n}"] * u for v, u, n in zip(local, moments, "xyz", strict=True)]
                new = directions(m, *local)
                if storm:
                    moments = [d + (1 - beta) * (v - o) for d, v, o in zip(new, moments, old, strict=True)]
                else:
                    moments = [beta * d + (1 - beta) * v for d, v in zip(new, moments, strict=True)]
            for j, n in enumerate("xyz"):
                mean = total[j] / steps
                norms[j] = h["norm_decay"] * norms[j] + (1 - h["norm_decay"]) * float(mean.norm())
                low, high = h[f"server_lr_{n}_bounds"]
                gamma = min(max(h[f"server_lr_{n}"] / (norms[j] + h["norm_floor"]), low), high)
                server[j] = server[j] - steps * gamma * mean
            server[2] = ball(server[2], h["radius"])
        return server[0], server[1]

    return run


def one_round(evaluations: Callable[[int], int]) -> Callable[[Sequence[int], int, int], tuple[int, int, int, int]]:
    """x, y and z down, their three directions up, once; a fused evaluation counts 3."""

    def cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
        sent = len(steps) * (x + 2 * y)
        return 1, sent, sent, sum(3 * evaluations(tau) for tau in steps)

    return cost


_SINGLE_LOOP = {
    "lr_x": 0.02,
    "lr_y": 0.1,
    "lr_z": 0.1,
    "damping": 0.0,
    "radius": 100.0,
    "server_lr_x": 0.06,
    "server_lr_y": 0.4,
    "server_lr_z": 0.4,
}
_ADAPTIVE = _SINGLE_LOOP | {
    "server_lr_x_bounds": (0.06, 0.1),
    "server_lr_y_bounds": (0.3, 0.4),
    "server_lr_z_bounds": (0.3, 0.4),
    "momentum_weight": 0.6,
    "norm_decay": 0.5,
    "norm_floor": 0.01,
}

CASES = {
    "simfbo": Case(_SINGLE_LOOP, simfbo, one_round(lambda tau: tau)),
    # With one client and equal steps ShroFBO is SimFBO: rho h = tau (q / tau).
    "shrofbo": Case(_SINGLE_LOOP, simfbo, one_round(lambda tau: tau)),
    "asfbo": Case(_ADAPTIVE, adaptive(storm=False), one_round(lambda tau: tau)),
    "la-asfbo": Case(_ADAPTIVE, adaptive(storm=True), one_round(lambda tau: 2 * tau - 1)),
}
