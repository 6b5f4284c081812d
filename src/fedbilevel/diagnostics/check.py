"""`check`: is a bilevel problem well posed, and how should it be run? Measured with products alone, on a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.hypergradient import line_search
from fedbilevel.core.linear import CG, MatVec
from fedbilevel.core.oracle import AnyBatch, Oracle
from fedbilevel.core.problem import Batch, ClientData, Problem, client_weights
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, dot, flatten, norm, zeros_like
from fedbilevel.diagnostics import soundness
from fedbilevel.diagnostics.advice import Measures, Report
from fedbilevel.diagnostics.soundness import random_unit
from fedbilevel.execution.lift import lifted, single, stacked
from fedbilevel.execution.losses import Losses
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client

CLIENTS, SAMPLES = 20, 2048  # at most so many are read
NUMBERS = 2**26  # that vectors kept at the same time may hold
POOLED = Batch()  # a sample has its own data


class Sample(Oracle):
    """The oracle of the pooled problem on some of its data: F, and G + ridge/2 ||y - y_0||^2 with y_0 the start."""

    def __init__(self, problem: Problem, losses: Losses) -> None:
        super().__init__(problem)
        self.client, self.groups, self.ridge = losses.oracle, losses.groups, 0.0

    def upper(self, x: Tree, y: Tree, batch: AnyBatch = POOLED) -> Tensor:
        return self._mean(lambda b: self.client.upper(x, y, b))

    def lower(self, x: Tree, y: Tree, batch: AnyBatch = POOLED) -> Tensor:
        way = y - self.problem.start[1]
        return self._mean(lambda b: self.client.lower(x, y, b)) + 0.5 * self.ridge * dot(way, way)

    def _mean(self, loss: Callable[[Batch], Tensor]) -> Tensor:
        return torch.stack(
            [(p * lift(loss)(batch)).sum() for p, batch, lift in self.stacks()]
        ).sum()

    def stacks(self, held: int = 1) -> Iterator[tuple[Tensor, Batch, Callable[..., Any]]]:
        """Weights and batches of a stack of clients that hold `held` numbers each, and what lifts a function to it."""
        count = max(1, NUMBERS // held)
        for weights, batch in self.groups:
            for part in (slice(first, first + count) for first in range(0, len(weights), count)):
                p = torch.tensor(weights[part]).to(next(iter(self.problem.y.values())))
                lift = functools.partial(lifted, single if len(p) == 1 else stacked)
                yield p, pytree.tree_map(lambda t, part=part: t[part], batch), lift

    def hessian(self, x: Tree, y: Tree) -> tuple[Tree, MatVec]:
        """grad_y G, and products with d2yy G that share its graph."""
        slope, back = vjp(lambda y: grad(self.lower, argnums=1)(x, y), y)  # type: ignore[misc]
        return slope, lambda v: back(v)[0]


def check(
    problem: Problem,
    clients: Sequence[ClientData],
    environment: Environment | None = None,
    *,
    rounds: int = 1000,
    weights: str | Sequence[float] = "uniform",
    seed: int = 0,
    mode: Literal["stack", "loop"] = "stack",
) -> Report:
    """Is the problem well posed, and which settings suit a run of so many rounds?

    Curvatures and hypergradients are those of G + ridge/2 ||y - y_0||^2 at the start's x, with ridge = L / rounds: of
    what is flatter, a run of so many gradient steps sees nothing. At most 20 clients and about 2,048 samples a level
    are read, one by one with mode="loop". What is wrong with the problem is told in the report's `warnings`, not
    raised.
    """
    checks.integer("rounds", rounds, least=1)
    checks.integer("seed", seed, least=0)
    if len(clients) == 0:
        raise ValueError("clients is empty; a federation needs at least one")
    if problem.lower_level == "private":
        raise ValueError(
            "check solves one lower level for all; this problem's is private, one an episode"
        )
    environment = environment or Environment()
    environment.check(len(clients))
    device = str(next(iter(problem.x.values())).device)
    with on_client(0, "before round 1"):
        problem.check(clients[0], device)
    p = client_weights(weights, clients)
    stack = checks.one_of("mode", mode, ("stack", "loop")) == "stack"
    read = {"clients": CLIENTS, "samples": SAMPLES}
    losses = Losses(problem, clients, p, environment, seed=seed, device=device, stack=stack, **read)
    return _diagnose(Sample(problem, losses), len(clients), environment, rounds)


def _diagnose(sample: Sample, clients: int, environment: Environment, rounds: int) -> Report:
    x, y = sample.problem.start
    warnings = soundness.batch_norms(
        sample.client, x, y, pytree.tree_map(lambda t: t[0], sample.groups[0][1])
    )
    beside = y + 0.1 * (1 + float(norm(y))) * random_unit(
        y
    )  # at the start, derivatives may vanish by accident
    wrong = soundness.wrong_derivatives(sample, x, beside, POOLED)
    measured = None
    if not wrong:
        wrong, usable = soundness.missing_links(sample, x, beside, POOLED)
        for _ in range(8 if usable else 0):
            try:
                measured = _measure(sample, x, y, rounds)
                break
            except ValueError:  # CG met negative curvature
                sample.ridge = 4 * sample.ridge or 1 / rounds
        else:
            wrong += (
                [f"the lower level could not be solved, even with a ridge of {sample.ridge:.2g}"]
                if usable
                else []
            )
    where = f"measured on {sum(len(p) for p, _ in sample.groups)} of {clients} clients"
    if measured:
        where += (
            f", at the start's x and a y where ||grad_y G|| is {measured.left:.0e} of the start's"
        )
        if ridge := measured.missing_ridge:
            wrong.append(
                f"the lower level is not strongly convex in y (its smallest curvature is {measured.mu:.2g}): "
                f"add a ridge of at least {ridge:.2g}"
            )
    return Report(measured, [*warnings, *wrong], rounds, environment, where)


def _measure(sample: Sample, x: Tree, start: Tree, rounds: int) -> Measures:
    accuracy = torch.finfo(flatten(start).dtype).eps ** 0.5
    y, steps, random = start, max(2, min(60, NUMBERS // start.numel)), random_unit(start)
    first = extreme_eigenvalues(sample.hessian(x, y)[1], random, steps)
    sample.ridge = max(sample.ridge, first.largest / rounds, -2 * first.smallest)
    y, left = _settle(sample, x, y, accuracy)
    hessian = sample.hessian(x, y)[1]
    found = extreme_eigenvalues(hessian, random, steps)
    if not found.smallest > 0:
        raise ValueError(f"the lower level has curvature {found.smallest - sample.ridge:.3g}")

    def solve(b: Tree) -> Tree:
        return CG(tolerance=accuracy, steps=500)(hessian, b).value

    def lagrangian(x: Tree, y: Tree, z: Tree) -> Tensor:
        """F - <grad_y G, z>: its gradient is (d_x, -d_z, -d_y)."""
        return sample.upper(x, y) - dot(grad(sample.lower, argnums=1)(x, y), z)

    z = solve(sample.upper_gradient_y(x, y, POOLED))
    (h, *_), product = vjp(grad(lagrangian, argnums=(0, 1, 2)), x, y, z)  # type: ignore[misc]
    still, direct, moves = zeros_like(y), [0.0], []

    def curvature(u: Tree) -> Tree:
        """d2Phi u: as x moves by u, y* moves by dy and z* by dz."""
        frozen, _, force = product((u, still, still))
        dy = solve(force)
        followed, push, _ = product((u, dy, still))
        dz = solve(push)
        direct.append(float(norm(frozen)))
        moves.append((dy, dz))
        return followed - sample.cross_product(x, y, dz, POOLED)  # type: ignore[no-any-return]

    phi = extreme_eigenvalues(curvature, h if float(norm(h)) else random_unit(x), 5)
    lags = torch.stack([torch.stack([dot(a, d) + dot(b, c) for c, d in moves]) for a, b in moves])
    return Measures(
        mu=found.smallest - sample.ridge,
        L=max(found.largest - sample.ridge, first.largest),
        ridge=sample.ridge,
        left=left,
        y_way=float(norm(y - start)),
        z_norm=float(norm(z)),
        sizes=(x.numel, y.numel),
        hypergradient_norm=float(norm(h)),
        curvature=max(abs(phi.smallest), abs(phi.largest), *direct),
        lag=max(0.0, float(torch.linalg.eigvalsh(lags)[-1])),
        **_compare_clients(sample, x, start, y, z, h, accuracy),
    )


def _settle(sample: Sample, x: Tree, y: Tree, accuracy: float) -> tuple[Tree, float]:
    """Newton steps towards the minimiser in y while the Hessian allows, and what is left of the gradient."""
    first = 0.0
    for _ in range(20):
        slope, hessian = sample.hessian(x, y)
        size = float(norm(slope))
        first = first or size
        if size <= accuracy * first:
            break
        try:
            step = CG(tolerance=1e-2, steps=200)(hessian, slope).value
        except ValueError:  # negative curvature: the caller adds to the ridge
            break
        length = line_search(sample.lower, x, y, slope, step)
        if not length:
            break
        y = y - length * step
    return y, size / first if first else 0.0


class _Spread:
    """How far the clients' vectors v_i are apart: sqrt(sum p_i ||v_i - v||^2 / sum p_i ||v_i||^2), v their mean."""

    def __init__(self, like: Tree) -> None:
        self.mean, self.square = zeros_like(like), 0.0

    def add(self, p: Tensor, stack: Tree) -> None:
        self.mean = self.mean + stack.map(lambda t: torch.tensordot(p, t, 1))
        self.square += float(
            (p * sum((t**2).reshape(len(p), -1).sum(1) for t in stack.values())).sum()
        )

    @property
    def value(self) -> float:
        return (
            max(0.0, 1 - float(norm(self.mean)) ** 2 / self.square) ** 0.5 if self.square else 0.0
        )


