"""What each algorithm must be, written by hand: its update on one client, its costs, and settings for the yardstick.

A registered algorithm without an entry here fails the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fedbilevel as fb

Matrices = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]  # A, B, c, e, t, D of tasks.quadratic


Draw = Callable[[int], int]
Centralised = Callable[[Matrices, dict[str, Any], int, int, Draw], tuple[Tensor, Tensor]]
Cost = Callable[[Sequence[int], int, int], tuple[int, int, int, int]]


@dataclass(frozen=True)
class Case:
    """What is known of one method beforehand.

    settings: converge on the quadratic. centralised: the update with one client, typed out by hand. cost: (rounds,
    bytes_down, bytes_up, gradients) of one iteration, from the cohort's steps and the bytes of x and of y; None where
    it is drawn, and tested by itself. once: what the first iteration costs more (4 clients, 3 numbers in x, 2 in y).
    tolerance: how close a run of so many rounds comes, relative to the hypergradient at the start (a randomised
    estimator is noisy). goal: where a method goes that does not go to the true solution, in closed form; x, or x and y
    where its y is not the y*(x) of all clients.
    """

    settings: dict[str, Any]
    centralised: Centralised
    cost: Cost | None
    once: tuple[int, int, int, int] = (0, 0, 0, 0)
    rounds: int = 400
    tolerance: float = 1e-6
    goal: Callable[[Any, dict[str, Any]], Tensor | tuple[Tensor, Tensor]] | None = None


def directions(m: Matrices, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d_x, d_y, d_z of the quadratic."""
    A, B, c, e, t, D = m
    return x - t + D.T @ y + B.T @ z, A @ y - B @ x - c, A @ z - (y - e + D @ x)


def ball(z: Tensor, radius: float) -> Tensor:
    return z if z.norm() <= radius else z * radius / z.norm()


def simfbo(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
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


def afbo(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """With one client, no delay and K = 1: the mean of the directions along the local path."""
    x, y, z = torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])
    for _ in range(iterations):
        lx, ly, lz, path = x, y, z, []
        for _ in range(steps):
            path.append(directions(m, lx, ly, lz))
            dx, dy, dz = path[-1]
            lx, ly, lz = lx - h["lr_x"] * dx, ly - h["lr_y"] * dy, lz - h["lr_z"] * dz
        hx, hy, hz = (torch.stack(d).mean(0) for d in zip(*path, strict=True))
        x, y, z = (
            x - h["server_lr_x"] * hx,
            y - h["server_lr_y"] * hy,
            ball(z - h["server_lr_z"] * hz, h["radius"]),
        )
    return x, y


def afl(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """With one client: the mean of its own directions along the local path."""
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        lx, ly, path = x, y, []
        for _ in range(steps):
            path.append(local_gradients(m, h | {"neumann_steps": h["neumann_steps"] + 1}, lx, ly))
            lx, ly = lx - h["lr_x"] * path[-1][0], ly - h["lr_y"] * path[-1][1]
        hx, hy = (torch.stack(d).mean(0) for d in zip(*path, strict=True))
        x, y = x - h["server_lr_x"] * hx, y - h["server_lr_y"] * hy
    return x, y


def adaptive(storm: bool) -> Centralised:
    def run(
        m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        server = [torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])]
        norms, beta = [0.0, 0.0, 0.0], h["momentum_weight"]
        for _ in range(iterations):
            local, moments = list(server), list(directions(m, *server))
            total = [torch.zeros_like(v) for v in server]
            for _ in range(steps):
                total = [q + v for q, v in zip(total, moments, strict=True)]
                old = directions(m, *local)
                local = [
                    v - h[f"lr_{n}"] * u for v, u, n in zip(local, moments, "xyz", strict=True)
                ]
                new = directions(m, *local)
                if storm:
                    moments = [
                        d + (1 - beta) * (v - o) for d, v, o in zip(new, moments, old, strict=True)
                    ]
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


