"""`check`: whether a bilevel problem is well posed, and how it should be run.

Everything is measured with gradients and Hessian products, on a sample of the clients' data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.utils import _pytree as pytree

from fedbilevel.core import checks
from fedbilevel.core.capabilities import find_capabilities
from fedbilevel.core.client_data import Batch, ClientData, check_clients, client_weights
from fedbilevel.core.embedding import AnyBatch
from fedbilevel.core.hypergradient import line_search
from fedbilevel.core.linear import CG, MatVec
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, dot, flatten, norm, zeros_like
from fedbilevel.diagnostics import soundness
from fedbilevel.diagnostics.advice import Measures, Report
from fedbilevel.diagnostics.soundness import random_unit
from fedbilevel.execution.losses import Losses
from fedbilevel.execution.vectorize import apply_to_one, apply_vmap, vectorized
from fedbilevel.federation.environment import Environment
from fedbilevel.federation.task import on_client

MAX_CLIENTS = 20
MAX_SAMPLES = 2048  # per level, over all clients
MAX_ENTRIES = 2**26  # of all vectors that are held at the same time
POOLED = Batch()  # stands for the data of a `PooledSample`, which holds its own


class ClientStack(NamedTuple):
    """Some clients whose batches have equal shapes.

    Attributes:
        weights: The weights p_i of the clients.
        batch: Their batches, stacked along a leading axis.
        vectorize: Turns a function of one client into a function of the stack.
    """

    weights: Tensor
    batch: Batch
    vectorize: Callable[[Callable[..., Any]], Callable[..., Any]]


class PooledSample(Oracle):
    """The oracle of the pooled problem, on a sample of its data and with a ridge.

    Its losses are F and G + ridge/2 ||y - y_0||^2, where y_0 is the problem's initial y.

    Args:
        problem: The problem.
        losses: The sample of clients and of their data.

    Attributes:
        client: The oracle of one client.
        groups: Weights and stacked batches of the clients that are evaluated together.
        ridge: The ridge, at first 0.
    """

    def __init__(self, problem: Problem, losses: Losses) -> None:
        super().__init__(problem)
        self.client = losses.oracle
        self.groups = losses.groups
        self.ridge = 0.0

    def upper(self, x: Tree, y: Tree, batch: AnyBatch = POOLED) -> Tensor:
        """The global upper loss F(x, y); `batch` is ignored."""
        return self._mean(lambda client_batch: self.client.upper(x, y, client_batch))

    def lower(self, x: Tree, y: Tree, batch: AnyBatch = POOLED) -> Tensor:
        """The global lower loss with a ridge; `batch` is ignored."""
        mean = self._mean(lambda client_batch: self.client.lower(x, y, client_batch))
        offset = y - self.problem.start[1]
        return mean + 0.5 * self.ridge * dot(offset, offset)

    def _mean(self, loss: Callable[[Batch], Tensor]) -> Tensor:
        """The weighted mean of the clients' losses."""
        sums = []
        for stack in self.stacks():
            values = stack.vectorize(loss)(stack.batch)
            sums.append((stack.weights * values).sum())
        return torch.stack(sums).sum()

    def stacks(self, entries: int = 1) -> Iterator[ClientStack]:
        """The clients in stacks that fit into memory.

        Args:
            entries: How many entries of vectors will be held per client.

        Yields:
            Stacks whose clients hold at most `MAX_ENTRIES` together, or a single client.
        """
        count = max(1, MAX_ENTRIES // entries)
        like = next(iter(self.problem.y.values()))
        for weights, batch in self.groups:
            for first in range(0, len(weights), count):
                yield _stack(weights, batch, slice(first, first + count), like)

    def hessian(self, x: Tree, y: Tree) -> tuple[Tree, MatVec]:
        """grad_y G, and the product v -> d2yy G v, which shares the graph of the gradient."""
        g_y, pullback = vjp(lambda y: grad(self.lower, argnums=1)(x, y), y)  # type: ignore[misc]
        return g_y, lambda v: pullback(v)[0]


def _stack(weights: list[float], batch: Batch, part: slice, like: Tensor) -> ClientStack:
    """Some clients of a group; `like` gives dtype and device of their weights."""
    p = torch.tensor(weights[part]).to(like)
    apply = apply_vmap
    if len(p) == 1:
        apply = apply_to_one
    return ClientStack(
        p,
        pytree.tree_map(lambda tensor: tensor[part], batch),
        lambda fn: vectorized(fn, apply),
    )


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
    """Measure a problem before a run: is it well posed, and which settings suit it?

    Curvatures and hypergradients are measured at the initial x, for the lower loss
    G + ridge/2 ||y - y_0||^2 with ridge = L / rounds: a run of that many gradient steps cannot see
    anything flatter. At most 20 clients and about 2,048 samples per level are read.

    Defects of the problem, such as a wrong derivative or a lower level that is not strongly
    convex, become warnings of the report; they are not raised.

    Args:
        problem: A problem with a shared lower level.
        clients: The data of all clients.
        environment: The environment of the run; settings allow for its local steps.
        rounds: The number of rounds of the run.
        weights: The weights p_i: "uniform", "samples" or one number per client.
        seed: Determines which clients and samples are read.
        mode: "stack" evaluates clients with batches of equal shape together, "loop" one by one,
            which needs less memory.

    Returns:
        A report with the measurements, the warnings, a recommended method and settings for it and
        for others.

    Raises:
        ValueError: An argument is not allowed, or a loss is not finite at the start or draws from
            PyTorch's global generator.
        TypeError: A loss does not return a 0-d floating tensor.
        ClientError: A loss fails on the data of a client; the message names the client.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> report = fb.check(task.problem, task.clients)
        >>> report.warnings
        []
        >>> report.measured.condition < 10
        True
        >>> result = fb.solve(task.problem, task.clients, report.algorithm(), rounds=5)
    """
    checks.integer("rounds", rounds, least=1)
    checks.integer("seed", seed, least=0)
    checks.instance("problem", problem, Problem)
    check_clients(clients)
    if problem.lower_level == "private":
        raise ValueError("check needs lower_level='shared'; this problem's is 'private'")
    if problem.client_names:
        raise ValueError(
            "check needs a problem whose variables all belong to the server; this problem's owner "
            f"gives {min(problem.client_names)!r} to the clients"
        )
    checks.one_of("mode", mode, ("stack", "loop"))
    environment = checks.instance("environment", environment or Environment(), Environment)
    environment.check(len(clients))
    device = str(next(iter(problem.x.values())).device)
    with on_client(0, "before round 1"):
        problem.check(clients[0], device)
        found = find_capabilities(problem, clients[0], device)
    problem = found.problem
    if problem.derivatives == "differences":  # they measure nothing exactly
        problem = replace(problem, derivatives="exact")
    losses = Losses(
        problem,
        clients,
        client_weights(weights, clients),
        environment,
        seed=seed,
        device=device,
        stack=checks.one_of("mode", mode, ("stack", "loop")) == "stack"
        and not found.no_stacked_values,
        clients=MAX_CLIENTS,
        samples=MAX_SAMPLES,
    )
    sample = PooledSample(problem, losses)
    with sample.kernels():
        return _diagnose(sample, len(clients), environment, rounds)


def _diagnose(sample: PooledSample, clients: int, environment: Environment, rounds: int) -> Report:
    """Look for defects, measure what can be measured, and report both."""
    x, y = sample.problem.start
    one_client = pytree.tree_map(lambda tensor: tensor[0], sample.groups[0][1])
    warnings = soundness.batch_norm_warnings(sample.client, x, y, one_client)
    # Derivatives may vanish by accident at the start, so they are compared at another y.
    nearby = y + 0.1 * (1 + float(norm(y))) * random_unit(y)
    measured = None
    defects = soundness.derivative_warnings(sample, x, nearby, POOLED)
    if not defects:
        defects, solvable = soundness.dependence_warnings(sample, x, nearby, POOLED)
        if solvable:
            measured = _measure_with_ridge(sample, x, y, rounds)
        if solvable and measured is None:
            defects.append(
                f"the lower level could not be solved, even with a ridge of {sample.ridge:.2g}"
            )
    where = f"measured on {sum(len(p) for p, _ in sample.groups)} of {clients} clients"
    if measured:
        where += (
            f", at the initial x; y* stands for a y where ||grad_y G|| is {measured.left:.0e} "
            "of its initial value"
        )
        ridge = measured.missing_ridge
        if ridge:
            defects.append(
                "the lower level is not strongly convex in y (its smallest curvature is "
                f"{measured.mu:.2g}): add a ridge of at least {ridge:.2g}"
            )
    return Report(measured, [*warnings, *defects], rounds, environment, where)


def _measure_with_ridge(sample: PooledSample, x: Tree, y: Tree, rounds: int) -> Measures | None:
    """Measure, with a larger ridge where the curvature turns out to be negative."""
    for _ in range(8):
        try:
            return _measure(sample, x, y, rounds)
        except ValueError:  # CG met negative curvature
            sample.ridge = 4 * sample.ridge or 1 / rounds
    return None


def _measure(sample: PooledSample, x: Tree, start: Tree, rounds: int) -> Measures:
    """Measure at x and at the y to which Newton's method leads from `start`.

    Raises:
        ValueError: The lower level has negative curvature, despite the ridge.
    """
    accuracy = torch.finfo(flatten(start).dtype).eps ** 0.5
    lanczos_steps = max(2, min(60, MAX_ENTRIES // start.numel))
    random = random_unit(start)
    _, hessian = sample.hessian(x, start)
    initial = extreme_eigenvalues(hessian, random, lanczos_steps)
    sample.ridge = max(sample.ridge, initial.largest / rounds, -2 * initial.smallest)
    y, left = _approximate_minimiser(sample, x, start, accuracy)
    _, hessian = sample.hessian(x, y)
    spectrum = extreme_eigenvalues(hessian, random, lanczos_steps)
    if not spectrum.smallest > 0:
        raise ValueError(f"the lower level has curvature {spectrum.smallest - sample.ridge:.3g}")

    def solve(b: Tree) -> Tree:
        return CG(tolerance=accuracy, steps=500)(hessian, b).value

    def lagrangian(x: Tree, y: Tree, z: Tree) -> Tensor:
        """F - <grad_y G, z>; its gradient in (x, y, z) is (d_x, -d_z, -d_y)."""
        return sample.upper(x, y) - dot(grad(sample.lower, argnums=1)(x, y), z)

    z = solve(sample.upper_gradient_y(x, y, POOLED))
    (h, *_), product = vjp(grad(lagrangian, argnums=(0, 1, 2)), x, y, z)  # type: ignore[misc]
    zero = zeros_like(y)
    frozen_curvatures = [0.0]
    moves: list[tuple[Tree, Tree]] = []

    def curvature_product(u: Tree) -> Tree:
        """d2Phi u: as x moves by u, y* moves by dy and z* by dz."""
        with_frozen_yz, _, force = product((u, zero, zero))
        dy = solve(force)
        with_frozen_z, push, _ = product((u, dy, zero))
        dz = solve(push)
        frozen_curvatures.append(float(norm(with_frozen_yz)))
        moves.append((dy, dz))
        curvature: Tree = with_frozen_z - sample.cross_product(x, y, dz, POOLED)
        return curvature

    first = h
    if not float(norm(h)):
        first = random_unit(x)
    phi = extreme_eigenvalues(curvature_product, first, 5)
    differences = _ClientDifferences(sample, x, y, z, h, accuracy)
    for stack in sample.stacks(entries=2 * x.numel + 30 * y.numel):
        differences.add(stack, start)
    return Measures(
        mu=spectrum.smallest - sample.ridge,
        L=max(spectrum.largest - sample.ridge, initial.largest),
        L_pooled=spectrum.largest - sample.ridge,
        L_client=differences.L,
        lower_spread=differences.lower.spread,
        ridge=sample.ridge,
        left=left,
        y_way=float(norm(y - start)),
        z_norm=float(norm(z)),
        sizes=(x.numel, y.numel),
        hypergradient_norm=float(norm(h)),
        curvature=max(abs(phi.smallest), abs(phi.largest), *frozen_curvatures),
        lag=_largest_lag(moves),
        upper_spread=differences.upper.spread,
        local_cosine=differences.local_cosine,
        local_error=differences.local_error,
    )


def _approximate_minimiser(
    sample: PooledSample, x: Tree, y: Tree, accuracy: float
) -> tuple[Tree, float]:
    """Newton steps on the lower level while the Hessian allows them.

    Returns:
        The last y, and the gradient's norm there relative to the first one.
    """
    first = 0.0
    for _ in range(20):
        g_y, hessian = sample.hessian(x, y)
        size = float(norm(g_y))
        first = first or size
        if size <= accuracy * first:
            break
        try:
            step = CG(tolerance=1e-2, steps=200)(hessian, g_y).value
        except ValueError:  # negative curvature: the caller increases the ridge
            break
        fraction = line_search(sample.lower, x, y, g_y, step)
        if not fraction:
            break
        y = y - fraction * step
    if not first:
        return y, 0.0
    return y, size / first


def _largest_lag(moves: list[tuple[Tree, Tree]]) -> float:
    """The largest value of 2 <dy, dz> over unit vectors u, from the moves of an orthonormal basis.

    Args:
        moves: Dy and dz for each vector of the basis, in which both are linear.
    """
    rows = []
    for dy_i, dz_i in moves:
        row = [dot(dy_i, dz_j) + dot(dz_i, dy_j) for dy_j, dz_j in moves]
        rows.append(torch.stack(row))
    return max(0.0, float(torch.linalg.eigvalsh(torch.stack(rows))[-1]))


class _WeightedMean:
    """The mean of the clients' vectors v_i, and how far they are spread around it."""

    def __init__(self, like: Tree) -> None:
        self.mean = zeros_like(like)
        self.mean_square = 0.0

    def add(self, p: Tensor, stack: Tree) -> None:
        """Add the vectors of a stack of clients with weights p."""
        self.mean = self.mean + stack.map(lambda tensor: torch.tensordot(p, tensor, 1))
        squares = sum((tensor**2).reshape(len(p), -1).sum(1) for tensor in stack.values())
        self.mean_square += float((p * squares).sum())

    @property
    def spread(self) -> float:
        """sqrt(sum_i p_i ||v_i - v||^2 / sum_i p_i ||v_i||^2), with v the mean."""
        if not self.mean_square:
            return 0.0
        variance = 1 - float(norm(self.mean)) ** 2 / self.mean_square
        spread: float = max(0.0, variance) ** 0.5
        return spread


class _ClientDifferences:
    """How the clients differ, and how good the mean of their own hypergradients is.

    A client's own hypergradient is taken with its own Hessian, at the common y.

    Args:
        sample: The pooled problem.
        x: Upper variables.
        y: The minimiser of the pooled lower level.
        z: The solution of the pooled linear system.
        h: The true hypergradient.
        accuracy: The relative residual of the clients' linear systems.
    """

    def __init__(
        self, sample: PooledSample, x: Tree, y: Tree, z: Tree, h: Tree, accuracy: float
    ) -> None:
        self.client = sample.client
        self.ridge = sample.ridge
        self.x = x
        self.y = y
        self.z = z
        self.h = h
        self.accuracy = accuracy
        self.L = 0.0
        self.lower = _WeightedMean(y)
        self.upper = _WeightedMean(x)
        self.local = _WeightedMean(x)
        self.local_exists = float(norm(h)) > 0

    def add(self, stack: ClientStack, start: Tree) -> None:
        """Measure the clients of a stack; `start` is the initial y."""
        p, batch, vectorize = stack
        x = self.x
        y = self.y
        client = self.client
        gradients = vectorize(lambda y, b: client.lower_gradient_y(x, y, b))
        repeated = y.map(lambda tensor: tensor.expand(len(p), *tensor.shape))
        _, pullback = vjp(lambda ys: gradients(ys, batch), repeated)  # type: ignore[misc]

        def hessians(vs: Tree) -> Tree:
            """All clients' Hessians as one block-diagonal matrix, so that one solver serves all."""
            product: Tree = pullback(vs)[0] + self.ridge * vs
            return product

        f_y = vectorize(lambda b: client.upper_gradient_y(x, y, b))(batch)
        largest = extreme_eigenvalues(hessians, random_unit(f_y), 20).largest
        self.L = max(self.L, largest - self.ridge)
        lower_gradients = vectorize(lambda b: client.lower_gradient_y(x, start, b))(batch)
        self.lower.add(p, lower_gradients)
        upper_directions = vectorize(lambda b: client.directions(x, y, self.z, b).x)(batch)
        self.upper.add(p, upper_directions)
        try:
            zs = CG(tolerance=self.accuracy, steps=500)(hessians, f_y).value
        except ValueError:  # a client's own Hessian is not positive definite
            self.local_exists = False
        if self.local_exists:
            local = vectorize(lambda z, b: client.directions(x, y, z, b).x)(zs, batch)
            self.local.add(p, local)

    @property
    def local_cosine(self) -> float | None:
        """The cosine between the mean of local hypergradients and the true one."""
        if not self.local_exists:
            return None
        mean = self.local.mean
        return float(dot(mean, self.h) / norm(mean) / norm(self.h))

    @property
    def local_error(self) -> float | None:
        """The relative distance between the mean of local hypergradients and the true one."""
        if not self.local_exists:
            return None
        return float(norm(self.local.mean - self.h) / norm(self.h))
