"""Solvers of H z = b that see H only through products, on any vectors that add, scale and have `dot` (trees)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fedbilevel import checks
from fedbilevel.tree import Tree, dot, norm, zeros_like

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
    return Solution(z, float(norm(matvec(z) - b)) / size, products + 1) if size else Solution(z, 0.0, products)


@dataclass(frozen=True)
class CG:
    """Conjugate gradients (Hestenes and Stiefel 1952), until the relative residual is at most `tolerance`.

    H must be symmetric positive definite: a direction of negative curvature raises instead of returning nonsense.
    """

    tolerance: float = 1e-10
    steps: int = 1000

    def __post_init__(self) -> None:
        checks.non_negative("tolerance", self.tolerance)
        checks.integer("steps", self.steps, least=1)

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


@dataclass(frozen=True)
class Neumann:
    """The truncated sum z = lr * sum_{j < steps} (I - lr H)^j b; converges for 0 < lr < 2 / L. Memory flat in steps."""

    steps: int = 100
    lr: float = 0.1

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, least=1)
        checks.positive("lr", self.lr)

    def __call__(self, matvec: MatVec, b: Tree) -> Solution:
        term = total = b
        for _ in range(self.steps - 1):
            term = term - self.lr * matvec(term)
            total = total + term
        return _solution(matvec, b, self.lr * total, self.steps - 1)
