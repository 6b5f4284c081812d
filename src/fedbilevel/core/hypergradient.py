"""The true hypergradient of the pooled problem, to measure methods against.

    grad Phi(x) = grad_x F - d2xy G [d2yy G]^-1 grad_y F    at (x, y*(x)),
    F = sum_i p_i f_i,   G = sum_i p_i g_i.

A variable that belongs to the clients (`Problem.owner`) has a leading axis here, over all clients:
client i computes with entry i. With client-owned y the Hessian is block diagonal, and grad Phi is
the weighted mean of the clients' own hypergradients.

The lower level is solved to the precision of its dtype. These functions read the data of all
clients, which no algorithm may do: they are for tests, metrics and small problems. The derivatives
that algorithms use, Hessian products included, are in `Oracle` (oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import jacrev

from fedbilevel.core import checks
from fedbilevel.core.capabilities import find_capabilities
from fedbilevel.core.client_data import Batch, ClientData, check_clients, client_weights
from fedbilevel.core.derivatives import grad
from fedbilevel.core.linear import CG, MatVec, Solution, Solver, UnsolvedError
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import normal, root
from fedbilevel.core.spectrum import extreme_eigenvalues
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten

Method = Literal["exact", "cg", "neumann"]
METHODS = ("exact", "cg", "neumann")
DENSE_LIMIT = 5000  # the largest number of entries of y for which a dense Hessian is built
NEUMANN_TOLERANCE = 1e-10  # the relative residual at which a Neumann series ends
NEUMANN_LIMIT = 2000  # its largest number of terms


class PooledProblem:
    """The global losses F and G, on the data of all clients.

    Args:
        problem: A problem with a shared lower level.
        clients: The data of all clients.
        weights: The weights p_i; see `client_weights`.

    Raises:
        ValueError: The lower level is private, or the weights do not fit the clients.
    """

    def __init__(
        self, problem: Problem, clients: Sequence[ClientData], weights: str | Sequence[float]
    ) -> None:
        checks.instance("problem", problem, Problem)
        check_clients(clients)
        if problem.lower_level != "shared":
            raise ValueError(
                "the pooled hypergradient needs lower_level='shared'; this problem's is 'private'"
            )
        self.weights = client_weights(weights, clients)
        self.owned = problem.client_names
        self.start = self._for_all(problem.y, len(clients))
        device = str(next(iter(problem.x.values())).device)
        self.oracle = Oracle(find_capabilities(problem, clients[0], device).problem)
        key = torch.zeros((), dtype=torch.int64)
        self.batches = [Batch(client.train, client.val, key) for client in clients]

    def upper(self, x: Tree, y: Tree) -> Tensor:
        """The global upper loss F(x, y)."""
        return self._mean(self.oracle.upper, x, y)

    def lower(self, x: Tree, y: Tree) -> Tensor:
        """The global lower loss G(x, y)."""
        return self._mean(self.oracle.lower, x, y)

    def _mean(self, loss: Callable[[Tree, Tree, Batch], Tensor], x: Tree, y: Tree) -> Tensor:
        values = []
        with self.oracle.kernels():
            for i, batch in enumerate(self.batches):
                values.append(loss(self._of_client(x, i), self._of_client(y, i), batch))
        return torch.stack([p * value for p, value in zip(self.weights, values, strict=True)]).sum()

    def _for_all(self, tree: Mapping[str, Tensor], clients: int) -> Tree:
        """A tree with an entry per client of the variables that belong to the clients."""
        return Tree(
            {n: t.expand(clients, *t.shape) if n in self.owned else t for n, t in tree.items()}
        )

    def _of_client(self, tree: Tree, i: int) -> Tree:
        """What client i computes with."""
        if not self.owned:
            return tree
        return Tree({n: t[i] if n in self.owned else t for n, t in tree.items()})

    def checked(self, x: Mapping[str, Tensor]) -> Tree:
        """x as a tree, unless a variable of the clients lacks the axis over them.

        Raises:
            TypeError: It is no dict of tensors.
            ValueError: It has another shape.
        """
        if not isinstance(x, Mapping):
            raise TypeError(f"x is {type(x).__name__}; it must be a dict of tensors")
        n = len(self.batches)
        for name, start in self.oracle.problem.x.items():
            expected = (n, *start.shape) if name in self.owned else start.shape
            if x[name].shape != expected:
                raise ValueError(
                    f"x[{name!r}] has shape {tuple(x[name].shape)}; it must have {tuple(expected)}"
                )
        return Tree(x)

    def lower_slope(self, x: Tree, y: Tree, v: Tree) -> Tensor:
        """<grad_y G, v>; its gradients are the second-order products with v."""
        return dot(grad(self.lower, argnums=1)(x, y), v)

    def hessian(self, x: Tree, y: Tree) -> MatVec:
        """The product v -> d2yy G v."""
        return lambda v: grad(self.lower_slope, argnums=1)(x, y, v)

    def dense_solver(self, x: Tree, y: Tree) -> Solver:
        """A linear solver that builds d2yy G and factorises it.

        Raises:
            ValueError: y has more than `DENSE_LIMIT` entries, or d2yy G is not positive definite.
        """
        size = y.numel
        if size > DENSE_LIMIT:
            raise ValueError(
                f"method 'exact' needs at most {DENSE_LIMIT} numbers in y, "
                f"this problem has {size}; use 'cg'"
            )

        def gradient(vector: Tensor) -> Tensor:
            return flatten(grad(self.lower, argnums=1)(x, unflatten(vector, y)))

        H = jacrev(gradient)(flatten(y))
        factor, failed = torch.linalg.cholesky_ex(H)
        pivots = factor.diagonal() ** 2
        rounding = 10 * size * torch.finfo(H.dtype).eps * float(pivots.max())
        if failed or not float(pivots.min()) > rounding:
            raise UnsolvedError(
                "the Hessian of the lower level is not positive definite "
                "(is it strongly convex in y?)"
            )

        def solve(matvec: MatVec, b: Tree) -> Solution:
            vector = flatten(b)
            z = torch.cholesky_solve(vector.unsqueeze(-1), factor).squeeze(-1)
            smallest = torch.finfo(H.dtype).tiny  # a zero right-hand side has a residual of 0
            residual = float((H @ z - vector).norm() / vector.norm().clamp(min=smallest))
            return Solution(unflatten(z, y), residual, size)

        return solve


def solve_lower(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
) -> Tree:
    """The solution y*(x) = argmin_y G(x, y) of the pooled lower level.

    Newton's method with a line search, from the problem's initial y to the precision of its dtype.

    Args:
        problem: A problem with a shared lower level that is strongly convex in y.
        clients: The data of all clients.
        x: The upper variables; those of the clients with a leading axis over clients.
        method: "exact" builds the Hessian (y of at most 5,000 entries), "cg" and "neumann" solve
            for Newton steps by conjugate gradients.
        weights: The weights p_i: "uniform", "samples" or one number per client.

    Returns:
        y*(x), a tree like y; variables of the clients have a leading axis over clients.

    Raises:
        ValueError: The lower level is private, could not be solved or is not strongly convex, or
            an argument is not allowed.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> y = fb.solve_lower(task.problem, task.clients, task.problem.x)
        >>> torch.allclose(y["y"], task.y_star(task.problem.x)["y"])
        True
    """
    pooled = PooledProblem(problem, clients, weights)
    return _solve_lower(pooled, pooled.checked(x), method)


def _solve_lower(pooled: PooledProblem, x: Tree, method: Method) -> Tree:
    """y*(x) by Newton's method.

    The test for convergence is the length of a Newton step, relative to rounding at the scale of
    y. A small gradient would not do: it may belong to a plateau.
    """
    checks.one_of("method", method, METHODS)
    y = pooled.start
    precision = torch.finfo(next(iter(y.values())).dtype).eps
    gradient = grad(pooled.lower, argnums=1)
    previous = float("inf")
    for _ in range(200):
        g_y = gradient(x, y)
        if not float(norm(g_y)):
            return y
        solver: Solver = CG(tolerance=1e-3, steps=10 * y.numel)
        if method == "exact":
            solver = pooled.dense_solver(x, y)
        step = solver(pooled.hessian(x, y), g_y).value
        length = float(norm(step))
        scale = 1 + float(norm(y))
        small = length <= 1e-8 * scale
        stalled = small and length >= previous / 2
        if length <= 100 * precision * scale or stalled:
            return y - step
        fraction = line_search(pooled.lower, x, y, g_y, step)
        if not fraction:
            if small:
                return y
            break
        y = y - fraction * step
        previous = length
    raise UnsolvedError(
        f"the lower level was not solved: ||grad_y G|| is {float(norm(g_y)):.3g} and a Newton step "
        f"has length {length:.3g} (is it strongly convex in y?)"
    )


def line_search(
    lower: Callable[[Tree, Tree], Tensor], x: Tree, y: Tree, g_y: Tree, step: Tree
) -> float:
    """The longest acceptable fraction of a Newton step, by backtracking.

    Args:
        lower: The lower loss as a function of (x, y).
        x: The upper variables.
        y: The point from which to step.
        g_y: The gradient of `lower` in y there.
        step: The Newton step; the new point is y - fraction * step.

    Returns:
        The first of 1, 1/2, 1/4, ... that shortens the gradient or lowers the loss enough
        (Armijo's condition); 0 if none above 1e-8 does.
    """
    value = float(lower(x, y))
    slope = float(dot(g_y, step))
    size = float(norm(g_y))
    fraction = 1.0
    while fraction > 1e-8:
        trial = y - fraction * step
        if float(norm(grad(lower, argnums=1)(x, trial))) < size:
            return fraction
        if float(lower(x, trial)) <= value - 1e-4 * fraction * slope:
            return fraction
        fraction /= 2
    return 0.0


def phi(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
) -> Tensor:
    """The objective Phi(x) = F(x, y*(x)).

    Args:
        problem: A problem with a shared lower level that is strongly convex in y.
        clients: The data of all clients.
        x: The upper variables; those of the clients with a leading axis over clients.
        method: How to solve the lower level; see `solve_lower`.
        weights: The weights p_i: "uniform", "samples" or one number per client.

    Returns:
        A 0-d tensor.

    Raises:
        ValueError: As `solve_lower`.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.hypergradient import phi
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> value = phi(task.problem, task.clients, task.problem.x)
        >>> torch.allclose(value, task.phi(task.problem.x))
        True
    """
    pooled = PooledProblem(problem, clients, weights)
    x = pooled.checked(x)
    return pooled.upper(x, _solve_lower(pooled, x, method))


def hypergradient(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    method: Method = "exact",
    weights: str | Sequence[float] = "uniform",
    solver: Solver | None = None,
) -> Tree:
    """The true hypergradient grad Phi(x) of the pooled problem.

        grad Phi(x) = grad_x F - d2xy G [d2yy G]^-1 grad_y F    at (x, y*(x))

    Args:
        problem: A problem with a shared lower level that is strongly convex in y.
        clients: The data of all clients.
        x: The upper variables; those of the clients with a leading axis over clients.
        method: How to solve the linear system: "exact" builds the Hessian (y of at most 5,000
            entries), "cg" uses conjugate gradients, "neumann" as many terms of the Neumann series,
            at most 2,000, as leave a relative residual of 1e-10.
        weights: The weights p_i: "uniform", "samples" or one number per client.
        solver: Replaces the linear solver of `method`, for instance `fb.linear.Neumann(steps=5)`
            to see the bias of a short series. Its residual is not checked.

    Returns:
        A tree like x.

    Raises:
        ValueError: The lower level is private, could not be solved or is not strongly convex, the
            linear system could not be solved, or an argument is not allowed.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> x = task.problem.x
        >>> gradient = fb.hypergradient(task.problem, task.clients, x)
        >>> torch.allclose(gradient["x"], task.gradient(x)["x"])
        True
        >>> few_terms = fb.linear.Neumann(steps=2, lr=0.5)
        >>> biased = fb.hypergradient(task.problem, task.clients, x, solver=few_terms)
        >>> torch.allclose(biased["x"], gradient["x"])
        False
    """
    checks.one_of("method", method, METHODS)
    pooled = PooledProblem(problem, clients, weights)
    x = pooled.checked(x).map(torch.Tensor.detach)
    y = _solve_lower(pooled, x, method)
    f_x, f_y = grad(pooled.upper, argnums=(0, 1))(x, y)
    linear_solver = solver or _linear_solver(pooled, x, y, method)
    solution = linear_solver(pooled.hessian(x, y), f_y)
    limit = max(1e-6, 1e3 * torch.finfo(next(iter(y.values())).dtype).eps)
    if solver is None and not solution.residual <= limit:
        raise UnsolvedError(
            f"method {method!r} left a residual of {solution.residual:.3g} in the linear system, "
            f"more than {limit:.0e}; use 'exact' or 'cg' "
            "(and is the lower level strongly convex in y?)"
        )
    cross_product = grad(pooled.lower_slope, argnums=0)(x, y, solution.value)
    result: Tree = f_x - cross_product
    return result


def _linear_solver(pooled: PooledProblem, x: Tree, y: Tree, method: Method) -> Solver:
    """The linear solver of a method."""
    if method == "exact":
        return pooled.dense_solver(x, y)
    if method == "cg":
        return CG()
    start = unflatten(normal(root(0, "lanczos"), (y.numel,), next(iter(y.values())).dtype), y)
    largest = extreme_eigenvalues(pooled.hessian(x, y), start).largest
    return _neumann_series(lr=1 / max(1.05 * largest, 1e-30))


def _neumann_series(lr: float) -> Solver:
    """A linear solver that sums lr (I - lr H)^j b until the residual is small.

    After n terms the residual is (I - lr H)^n b, which is what the next term is made of: testing it
    takes no product.
    """

    def solve(matvec: MatVec, b: Tree) -> Solution:
        size = float(norm(b))
        term = b
        total = b
        products = 0
        residual = 1.0 if size else 0.0
        while residual > NEUMANN_TOLERANCE and products < NEUMANN_LIMIT:
            term = term - lr * matvec(term)
            products += 1
            residual = float(norm(term)) / size
            total = total + term
        return Solution(lr * total, residual, products)

    return solve


def finite_difference(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    step: float = 1e-4,
    weights: str | Sequence[float] = "uniform",
) -> float:
    """The slope of the objective along v, from its values alone: a check of hypergradients.

        (Phi(x + h v) - Phi(x - h v)) / 2h,    which tends to <grad Phi(x), v> as h -> 0

    Args:
        problem: A problem with a shared lower level that is strongly convex in y.
        clients: The data of all clients.
        x: The upper variables; those of the clients with a leading axis over clients.
        direction: The direction v, a dict like x.
        step: The step h.
        weights: The weights p_i: "uniform", "samples" or one number per client.

    Returns:
        The difference quotient.

    Raises:
        ValueError: As `solve_lower`.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> x = task.problem.x
        >>> v = fb.hypergradient(task.problem, task.clients, x)
        >>> slope = fb.finite_difference(task.problem, task.clients, x, v)
        >>> abs(slope / float((v["x"] ** 2).sum()) - 1) < 1e-6
        True
    """
    x = Tree(x)
    shift = step * Tree(direction)
    above = phi(problem, clients, x + shift, weights=weights)
    below = phi(problem, clients, x - shift, weights=weights)
    return float((above - below) / (2 * step))
