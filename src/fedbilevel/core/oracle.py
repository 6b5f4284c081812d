"""Derivatives of a problem on batches. Knows nothing of clients, rounds or step sizes; written for one client.

Notation: f is the upper loss on a validation batch, g the lower loss on a training batch. Every call adds its
gradient-equivalents to `gradients`: a gradient 1; a Hessian- or cross-vector product, or both from one pass, 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.utils import _pytree as pytree

from fedbilevel.core.problem import Batch, Data, Problem, leaves, like
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import Tree, dot, nbytes, norm


class Directions(NamedTuple):
    """The three directions at (x, y, z): d_x, d_y, d_z."""

    x: Tree
    y: Tree
    z: Tree


class Features(Batch):
    """A batch whose data are embedded, which has no derivatives in x."""


class Embedded(NamedTuple):
    """A batch at one x: `build` makes it of its features, `pull` takes derivatives in those back to x."""

    raw: Batch
    features: list[Tensor]
    build: Callable[[list[Tensor]], Features]
    pull: Callable[[list[Tensor]], tuple[Tree]]


AnyBatch = Batch | Embedded
Loss = Callable[[Tree, Tree, Any], Tensor]


class Oracle:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.gradients = 0

    def upper(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """f(x, y)."""
        whole = batch.build(batch.features) if isinstance(batch, Embedded) else batch
        return self.problem.upper(x, y, self._data(x, whole, 1), self._key(whole, 1))

    def lower(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """g(x, y)."""
        whole = batch.build(batch.features) if isinstance(batch, Embedded) else batch
        return self.problem.lower(x, y, self._data(x, whole, 0), self._key(whole, 0))

    def embed(self, x: Tree, batch: Batch) -> AnyBatch:
        """The batch with what depends on x alone evaluated, to be given to the derivatives below in its place.

        They have the same values but do not run the backbone again; one in x goes through it once, backwards.
        """
        if self.problem.embed is None:
            return batch
        form: Any = None
        floating: list[bool] = []  # labels have no derivatives

        def features(x: Tree) -> tuple[list[Tensor], list[Tensor]]:
            nonlocal form, floating
            leaves, form = pytree.tree_flatten(
                (self._data(x, batch, 0), self._data(x, batch, 1), batch.rng)
            )
            floating = [leaf.is_floating_point() for leaf in leaves]
            return list(itertools.compress(leaves, floating)), [
                t for t in leaves if not t.is_floating_point()
            ]

        def build(features: list[Tensor]) -> Features:
            some, rest = iter(features), iter(others)
            return Features(
                *pytree.tree_unflatten([next(some if f else rest) for f in floating], form)
            )

        found, pull, others = vjp(features, x, has_aux=True)  # type: ignore[misc]  # typed without aux
        return Embedded(batch, found, build, pull)

    def _together(self, x: Tree, batch: Batch) -> Batch:
        """Both sides embedded at once: one pass through the backbone each way, and one gradient of its weights, not two
        to add. That pays where x is larger than the samples, which are copied for it.
        """
        sides = [leaves(data) for data in (batch.train, batch.val)]
        forms = [[(name, t.shape[1:], t.dtype) for name, t in side] for side in sides]
        pays = bool(batch.train) and nbytes(sides) <= nbytes(x)
        if (
            not pays
            or not self.problem.embeds_samples
            or isinstance(batch, Features)
            or forms[0] != forms[1]
        ):
            return batch
        assert self.problem.embed
        both = like(batch.train, [torch.cat([a, b]) for (_, a), (_, b) in zip(*sides, strict=True)])
        counts = [len(side[0][1]) for side in sides]
        there = self.problem.embed(x, both, ())
        split = [tensor.split(counts) for _, tensor in leaves(there)]
        train, val = ([parts[j] for parts in split] for j in range(2))
        return Features(like(there, train), like(there, val), batch.rng)

    def _data(self, x: Tree, batch: Batch, level: int) -> Data:
        """What a loss is given of its side of a batch."""
        data = (batch.train, batch.val)[level]
        if self.problem.embed is None or isinstance(batch, Features) or not data:
            return data
        return self.problem.embed(x, data, self._key(batch, level))

    def _key(self, batch: Batch, level: int) -> Tensor | tuple[()]:
        """The two losses draw from streams of their own, those of an episode from the same."""
        if not isinstance(batch.rng, Tensor) or self.problem.lower_level == "private":
            return batch.rng
        return fold_in(batch.rng, level)

    def project_x(self, x: Tree) -> Tree:
        return self.problem.project(x)

    def directions(
        self, x: Tree, y: Tree, z: Tree, batch: Batch, damping: float = 0.0
    ) -> Directions:
        """All three directions in one evaluation, at about the cost of one gradient on each batch:

        d_x = grad_x f - d2xy g z,   d_y = grad_y g,   d_z = (d2yy g + damping) z - grad_y f.

        grad_y g is taken with a graph; then one reverse pass of f - <grad_y g, z> gives d_x, and -d_z for y.
        """
        self.gradients += 3

        def surrogate(x: Tree, y: Tree) -> tuple[Tensor, Tree]:
            there = self._together(x, _raw(batch))
            d_y = grad(self.lower, argnums=1)(x, y, there)
            return self.upper(x, y, there) - dot(d_y, z), d_y

        (d_x, minus_d_z), d_y = grad(surrogate, argnums=(0, 1), has_aux=True)(x, y)
        d_z = damping * z - minus_d_z if damping else -minus_d_z
        return Directions(d_x, d_y, d_z)

    def lower_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y g."""
        self.gradients += 1
        return grad(self.lower, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    def lower_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x g and grad_y g."""
        self.gradients += 1
        return self._both(self.lower, x, y, batch)

    def upper_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x f and grad_y f."""
        self.gradients += 1
        return self._both(self.upper, x, y, batch)

    def upper_gradient_x(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_x f."""
        self.gradients += 1
        return self._by_x(self.upper, x, y, batch)

    def upper_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y f."""
        self.gradients += 1
        return grad(self.upper, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    def hessian_product(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> Tree:
        """d2yy g v."""
        self.gradients += 2
        return grad(self._slope(v), argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    def lower_gradient_and_product(
        self, x: Tree, y: Tree, v: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        """grad_y g and d2yy g v from one pass."""
        self.gradients += 2

        def slope(y: Tree) -> tuple[Tensor, Tree]:
            g_y = grad(self.lower, argnums=1)(x, y, batch)
            return dot(g_y, v), g_y

        product, g_y = grad(slope, has_aux=True)(y)
        return g_y, product

    def cross_product(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> Tree:
        """d2xy g v: a vector like x."""
        self.gradients += 2
        return self._by_x(self._slope(v), x, y, batch)

    def products(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """d2xy g v and d2yy g v from one pass."""
        self.gradients += 2
        return self._both(self._slope(v), x, y, batch)

    def hypergradient(self, x: Tree, y: Tree, p: Tree, batch: AnyBatch) -> Tree:
        """grad_x f - d2xy g p."""
        self.gradients += 3
        slope = self._slope(p)

        def surrogate(x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
            there = batch if isinstance(batch, Embedded) else self._together(x, batch)
            return self.upper(x, y, there) - slope(x, y, there)

        return self._by_x(surrogate, x, y, batch)

    def difference_hypergradient(
        self, x: Tree, y: Tree, p: Tree, batch: AnyBatch, width: float
    ) -> Tree:
        """The same without second derivatives: the gradient in x of f(y) - (g(y + h p) - g(y - h p)) / 2h.

        h = width / ||p||; the error is of the order of width^2.
        """
        self.gradients += 3
        h = width / norm(p).clamp(min=torch.finfo(next(iter(p.values())).dtype).tiny)

        def surrogate(x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
            rise = self.lower(x, y + p * h, batch) - self.lower(x, y - p * h, batch)
            return self.upper(x, y, batch) - rise / (2 * h)

        return self._by_x(surrogate, x, y, batch)

    def feature_gradient(self, loss: Callable[[Data, Data], Tensor], x: Tree, batch: Batch) -> Tree:
        """The gradient in x of loss(embedded training data, embedded validation data), through both batches."""
        self.gradients += 2
        raw = _raw(batch)
        return grad(lambda x: loss(self._data(x, raw, 0), self._data(x, raw, 1)))(x)  # type: ignore[no-any-return]

    def _slope(self, v: Tree) -> Loss:
        """<grad_y g, v>: its gradients are the second-order products."""
        return lambda x, y, batch: dot(grad(self.lower, argnums=1)(x, y, batch), v)

    def _by_x(self, fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """The derivative of fn(x, y, batch) in x, through the features where there are any."""
        if not isinstance(batch, Embedded):
            return grad(fn)(x, y, _raw(batch))  # type: ignore[no-any-return]
        return self._both(fn, x, y, batch)[0]

    def _both(self, fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """Its derivatives in x and in y."""
        if not isinstance(batch, Embedded):
            return grad(fn, argnums=(0, 1))(x, y, _raw(batch))  # type: ignore[no-any-return]
        build = batch.build
        by_x, by_y, by_features = grad(lambda x, y, f: fn(x, y, build(f)), argnums=(0, 1, 2))(
            x, y, batch.features
        )
        return by_x + batch.pull(by_features)[0], by_y


def _raw(batch: Batch) -> Batch:
    if isinstance(batch, Features):
        raise TypeError(
            "a phase with fixed_x is given features, which have no derivatives in x; its fixed_x must be False"
        )
    return batch
