"""Estimates of z = H^-1 b that use H only through matrix-vector products.

A product may be that of one client (`Oracle.hessian_product`), an exchange with a cohort, or that
of the pooled problem. The functions serve all three and work under `torch.func.vmap`. The classes
`CG`, `Neumann`, `RandomProduct` and `Descent` are linear solvers as values, to be passed to
`fb.hypergradient`; they also return the residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import settings
from fedbilevel.core.rng import integers, root
from fedbilevel.core.settings import Count, NonNegative, Positive, at_least
from fedbilevel.core.tree import Tree, dot, norm, zeros_like

MatVec = Callable[[Tree], Tree]
T = TypeVar("T")


class UnsolvedError(ValueError):
    """A linear system, or a lower level, has no solution that could be found at this point.

    An evaluation that raises it after the first iteration ends a run as "diverged".

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> fb.linear.CG()(lambda v: -v, fb.Tree(y=torch.ones(1)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedbilevel.core.linear.UnsolvedError: CG met curvature -1 at step 0: ...
    """


class Solution(NamedTuple):
    """What a linear solver returns.

    Attributes:
        value: The estimate of z = H^-1 b.
        residual: The relative residual ||H z - b|| / ||b||; 0 where b = 0.
        products: How many products with H it took, including that of the residual.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> fb.linear.CG()(lambda v: 4.0 * v, fb.Tree(y=torch.ones(1)))
        Solution(value={'y': tensor([0.2500])}, residual=0.0, products=2)
    """

    value: Tree
    residual: float
    products: int


class Solver(Protocol):
    """A linear solver: any callable that takes a product and a right-hand side.

    `CG`, `Neumann`, `RandomProduct` and `Descent` are such solvers; `fb.hypergradient` takes any.

    Examples:
        A solver for matrices that are known to be 2 I:

        >>> import fedbilevel as fb
        >>> from fedbilevel.core.linear import Solution
        >>> def halve(matvec, b):
        ...     return Solution(b / 2, residual=0.0, products=0)
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> list(fb.hypergradient(task.problem, task.clients, task.problem.x, solver=halve))
        ['x']
    """

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        """Estimate z = H^-1 b.

        Args:
            matvec: The product v -> H v.
            b: The right-hand side.

        Returns:
            The estimate, its relative residual and the number of products.
        """
        ...


def _with_residual(matvec: MatVec, b: Tree, z: Tree, products: int) -> Solution:
    """The solution z with its residual, which takes one more product unless b is 0."""
    size = float(norm(b))
    if not size:
        return Solution(z, 0.0, products)
    residual = float(norm(matvec(z) - b)) / size
    return Solution(z, residual, products + 1)


@dataclass(frozen=True)
class CG:
    """Conjugate gradients, until the relative residual is at most `tolerance`.

    H must be symmetric positive definite. A direction without positive curvature is an error,
    because the estimate would be meaningless.

    Args:
        tolerance: The relative residual ||H z - b|| / ||b|| at which to stop.
        steps: The largest number of steps; each takes one product.

    Raises:
        ValueError: A setting is out of range; when called, H is not positive definite.

    References:
        Hestenes and Stiefel, "Methods of Conjugate Gradients for Solving Linear Systems", 1952.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.tensor([1.0, 2.0, 3.0]))
        >>> solution = fb.linear.CG(tolerance=1e-6)(lambda v: 2.0 * v, b)
        >>> solution.value
        {'y': tensor([0.5000, 1.0000, 1.5000])}
        >>> solution.products
        2
    """

    tolerance: NonNegative = 1e-10
    steps: Count = 1000

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        """Solve H z = b; see `Solver`."""
        z = zeros_like(b)
        r = b
        p = r
        rr = float(dot(r, r))
        goal = (self.tolerance**2) * rr
        for step in range(self.steps):
            if rr <= goal:
                return _with_residual(matvec, b, z, step)
            hp = matvec(p)
            curvature = float(dot(p, hp))
            if not curvature > 0:
                raise UnsolvedError(
                    f"CG met curvature {curvature:.3g} at step {step}: the matrix is not positive "
                    "definite (is the lower level strongly convex in y?)"
                )
            alpha = rr / curvature
            z = z + alpha * p
            r = r - alpha * hp
            rr_before = rr
            rr = float(dot(r, r))
            p = r + (rr / rr_before) * p
        return _with_residual(matvec, b, z, self.steps)


def conjugate_gradients(matvec: MatVec, b: Tree, steps: int) -> Tree:
    """`CG` with a fixed number of steps, for many systems at once under `torch.func.vmap`.

    It stays where it is once the system is solved, and at a direction without positive curvature,
    where `CG` raises.

    Args:
        matvec: The product v -> H v, with H symmetric.
        b: The right-hand side.
        steps: The number of steps; each takes one product.

    Returns:
        The estimate of H^-1 b, a tree like b.

    Examples:
        As many steps as H has different eigenvalues are enough:

        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.tensor([1.0, 2.0, 4.0]))
        >>> eigenvalues = fb.Tree(y=torch.tensor([1.0, 2.0, 2.0]))
        >>> z = fb.linear.conjugate_gradients(lambda v: v.map(torch.mul, eigenvalues), b, steps=2)
        >>> torch.allclose(z["y"], torch.tensor([1.0, 1.0, 2.0]))
        True
    """
    z = zeros_like(b)
    r = b
    p = b
    rr = dot(r, r)
    for _ in range(steps):
        hp = matvec(p)
        curvature = dot(p, hp)
        moves = curvature > 0
        alpha = torch.where(moves, rr / torch.where(moves, curvature, 1.0), 0.0)
        z = z + alpha * p
        r = r - alpha * hp
        rr_before = torch.where(moves, rr, 1.0)
        rr = dot(r, r)
        p = moves * (r + (rr / rr_before) * p)
    return z


def neumann_sum(matvec: MatVec, b: Tree, steps: int, lr: float) -> Tree:
    """The truncated Neumann series lr sum_{j < steps} (I - lr H)^j b.

    With L the largest eigenvalue of H, it tends to H^-1 b for 0 < lr < 2 / L. Along an eigenvector
    with eigenvalue h it is 1 - (1 - lr h)^steps of H^-1 b.

    Args:
        matvec: The product v -> H v.
        b: The right-hand side.
        steps: The number of terms; the sum takes `steps - 1` products.
        lr: The step size.

    Returns:
        The sum, a tree like b.

    Examples:
        The terms of 0.5 sum_j (1 - 0.5)^j are 1/2, 1/4, 1/8, ...:

        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> fb.linear.neumann_sum(lambda v: v, b, steps=3, lr=0.5)
        {'y': tensor([0.8750])}
    """
    term = b
    total = b
    for _ in range(steps - 1):
        term = term - lr * matvec(term)
        total = total + term
    return lr * total


def random_product(matvec: MatVec, b: Tree, steps: int, lr: float, length: int) -> Tree:
    """One random term of the Neumann series: lr steps (I - lr H)^length b.

    If `length` is uniform on {0, ..., steps - 1}, the expectation is `neumann_sum`.

    Args:
        matvec: The product v -> H v.
        b: The right-hand side.
        steps: The number of terms of the series.
        lr: The step size.
        length: The number of factors, hence of products.

    Returns:
        The scaled term, a tree like b.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> fb.linear.random_product(lambda v: v, b, steps=4, lr=0.5, length=2)
        {'y': tensor([0.5000])}
    """
    term = b
    for _ in range(length):
        term = term - lr * matvec(term)
    return lr * steps * term


def descend(matvec: MatVec, b: Tree, start: Tree, steps: int, lr: float) -> Tree:
    """Gradient descent on 1/2 z'Hz - b'z: `steps` times z <- z - lr (H z - b).

    Unlike `neumann_sum`, it can start from an earlier estimate.

    Args:
        matvec: The product v -> H v.
        b: The right-hand side.
        start: The initial z, a tree like b.
        steps: The number of steps; each takes one product.
        lr: The step size.

    Returns:
        The last z.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> start = fb.Tree(y=torch.zeros(1))
        >>> fb.linear.descend(lambda v: v, b, start, steps=2, lr=0.5)
        {'y': tensor([0.7500])}
    """
    z = start
    for _ in range(steps):
        z = z - lr * (matvec(z) - b)
    return z


def directional(
    gradient: Callable[[Tree], T], point: Tree, width: float = 1e-4
) -> Callable[[Tree], T]:
    """Second-order products without second derivatives, by central differences of a gradient.

    The product is v -> (gradient(point + h v) - gradient(point - h v)) / 2h with
    h = width / ||v||, so that the error is of the order of width^2 for v of any length. With
    y -> grad_y g it is the Hessian product d2yy g v, with y -> grad_x g the cross product d2xy g v.

    Args:
        gradient: A function of y that returns a tree, or trees in a tuple.
        point: The y at which to differentiate.
        width: The distance of the two differenced points from `point`.

    Returns:
        A function of v; its results have the structure of `gradient(point)`.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> y = fb.Tree(y=torch.tensor([3.0], dtype=torch.float64))
        >>> product = fb.linear.directional(lambda y: y.map(torch.square), y)
        >>> round(float(product(fb.Tree(y=torch.tensor([2.0])))["y"]), 6)
        12.0
    """

    def product(v: Tree) -> T:
        h = width / norm(v).clamp(min=torch.finfo(next(iter(v.values())).dtype).tiny)
        above = gradient(point + v * h)
        below = gradient(point - v * h)

        def quotient(a: Tensor, b: Tensor) -> Tensor:
            return (a - b) / (2 * h)

        difference: T = pytree.tree_map(quotient, above, below)
        return difference

    return product


@dataclass(frozen=True)
class Neumann:
    """The truncated Neumann series `neumann_sum` as a linear solver.

    Args:
        steps: The number of terms.
        lr: The step size, below 2 / L with L the largest eigenvalue of H.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> fb.linear.Neumann(steps=3, lr=0.5)(lambda v: v, b)
        Solution(value={'y': tensor([0.8750])}, residual=0.125, products=3)
    """

    steps: Count = 100
    lr: Positive = 0.1

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        """Estimate H^-1 b; see `Solver`."""
        z = neumann_sum(matvec, b, self.steps, self.lr)
        return _with_residual(matvec, b, z, self.steps - 1)


@dataclass(frozen=True)
class RandomProduct:
    """The random term `random_product`, of a length drawn with `seed`, as a linear solver.

    Args:
        steps: The number of terms of the Neumann series; lengths are below it.
        lr: The step size.
        seed: Determines the length.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> fb.linear.RandomProduct(steps=1, lr=0.5)(lambda v: v, b).value
        {'y': tensor([0.5000])}
    """

    steps: Count = 100
    lr: Positive = 0.1
    seed: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        """Estimate H^-1 b; see `Solver`."""
        length = int(integers(root(self.seed, "random product"), 0, self.steps - 1))
        z = random_product(matvec, b, self.steps, self.lr, length)
        return _with_residual(matvec, b, z, length)


@dataclass(frozen=True)
class Descent:
    """Gradient descent, `descend`, as a linear solver.

    Args:
        steps: The number of steps.
        lr: The step size.
        start: The initial z; None stands for 0.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> b = fb.Tree(y=torch.ones(1))
        >>> fb.linear.Descent(steps=2, lr=0.5)(lambda v: v, b).value
        {'y': tensor([0.7500])}
    """

    steps: Count = 100
    lr: Positive = 0.1
    start: Tree | None = None

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        """Estimate H^-1 b; see `Solver`."""
        start = self.start
        if start is None:
            start = zeros_like(b)
        z = descend(matvec, b, start, self.steps, self.lr)
        return _with_residual(matvec, b, z, self.steps)
