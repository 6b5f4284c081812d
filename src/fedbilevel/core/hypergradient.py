"""The judge: the true hypergradient of the pooled problem,

    grad Phi(x) = grad_x F - d2xy G [d2yy G]^-1 grad_y F   at (x, y*(x)),   F = sum p_i f_i,  G = sum p_i g_i,

with the lower level solved to the precision of the numbers it is given in. It reads every client's data, which no
algorithm may: it is for tests, metrics and small problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, jacrev

from fedbilevel.core import checks
from fedbilevel.core.linear import CG, MatVec, Neumann, Solution, Solver
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Batch, ClientData, Problem, client_weights
from fedbilevel.core.rng import normal, root
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten

Method = Literal["exact", "cg", "neumann"]
METHODS = ("exact", "cg", "neumann")
DENSE_LIMIT = 5000  # above this many numbers in y, a dense Hessian is refused


class Pooled:
    """The problem a server with all the data would see."""

    def __init__(
        self, problem: Problem, clients: Sequence[ClientData], weights: str | Sequence[float]
    ) -> None:
        if problem.lower_level != "shared":
            raise ValueError(
                "the pooled hypergradient needs lower_level='shared'; this problem's is 'private'"
            )
        self.oracle = Oracle(problem)
        self.weights = client_weights(weights, clients)
        self.batches = [
            Batch(client.train, client.val, torch.zeros((), dtype=torch.int64))
            for client in clients
        ]

    def upper(self, x: Tree, y: Tree) -> Tensor:
        """F(x, y)."""
        values = [self.oracle.upper(x, y, batch) for batch in self.batches]
        return torch.stack([p * value for p, value in zip(self.weights, values, strict=True)]).sum()

    def lower(self, x: Tree, y: Tree) -> Tensor:
        """G(x, y)."""
        values = [self.oracle.lower(x, y, batch) for batch in self.batches]
        return torch.stack([p * value for p, value in zip(self.weights, values, strict=True)]).sum()

    def slope(self, x: Tree, y: Tree, v: Tree) -> Tensor:
        """<grad_y G, v>: its gradients are the second-order products."""
        return dot(grad(self.lower, argnums=1)(x, y), v)

    def hessian(self, x: Tree, y: Tree) -> MatVec:
        return lambda v: grad(self.slope, argnums=1)(x, y, v)

    def dense(self, x: Tree, y: Tree) -> Solver:
        """Solves with the Hessian written out."""
        size = y.numel
        if size > DENSE_LIMIT:
            raise ValueError(
                f"method 'exact' needs at most {DENSE_LIMIT} numbers in y, this problem has {size}; use 'cg'"
            )
        H = jacrev(lambda v: flatten(grad(self.lower, argnums=1)(x, unflatten(v, y))))(flatten(y))
        factor, failed = torch.linalg.cholesky_ex(H)
        pivots = factor.diagonal() ** 2
        if failed or not float(pivots.min()) > 10 * size * torch.finfo(H.dtype).eps * float(
            pivots.max()
        ):
            raise ValueError(
                "the Hessian of the lower level is not positive definite (is it strongly convex in y?)"
            )

        def solve(matvec: MatVec, b: Tree) -> Solution:
            z = torch.cholesky_solve(flatten(b).unsqueeze(-1), factor).squeeze(-1)
            residual = float((H @ z - flatten(b)).norm() / flatten(b).norm().clamp(min=1e-300))
            return Solution(unflatten(z, y), residual, size)

        return solve


def solve_lower(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
) -> Tree:
    """y*(x) of the pooled lower level, by Newton's method with backtracking."""
    return _solve_lower(Pooled(problem, clients, weights), Tree(x), problem.start[1], method)


