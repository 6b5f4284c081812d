"""Estimates of z = H^-1 b that see H only through products.

A product may be a client's own (`oracle.hessian_product`), an exchange with a cohort, or that of the pooled problem:
the functions serve all three, also under `vmap`. The classes are the same as arguments; they return the residual too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from fedbilevel.core import settings
from fedbilevel.core.rng import integers, root
from fedbilevel.core.settings import Count, NonNegative, Positive, at_least
from fedbilevel.core.tree import Tree, dot, norm, zeros_like

MatVec = Callable[[Tree], Tree]


class Solution(NamedTuple):
    """z, with the relative residual ||H z - b|| / ||b|| it leaves and the products it took."""

    value: Tree
    residual: float
    products: int


class Solver(Protocol):
    def __call__(self, matvec: MatVec, b: Tree) -> Solution: ...


def _solution(matvec: MatVec, b: Tree, z: Tree, products: int) -> Solution:
    size = float(norm(b))
    return (
        Solution(z, float(norm(matvec(z) - b)) / size, products + 1)
        if size
        else Solution(z, 0.0, products)
    )


@dataclass(frozen=True)
class CG:
    """Conjugate gradients (Hestenes and Stiefel 1952), until the relative residual is at most `tolerance`.

    H must be symmetric positive definite: a direction of negative curvature raises instead of returning nonsense.
    """

    tolerance: NonNegative = 1e-10
    steps: Count = 1000

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        z, r = zeros_like(b), b
        p, rr = r, float(dot(r, r))
        goal = (self.tolerance**2) * rr
        for step in range(self.steps):
            if rr <= goal:
                return _solution(matvec, b, z, step)
            hp = matvec(p)
            curvature = float(dot(p, hp))
            if not curvature > 0:
                raise ValueError(
                    f"CG met curvature {curvature:.3g} at step {step}: the matrix is not positive definite "
                    "(is the lower level strongly convex in y?)"
                )
            alpha = rr / curvature
            z, r = z + alpha * p, r - alpha * hp
            before, rr = rr, float(dot(r, r))
            p = r + (rr / before) * p
        return _solution(matvec, b, z, self.steps)


def neumann_sum(matvec: MatVec, b: Tree, steps: int, lr: float) -> Tree:
    """lr sum_{j < steps} (I - lr H)^j b, by steps - 1 products; tends to H^-1 b for 0 < lr < 2 / L."""
    term = total = b
    for _ in range(steps - 1):
        term = term - lr * matvec(term)
        total = total + term
    return lr * total


def random_product(matvec: MatVec, b: Tree, steps: int, lr: float, length: int) -> Tree:
    """lr steps (I - lr H)^length b: with length uniform on {0 .. steps - 1} its expectation is `neumann_sum`."""
    term = b
    for _ in range(length):
        term = term - lr * matvec(term)
    return lr * steps * term


def descend(matvec: MatVec, b: Tree, start: Tree, steps: int, lr: float) -> Tree:
    """`steps` times z <- z - lr (H z - b), from `start`: the linear system as a problem to descend on, warm-started."""
    z = start
    for _ in range(steps):
        z = z - lr * (matvec(z) - b)
    return z


def directional(
    gradient: Callable[[Tree], Any], point: Tree, width: float = 1e-4
) -> Callable[[Tree], Any]:
    """Products without second derivatives: v -> (gradient(point + h v) - gradient(point - h v)) / 2h.

    For grad_y g as a function of y this is d2yy g v, for grad_x g it is d2xy g v. h = width / ||v||, so that the error
    is of the order of width^2 whatever the length of v.
    """

    def product(v: Tree) -> Any:
        h = width / norm(v).clamp(min=torch.finfo(next(iter(v.values())).dtype).tiny)
        above, below = gradient(point + v * h), gradient(point - v * h)
        return pytree.tree_map(lambda a, b: (a - b) / (2 * h), above, below)

    return product


@dataclass(frozen=True)
class Neumann:
    """`neumann_sum` with `steps` terms."""

    steps: Count = 100
    lr: Positive = 0.1

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        return _solution(matvec, b, neumann_sum(matvec, b, self.steps, self.lr), self.steps - 1)


@dataclass(frozen=True)
class RandomProduct:
    """`random_product` of a length drawn with `seed`."""

    steps: Count = 100
    lr: Positive = 0.1
    seed: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        length = int(integers(root(self.seed, "random product"), 0, self.steps - 1))
        return _solution(matvec, b, random_product(matvec, b, self.steps, self.lr, length), length)


@dataclass(frozen=True)
class Descent:
    """`descend` from `start` (0 if not given)."""

    steps: Count = 100
    lr: Positive = 0.1
    start: Tree | None = None

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        start = zeros_like(b) if self.start is None else self.start
        return _solution(matvec, b, descend(matvec, b, start, self.steps, self.lr), self.steps)