def unifbo(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """On vectors: AdaGrad-Norm with momentum, its length that of the vector of ones; full batches are alike."""
    point = [torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])]
    moments, sums, w = [torch.zeros_like(v) for v in point], [0.0, 0.0, 0.0], h["momentum_weight"]
    for _ in range(iterations):
        for j, d in enumerate(directions(m, *point)):
            moments[j] = (1 - w) * moments[j] + w * d
            sums[j] += float(d @ d)
            point[j] = (
                point[j] - h[f"lr_{'xyz'[j]}"] * (len(d) / sums[j] / (1 + 1e-6)) ** 0.5 * moments[j]
            )
        point[2] = ball(point[2], h["radius"])
    return point[0], point[1]


def one_round(evaluations: Callable[[int], int]) -> Cost:
    """x, y and z down, their three directions up, once; a fused evaluation counts 3."""

    def cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
        sent = len(steps) * (x + 2 * y)
        return 1, sent, sent, sum(3 * evaluations(tau) for tau in steps)

    return cost


def masked_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """As FedAvg, and a byte more for each of the numbers sent, which have 8."""
    sent = len(steps) * (x + y)
    return 1, sent + sent // 8, sent, sum(steps)


def lower_round(m: Matrices, h: dict[str, Any], x: Tensor, y: Tensor, steps: int) -> Tensor:
    """With one client and full batches the correction vanishes: plain gradient steps."""
    A, B, c, *_ = m
    for _ in range(steps):
        y = y - h["lr_y"] * (A @ y - B @ x - c)
    return y


def upper_round(
    m: Matrices, h: dict[str, Any], x: Tensor, y: Tensor, p: Tensor, steps: int
) -> Tensor:
    """x_v moves along h - grad_x f(x, y) + grad_x f(x_v, y); for this f the difference is x_v - x."""
    _, B, _, _, t, D = m
    start, direction = x, x - t + D.T @ y + B.T @ p
    for _ in range(steps):
        x = x - h["lr_x"] * (direction + x - start)
    return x


def upper_gradient_y(m: Matrices, x: Tensor, y: Tensor) -> Tensor:
    return y - m[3] + m[5] @ x


def neumann(A: Tensor, v: Tensor, lr: float, steps: int) -> Tensor:
    term = total = v
    for _ in range(steps):
        term = term - lr * A @ term
        total = total + term
    return lr * total