def _solve_lower(pooled: Pooled, x: Tree, y: Tree, method: Method) -> Tree:
    """Solved when a Newton step is as short as rounding at y's scale allows: a small gradient may be a plateau's."""
    checks.one_of("method", method, METHODS)
    precision = torch.finfo(next(iter(y.values())).dtype).eps
    gradient = grad(pooled.lower, argnums=1)
    before = float("inf")
    for _ in range(200):
        slope = gradient(x, y)
        if not float(norm(slope)):
            return y
        solver = pooled.dense(x, y) if method == "exact" else CG(tolerance=1e-3, steps=10 * y.numel)
        step = solver(pooled.hessian(x, y), slope).value
        reach, scale = float(norm(step)), 1 + float(norm(y))
        stalled = reach <= 1e-8 * scale and reach >= before / 2
        if reach <= 100 * precision * scale or stalled:
            return y - step
        length = line_search(pooled.lower, x, y, slope, step)
        if not length:
            if reach <= 1e-8 * scale:
                return y
            break
        y, before = y - length * step, reach
    raise ValueError(
        f"the lower level was not solved: ||grad_y G|| is {float(norm(slope)):.3g} and a Newton step has length "
        f"{reach:.3g} (is it strongly convex in y?)"
    )


def line_search(
    lower: Callable[[Tree, Tree], Tensor], x: Tree, y: Tree, slope: Tree, step: Tree
) -> float:
    """The longest of 1, 1/2, 1/4, ... that lowers the gradient or lowers G enough; 0 if none does."""
    value, fall, size = float(lower(x, y)), float(dot(slope, step)), float(norm(slope))
    length = 1.0
    while length > 1e-8:
        trial = y - length * step
        if float(norm(grad(lower, argnums=1)(x, trial))) < size:
            return length
        if float(lower(x, trial)) <= value - 1e-4 * length * fall:
            return length
        length /= 2
    return 0.0


def phi(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
) -> Tensor:
    """Phi(x) = F(x, y*(x))."""
    pooled = Pooled(problem, clients, weights)
    return pooled.upper(Tree(x), _solve_lower(pooled, Tree(x), problem.start[1], method))


def hypergradient(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
    solver: Solver | None = None,
) -> Tree:
    """grad Phi(x), a dict like x.

    "exact" writes the Hessian out, "cg" and "neumann" use products only; `solver` replaces the method's own linear
    solver (`fedbilevel.linear`), for instance by a Neumann sum of few terms.
    """
    checks.one_of("method", method, METHODS)
    pooled, x = Pooled(problem, clients, weights), Tree(x).map(torch.Tensor.detach)
    y = _solve_lower(pooled, x, problem.start[1], "exact" if method == "exact" else "cg")
    f_x, f_y = grad(pooled.upper, argnums=(0, 1))(x, y)
    matvec = pooled.hessian(x, y)
    solution = (solver or _own_solver(pooled, x, y, method))(matvec, f_y)
    limit = max(1e-6, 1e3 * torch.finfo(next(iter(y.values())).dtype).eps)
    if solver is None and not solution.residual <= limit:
        raise ValueError(
            f"method {method!r} left a residual of {solution.residual:.3g} in the linear system, more than "
            f"{limit:.0e}; use 'exact' or 'cg' (and is the lower level strongly convex in y?)"
        )
    return f_x - grad(pooled.slope, argnums=0)(x, y, solution.value)  # type: ignore[no-any-return]


def _own_solver(pooled: Pooled, x: Tree, y: Tree, method: Method) -> Solver:
    if method == "exact":
        return pooled.dense(x, y)
    if method == "cg":
        return CG()
    start = unflatten(normal(root(0, "lanczos"), (y.numel,), next(iter(y.values())).dtype), y)
    largest = extreme_eigenvalues(pooled.hessian(x, y), start).largest
    return Neumann(steps=2000, lr=1 / max(1.05 * largest, 1e-30))


def finite_difference(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    step: float = 1e-4,
    weights: str | Sequence[float] = "uniform",
) -> float:
    """(Phi(x + h v) - Phi(x - h v)) / 2h: the slope of Phi along v, from values alone."""
    x, v = Tree(x), Tree(direction)
    above, below = (phi(problem, clients, x + h * v, weights=weights) for h in (step, -step))
    return float((above - below) / (2 * step))
