"""Derivatives of a problem on batches. Knows nothing of clients, rounds or step sizes; written for one client.

Notation: f is the upper loss on a validation batch, g the lower loss on a training batch. Every call adds its
gradient-equivalents to `gradients`: a gradient 1; a Hessian- or cross-vector product, or both from one pass, 2.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.func import grad

from fedbilevel.problem import Batch, Problem
from fedbilevel.rng import fold_in
from fedbilevel.tree import Tree, dot


class Directions(NamedTuple):
    """The three directions at (x, y, z): d_x, d_y, d_z."""

    x: Tree
    y: Tree
    z: Tree


def _level(batch: Batch, level: int) -> Tensor | tuple[()]:
    """The two losses draw from streams of their own."""
    return fold_in(batch.rng, level) if isinstance(batch.rng, Tensor) else ()


class Oracle:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.gradients = 0

    def upper(self, x: Tree, y: Tree, batch: Batch) -> Tensor:
        """f(x, y)."""
        return self.problem.upper(x, y, batch.val, _level(batch, 1))

    def lower(self, x: Tree, y: Tree, batch: Batch) -> Tensor:
        """g(x, y)."""
        return self.problem.lower(x, y, batch.train, _level(batch, 0))

    def project_x(self, x: Tree) -> Tree:
        return self.problem.project(x)

    def directions(self, x: Tree, y: Tree, z: Tree, batch: Batch, damping: float = 0.0) -> Directions:
        """All three directions in one evaluation, at about the cost of one gradient on each batch:

        d_x = grad_x f - d2xy g z,   d_y = grad_y g,   d_z = (d2yy g + damping) z - grad_y f.

        grad_y g is taken with a graph; then one reverse pass of f - <grad_y g, z> gives d_x, and -d_z for y.
        """
        self.gradients += 3

        def surrogate(x: Tree, y: Tree) -> tuple[Tensor, Tree]:
            d_y = grad(self.lower, argnums=1)(x, y, batch)
            return self.upper(x, y, batch) - dot(d_y, z), d_y

        (d_x, minus_d_z), d_y = grad(surrogate, argnums=(0, 1), has_aux=True)(x, y)
        d_z = damping * z - minus_d_z if damping else -minus_d_z
        return Directions(d_x, d_y, d_z)

    def lower_gradient_y(self, x: Tree, y: Tree, batch: Batch) -> Tree:
        """grad_y g."""
        self.gradients += 1
        return grad(self.lower, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    def lower_gradients(self, x: Tree, y: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """grad_x g and grad_y g."""
        self.gradients += 1
        return grad(self.lower, argnums=(0, 1))(x, y, batch)  # type: ignore[no-any-return]

    def upper_gradients(self, x: Tree, y: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """grad_x f and grad_y f."""
        self.gradients += 1
        return grad(self.upper, argnums=(0, 1))(x, y, batch)  # type: ignore[no-any-return]

    def upper_gradient_x(self, x: Tree, y: Tree, batch: Batch) -> Tree:
        """grad_x f."""
        self.gradients += 1
        return grad(self.upper, argnums=0)(x, y, batch)  # type: ignore[no-any-return]

    def upper_gradient_y(self, x: Tree, y: Tree, batch: Batch) -> Tree:
        """grad_y f."""
        self.gradients += 1
        return grad(self.upper, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    def hessian_product(self, x: Tree, y: Tree, v: Tree, batch: Batch) -> Tree:
        """d2yy g v."""
        self.gradients += 2
        return grad(self._slope, argnums=1)(x, y, v, batch)  # type: ignore[no-any-return]

    def lower_gradient_and_product(self, x: Tree, y: Tree, v: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """grad_y g and d2yy g v from one pass."""
        self.gradients += 2

        def slope(y: Tree) -> tuple[Tensor, Tree]:
            g_y = grad(self.lower, argnums=1)(x, y, batch)
            return dot(g_y, v), g_y

        product, g_y = grad(slope, has_aux=True)(y)
        return g_y, product

    def cross_product(self, x: Tree, y: Tree, v: Tree, batch: Batch) -> Tree:
        """d2xy g v: a vector like x."""
        self.gradients += 2
        return grad(self._slope, argnums=0)(x, y, v, batch)  # type: ignore[no-any-return]

    def products(self, x: Tree, y: Tree, v: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """d2xy g v and d2yy g v from one pass."""
        self.gradients += 2
        return grad(self._slope, argnums=(0, 1))(x, y, v, batch)  # type: ignore[no-any-return]

    def _slope(self, x: Tree, y: Tree, v: Tree, batch: Batch) -> Tensor:
        """<grad_y g, v>: its gradients are the second-order products."""
        return dot(grad(self.lower, argnums=1)(x, y, batch), v)