def fednest(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        for _ in range(h["inner_rounds"]):
            y = lower_round(m, h, x, y, steps)
        p = neumann(m[0], upper_gradient_y(m, x, y), h["neumann_lr"], h["neumann_steps"])
        x = upper_round(m, h, x, y, p, steps)
    return x, y


def lfednest(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """The local hypergradient is renewed at every local step."""
    _, B, _, _, t, D = m
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        for _ in range(h["inner_rounds"]):
            y = lower_round(m, h, x, y, steps)
        for _ in range(steps):
            p = neumann(m[0], upper_gradient_y(m, x, y), h["neumann_lr"], h["neumann_steps"])
            x = x - h["lr_x"] * (x - t + D.T @ y + B.T @ p)
    return x, y


def aggitd(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    A, lam, N = m[0], h["neumann_lr"], h["inner_rounds"]
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        Q = draw(N + 1)
        path = [y]
        for _ in range(N):
            path.append(lower_round(m, h, x, path[-1], steps))
        z = upper_gradient_y(m, x, path[Q])
        for _ in range(Q + 1, N + 1):
            z = z - lam * A @ z
        y = path[N]
        x = upper_round(m, h, x, y, lam * (N + 1) * z, steps)
    return x, y


def fedavg(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        y = y + h["server_lr"] * (lower_round(m, h, x, y, steps) - y)
    return x, y


def fedbio(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """With one client there is nothing to average: steps times iterations steps, z projected at each."""
    x, y, z = torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])
    for _ in range(steps * iterations):
        dx, dy, dz = directions(m, x, y, z)
        x, y, z = x - h["lr_x"] * dx, y - h["lr_y"] * dy, ball(z - h["lr_z"] * dz, h["radius"])
    return x, y


def fedbioacc(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """With one client the second exchange renews the momenta where a local step would."""
    x, y, z = torch.zeros_like(m[4]), torch.zeros_like(m[2]), torch.zeros_like(m[2])
    moments = directions(m, x, y, z)
    for _ in range(steps * iterations):
        old = directions(m, x, y, z)
        mx, my, mz = moments
        x, y, z = x - h["lr_x"] * mx, y - h["lr_y"] * my, ball(z - h["lr_z"] * mz, h["radius"])
        new, keep = directions(m, x, y, z), 1 - h["momentum_weight"]
        moments = tuple(n + keep * (v - o) for n, v, o in zip(new, moments, old, strict=True))  # type: ignore[assignment]
    return x, y


def fedbioacc_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """Down: the point and its momenta, then the new point; up: two changes of three. Every renewal evaluates twice."""
    sent = len(steps) * (x + 2 * y)
    return 2, 3 * sent, 2 * sent, 2 * 3 * sum(steps)


def mean_of_local_hypergradients(task: Any, h: dict[str, Any]) -> Tensor:
    """Where sum_i h_i(x, y*(x)) = 0, each h_i with its client's own truncated Neumann sum: linear in x, so solved."""
    parts = [[part.mean(0) for part in (*client.train, *client.val)] for client in task.clients]

    def total(x: Tensor) -> Tensor:
        y = task.y_star({"x": x})["y"]
        local = [
            (m, neumann(m[0], upper_gradient_y(m, x, y), h["neumann_lr"], h["neumann_steps"]))
            for m in parts
        ]  # type: ignore[arg-type]
        return torch.stack([x - m[4] + m[5].T @ y + m[1].T @ p for m, p in local]).mean(0)

    return root(total, len(task.problem.x["x"]))


def root(affine: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Where an affine function is 0."""
    at_zero = affine(torch.zeros(size, dtype=torch.float64))
    columns = torch.stack(
        [affine(e) - at_zero for e in torch.eye(size, dtype=torch.float64)], dim=1
    )
    return torch.linalg.solve(columns, -at_zero)


def fednest_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """T = 2, N = 25: gradient and lower round T times, start, N products, hypergradient, upper round."""
    n, T, N, tau = len(steps), 2, 25, sum(steps)
    down = T * ((x + y) + (x + 2 * y)) + (x + y) + N * (x + 2 * y) + (x + 2 * y) + (2 * x + y)
    up = T * (y + y) + y + N * y + x + x
    gradients = T * (n + 2 * (tau - n)) + n + 2 * n * N + 3 * n + 2 * (tau - n)
    return 2 * T + N + 3, n * down, n * up, gradients


def lfednest_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """T = 2, N = 5: two plain lower rounds, one local upper round."""
    n, T, N, tau = len(steps), 2, 5, sum(steps)
    return T + 1, n * (T + 1) * (x + y), n * (T * y + x), T * tau + tau * (1 + 2 * N + 3)


def fedmbo(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    """One chain; every choice of a client draws, though there is one client to choose."""
    A, B, _, _, t, D = m
    lam, N = h["neumann_lr"], h["neumann_steps"]
    x, y = torch.zeros_like(t), torch.zeros_like(m[2])
    for _ in range(iterations):
        y = lower_round(m, h, x, y, h["inner_rounds"])
        length, _ = draw(N), draw(1)
        r = lam * N * upper_gradient_y(m, x, y)
        for _ in range(length):
            r, _ = r - lam * A @ r, draw(1)
        draw(1)
        x = x - h["lr_x"] * (x - t + D.T @ y + B.T @ r)
    return x, y


def rabo(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    A, B, _, _, t, D = m
    x, y = torch.zeros_like(t), torch.zeros_like(m[2])
    for _ in range(iterations):
        y = lower_round(m, h, x, y, steps)
        p = neumann(A, upper_gradient_y(m, x, y), h["neumann_lr"], h["neumann_steps"] - 1)
        x = x - h["lr_x"] * (x - t + D.T @ y + B.T @ p)
    return x, y


def rabo_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """N = 5: a lower round; grad_y f, 4 products and the fused hypergradient, which counts 3."""
    n = len(steps)
    return 2, n * 2 * (x + y), n * (x + y), sum(steps) + n * (1 + 2 * 4 + 3)


def adapted_gradients(
    m: Matrices, h: dict[str, Any], x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """MAML with one inner step: grad f at x1 = x + a B'y, y1 = y - a (A y - B x - c), taken back to (x, y)."""
    A, B, c, e, t, D = m
    a = h["inner_lr"]
    x1, y1 = x + a * B.T @ y, y - a * (A @ y - B @ x - c)
    f_x, f_y = x1 - t + D.T @ y1, y1 - e + D @ x1
    return f_x + a * B.T @ f_y, f_y + a * (B @ f_x - A @ f_y)


def maml(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    for _ in range(iterations):
        d_x, d_y = adapted_gradients(m, h, x, y)
        x, y = x - h["lr_x"] * d_x, y - h["lr_y"] * d_y
    return x, y


def where_maml_ends(task: Any, h: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Where the mean of the clients' adapted gradients is 0."""
    parts: list[Any] = [
        [part.mean(0) for part in (*client.train, *client.val)] for client in task.clients
    ]
    sizes = [len(parts[0][4]), len(parts[0][2])]

    def residual(w: Tensor) -> Tensor:
        return torch.stack(
            [torch.cat(adapted_gradients(m, h, *w.split(sizes))) for m in parts]
        ).mean(0)

    x, y = root(residual, sum(sizes)).split(sizes)
    return x, y


def local_gradients(m: Matrices, h: dict[str, Any], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The local hypergradient with J terms, and the lower gradient."""
    A, B, c, _, t, D = m
    p = neumann(A, upper_gradient_y(m, x, y), h["neumann_lr"], h["neumann_steps"] - 1)
    return x - t + D.T @ y + B.T @ p, A @ y - B @ x - c


def localbsg(storm: bool) -> Centralised:
    def run(
        m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        w = h["momentum_weight"]
        x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
        u, v = local_gradients(m, h, x, y)
        for _ in range(steps * iterations):
            old = local_gradients(m, h, x, y)
            if storm:
                x, y = x - h["lr_x"] * u, y - h["lr_y"] * v
                new = local_gradients(m, h, x, y)
                u, v = new[0] + (1 - w) * (u - old[0]), new[1] + (1 - w) * (v - old[1])
            else:
                u, v = (1 - w) * u + w * old[0], (1 - w) * v + w * old[1]
                x, y = x - h["lr_x"] * u, y - h["lr_y"] * v
        return x, y

    return run


def adafbio(
    m: Matrices, h: dict[str, Any], steps: int, iterations: int, draw: Draw
) -> tuple[Tensor, Tensor]:
    w, decay, floor = h["momentum_weight"], h["norm_decay"], h["norm_floor"]
    x, y = torch.zeros_like(m[4]), torch.zeros_like(m[2])
    u, v = local_gradients(m, h, x, y)
    a, b = torch.zeros_like(x), 0.0
    for _ in range(iterations):
        a, b = decay * a + (1 - decay) * u * u, decay * b + (1 - decay) * float(v.norm())
        for _ in range(steps):
            old = local_gradients(m, h, x, y)
            x, y = x - h["lr_x"] * u / (a.sqrt() + floor), y - h["lr_y"] * v / (b + floor)
            new = local_gradients(m, h, x, y)
            u, v = new[0] + (1 - w) * (u - old[0]), new[1] + (1 - w) * (v - old[1])
    return x, y


def adafbio_cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
    """As LocalBSGVR, with a vector and a number more on the way down."""
    rounds, down, up, gradients = localbsg_cost(2)(steps, x, y)
    return rounds, down + len(steps) * (x + 8), up, gradients


def localbsg_cost(evaluations: int) -> Cost:
    """J = 5: an evaluation is grad_y f, 4 products, grad_x f, a cross-product and grad_y g."""

    def cost(steps: Sequence[int], x: int, y: int) -> tuple[int, int, int, int]:
        sent = len(steps) * 2 * (x + y)
        return 1, sent, sent, evaluations * (1 + 2 * 4 + 1 + 2 + 1) * sum(steps)

    return cost


def fewer_terms(task: Any, h: dict[str, Any]) -> Tensor:
    """J terms are J - 1 products."""
    return mean_of_local_hypergradients(task, h | {"neumann_steps": h["neumann_steps"] - 1})


def settle(
    parts: Sequence[Matrices],
    w: Sequence[float],
    h: dict[str, Any],
    x: Tensor,
    ys: list[Tensor],
    y: Tensor,
) -> tuple[list[Tensor], Tensor]:
    """Where `plane_steps` steps on the lower level, with consensus as a penalty, lead; only the y_i depend on x."""
    phis = [torch.zeros_like(y) for _ in parts]
    for _ in range(h["plane_steps"]):
        slopes = [A @ yi - B @ x - c for (A, B, c, *_), yi in zip(parts, ys, strict=True)]
        ys = [
            yi - h["lr_y"] * (g + phi + h["penalty"] * (yi - y))
            for yi, g, phi in zip(ys, slopes, phis, strict=True)
        ]
        gaps = [yi.detach() - y for yi in ys]
        pull = [wi * (phi + h["penalty"] * gap) for wi, phi, gap in zip(w, phis, gaps, strict=True)]
        phis = [phi + h["lr_y"] * gap for phi, gap in zip(phis, gaps, strict=True)]
        y = y + h["server_lr_y"] * torch.stack(pull).sum(0)
    return ys, y


def cutting_planes(
    parts: Sequence[Matrices], w: Sequence[float], h: dict[str, Any], iterations: int
) -> tuple[Tensor, Tensor]:
    """Everyone in every iteration; a by automatic differentiation."""
    x, y, n = torch.zeros_like(parts[0][4]), torch.zeros_like(parts[0][2]), range(len(parts))
    xs, ys, thetas = [x for _ in n], [y for _ in n], [x for _ in n]
    planes: list[tuple[Tensor, list[Tensor], Tensor, Tensor]] = []
    lam: list[float] = []
    for iteration in range(iterations):
        for i, (_, _, _, e, t, D) in enumerate(parts):
            push = sum(
                (k * b[i] for k, (_, b, _, _) in zip(lam, planes, strict=True)), torch.zeros_like(y)
            )
            xi, yi = xs[i], ys[i]
            xs[i] = xi - h["lr_x"] * (xi - t + D.T @ yi + thetas[i])
            ys[i] = yi - h["lr_y"] * (yi - e + D @ xi + push)
        for k, (a, _, c, _) in zip(lam, planes, strict=True):
            x, y = x - h["server_lr_x"] * k * a, y - h["server_lr_y"] * k * c
        x = x + h["server_lr_x"] * sum(w[i] * thetas[i] for i in n)
        for j, (a, b, c, kappa) in enumerate(planes):
            value = a @ x + c @ y + kappa + sum(w[i] * b[i] @ ys[i] for i in n)
            lam[j] = max(0.0, lam[j] + h["lr_dual_planes"] * (float(value) - h["c1"] * lam[j]))
        thetas = [thetas[i] + h["lr_dual_consensus"] * (xs[i] - x - h["c2"] * thetas[i]) for i in n]
        if iteration % h["plane_every"] == 0:
            kept = [j for j in range(len(lam)) if lam[j] >= h["prune_below"]]
            planes, lam = [planes[j] for j in kept], [lam[j] for j in kept]
            point = x.clone().requires_grad_()
            settled, mean = settle(parts, w, h, point, ys, y)
            own = torch.stack([w[i] * (ys[i] - settled[i]).square().sum() for i in n]).sum()
            (a,) = torch.autograd.grad(own, point)
            b, c = [2 * (ys[i] - settled[i].detach()) for i in n], 2 * (y - mean)
            height = own.detach() + (y - mean).square().sum()
            planes.append((a, b, c, height - a @ x - c @ y - sum(w[i] * b[i] @ ys[i] for i in n)))
            lam.append(0.0)
    return x, y


def where_planes_end(task: Any, h: dict[str, Any]) -> Tensor:
    """h = 0, so y_i = y'_i and y = y'; and sum_i (grad_x f_i - d2xy g_i q_i) = 0, q_i a Neumann sum of K terms."""
    parts: list[Any] = [
        [part.mean(0) for part in (*client.train, *client.val)] for client in task.clients
    ]
    (p, d), n = (len(parts[0][4]), len(parts[0][2])), len(parts)

    def residual(u: Tensor) -> Tensor:
        x, y, *ys = u.split([p, d] + [d] * n)
        settled, mean = settle(parts, [1.0] * n, h, x, ys, y)
        total = torch.zeros_like(x)
        for (A, B, _, e, t, D), yi in zip(parts, ys, strict=True):
            q = neumann(
                A + h["penalty"] * torch.eye(d), yi - e + D @ x, h["lr_y"], h["plane_steps"] - 1
            )
            total = total + x - t + D.T @ yi + B.T @ q
        return torch.cat(
            [total, y - mean, *(yi - there for yi, there in zip(ys, settled, strict=True))]
        )

    return root(residual, p + d + n * d)[:p]


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
_DOUBLE_LOOP = {"lr_y": 0.5, "neumann_lr": 1.0, "lower_steps": None, "upper_steps": None}
_NESTED = {"lr_x": 0.2, "inner_rounds": 2, "neumann_steps": 25, **_DOUBLE_LOOP}
_AGGITD = {"lr_x": fb.schedules.Power(0.1, 1.0, 20.0), "inner_rounds": 4, **_DOUBLE_LOOP}
_FEDMBO = {
    "lr_x": fb.schedules.Power(0.1, 1.0, 30.0),
    "lr_y": 0.5,
    "neumann_lr": 1.0,
    "neumann_steps": 8,
    "inner_rounds": 3,
}
_NEUMANN = {"neumann_lr": 1.0, "neumann_steps": 5, "truncation": "sum"}
_LOCALBSG = {"lr_x": 0.1, "lr_y": 0.5, "momentum_weight": 0.7, **_NEUMANN}
_ADAFBIO = _LOCALBSG | {"norm_decay": 0.6, "norm_floor": 1.0}
_RABO = {"lr_x": 0.2, "lr_y": 0.5, "lower_steps": None, "neumann_lr": 1.0, "neumann_steps": 5}
_BEGIN = (1, 4 * (24 + 16), 4 * (24 + 16), 4 * 13)

_PLANES = {
    "lr_x": 0.2,
    "lr_y": 0.4,
    "server_lr_x": 0.05,
    "server_lr_y": 0.025,
    "lr_dual_planes": 0.05,
    "lr_dual_consensus": 0.5,
    "c1": 0.05,
    "c2": 0.005,
    "penalty": 1.0,
    "plane_every": 10,
    "plane_steps": 2,
    "prune_below": 1e-10,
}
# 300 iterations and 30 planes. They come within 0.05 of where the planes end, and later swing (see the docstring).
_CUTTING_PLANES = Case(
    _PLANES,
    lambda m, h, steps, iterations, draw: cutting_planes([m], [1.0], h, iterations),
    cost=lambda steps, x, y: (1, len(steps) * (x + y), len(steps) * (x + y), len(steps)),
    once=(
        2,
        4 * (24 + 2 * 16 + 2 * 16),
        4 * (16 + 16 + 24),
        4 * (1 + 1 + 2 * 2),
    ),  # K = 2: settle, cut
    rounds=300 + 2 * 30,
    tolerance=0.01,
    goal=where_planes_end,
)

_FEDAVG = Case(
    {"lr_x": 0.1, "lr_y": 0.4, "server_lr": 0.9, "train": "y"},
    fedavg,
    cost=lambda steps, x, y: (1, len(steps) * (x + y), len(steps) * (x + y), sum(steps)),
    rounds=150,
    goal=lambda task, h: task.problem.x["x"],  # x is not trained, y goes to y*(x)
)

CASES = {
    "simfbo": Case(_SINGLE_LOOP, simfbo, one_round(lambda tau: tau)),
    # With one client and equal steps ShroFBO is SimFBO: rho h = tau (q / tau).
    "shrofbo": Case(_SINGLE_LOOP, simfbo, one_round(lambda tau: tau)),
    "asfbo": Case(_ADAPTIVE, adaptive(storm=False), one_round(lambda tau: tau)),
    "la-asfbo": Case(_ADAPTIVE, adaptive(storm=True), one_round(lambda tau: 2 * tau - 1)),
    "unifbo": Case(
        {
            "lr_x": 0.3,
            "lr_y": 0.5,
            "lr_z": 0.5,
            "momentum_weight": 0.6,
            "damping": 0.0,
            "radius": 100.0,
        },
        unifbo,
        one_round(lambda tau: tau),
        rounds=200,
    ),
    "afbo": Case(_SINGLE_LOOP, afbo, one_round(lambda tau: tau)),
    "afl": Case(
        {
            "lr_x": 0.1,
            "lr_y": 0.5,
            "server_lr_x": 0.1,
            "server_lr_y": 0.5,
            "neumann_lr": 1.0,
            "neumann_steps": 5,
        },
        afl,
        lambda steps, x, y: (
            1,
            len(steps) * (x + y),
            len(steps) * (x + y),
            (1 + 2 * 5 + 1 + 2 + 1) * sum(steps),
        ),
        rounds=200,
        goal=mean_of_local_hypergradients,
    ),
    "fednest": Case(_NESTED, fednest, fednest_cost, rounds=32 * 80),
    "lfednest": Case(
        _NESTED | {"neumann_steps": 5},
        lfednest,
        lfednest_cost,
        rounds=3 * 100,
        goal=mean_of_local_hypergradients,
    ),
    "fedbio": Case(
        {"lr_x": 0.06, "lr_y": 0.4, "lr_z": 0.4, "radius": 100.0},
        fedbio,
        one_round(lambda tau: tau),
    ),
    "fedbioacc": Case(
        {"lr_x": 0.06, "lr_y": 0.4, "lr_z": 0.4, "radius": 100.0, "momentum_weight": 0.7},
        fedbioacc,
        fedbioacc_cost,
        once=(1, 4 * (24 + 32), 4 * (24 + 32), 4 * 3),
        rounds=500,
    ),
    "rabo": Case(_RABO, rabo, rabo_cost, rounds=400, goal=fewer_terms),
    "rafbo": Case(
        _RABO | {"width": 1.0}, rabo, rabo_cost, rounds=400, goal=fewer_terms
    ),  # exact on quadratics
    "fedavg": _FEDAVG,
    # On quadratics, which have nothing to cut, they are FedAvg.
    **dict.fromkeys(
        ("static", "fedrolex", "oap-structured", "fiarse", "fiarse-structured"), _FEDAVG
    ),
    "oap": replace(
        _FEDAVG,
        cost=lambda steps, x, y: (
            1,
            len(steps) * (x + y) * 9 // 8,
            len(steps) * (x + y),
            sum(steps),
        ),
    ),
    "maml": Case(
        {"lr_x": 0.3, "lr_y": 0.3, "inner_lr": 0.2, "inner_steps": 1},
        maml,
        cost=lambda steps, x, y: (1, len(steps) * (x + y), len(steps) * (x + y), 4 * sum(steps)),
        goal=where_maml_ends,
    ),
    "aggitd": Case(_AGGITD, aggitd, cost=None, rounds=11 * 150, tolerance=0.1),
    "fedmbo": Case(_FEDMBO, fedmbo, cost=None, rounds=1500, tolerance=0.15),
    "adafbio": Case(_ADAFBIO, adafbio, adafbio_cost, _BEGIN, rounds=200, goal=fewer_terms),
    "localbsgm": Case(
        _LOCALBSG, localbsg(storm=False), localbsg_cost(1), _BEGIN, rounds=200, goal=fewer_terms
    ),
    "localbsgvr": Case(
        _LOCALBSG, localbsg(storm=True), localbsg_cost(2), _BEGIN, rounds=200, goal=fewer_terms
    ),
    "sdbo": _CUTTING_PLANES,
    "adbo": _CUTTING_PLANES,  # without delays and with everyone it is sdbo
}