def _compare_clients(
    sample: Sample, x: Tree, start: Tree, y: Tree, z: Tree, h: Tree, accuracy: float
) -> dict[str, Any]:
    """How the clients differ, and what the mean of their own hypergradients, each with its own Hessian, is worth."""
    client, L, exists = sample.client, 0.0, float(norm(h)) > 0
    lower, upper, local = _Spread(y), _Spread(x), _Spread(x)
    for p, batch, lift in sample.stacks(held=2 * x.numel + 30 * y.numel):
        slopes = lift(lambda y, b: client.lower_gradient_y(x, y, b))
        everyone = y.map(lambda t, p=p: t.expand(len(p), *t.shape))
        _, back = vjp(lambda ys, slopes=slopes, batch=batch: slopes(ys, batch), everyone)  # type: ignore[misc]

        def hessians(vs: Tree, back: Any = back) -> Tree:
            """Block diagonal, so that one solver serves all clients."""
            return back(vs)[0] + sample.ridge * vs  # type: ignore[no-any-return]

        f_y = lift(lambda b: client.upper_gradient_y(x, y, b))(batch)
        L = max(L, extreme_eigenvalues(hessians, random_unit(f_y), 20).largest - sample.ridge)
        lower.add(p, lift(lambda b: client.lower_gradient_y(x, start, b))(batch))
        upper.add(p, lift(lambda b: client.directions(x, y, z, b).x)(batch))
        try:
            zs = CG(tolerance=accuracy, steps=500)(hessians, f_y).value
        except ValueError:  # a client's own Hessian is not positive definite
            exists = False
        if exists:
            local.add(p, lift(lambda z, b: client.directions(x, y, z, b).x)(zs, batch))
    return {
        "L_client": L,
        "lower_spread": lower.value,
        "upper_spread": upper.value,
        "local_cosine": float(dot(local.mean, h) / norm(local.mean) / norm(h)) if exists else None,
        "local_error": float(norm(local.mean - h) / norm(h)) if exists else None,
    }
