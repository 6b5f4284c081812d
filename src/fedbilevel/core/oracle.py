"""`Oracle`: gradients, Hessian products and cross products of the losses on a batch of one client.

Throughout, f is the upper loss on a validation batch and g the lower loss on a training batch. The
oracle knows neither clients nor rounds nor step sizes, and its functions work under
`torch.func.vmap`, which is how executors evaluate many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel.core.client_data import Batch, Data
from fedbilevel.core.derivatives import grad, unfused_kernels, vmap
from fedbilevel.core.embedding import (
    LOWER,
    UPPER,
    AnyBatch,
    EmbeddedBatch,
    FeatureBatch,
    Loss,
    data_of,
    differentiable,
    embed,
    embed_sides_together,
    gradient_x,
    gradients,
    key_of,
)
from fedbilevel.core.micro_batches import in_parts, is_split
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot, flatten, norm, unflatten


class Directions(NamedTuple):
    """The three directions of a single-loop method at (x, y, z); see `Oracle.directions`.

    Attributes:
        x: d_x = grad_x f - d2xy g z, an estimate of the hypergradient.
        y: d_y = grad_y g, the gradient of the lower level.
        z: d_z = d2yy g z - grad_y f, the residual of the linear system.
    """

    x: Tree
    y: Tree
    z: Tree


class PenaltyDirections(NamedTuple):
    """The three directions of a penalty method at (x, y, u); see `Oracle.penalty_directions`.

    Attributes:
        x: d_x, the gradient in x of f(x, u) + penalty (g(x, u) - g(x, y)).
        y: d_y = grad_y g at y.
        u: d_u = grad_y g + grad_y f / penalty at u.
    """

    x: Tree
    y: Tree
    u: Tree


class Oracle:
    """Values and derivatives of the two losses of a problem, on one batch of one client.

    Every call adds its cost to `gradients`, in units of one gradient on one batch: 1 for a
    gradient, 2 for a Hessian product or a cross product (or both from one pass), 3 for a
    hypergradient or for all three directions. Values of the losses cost nothing. How second
    derivatives are computed is `Problem.derivatives`; with "differences" the methods that return a
    first derivative beside a product cost 1 more.

    Every method takes x and y, trees of the upper and the lower variables, and a batch, of which f
    uses the validation side and g the training side. A vector v or p is a tree like y. Derivatives
    in x are trees like x, those in y trees like y.

    Args:
        problem: The problem whose losses are differentiated.

    Attributes:
        problem: The same problem.
        gradients: The gradients that have been computed so far.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.oracle import Oracle
        >>> problem = fb.Problem(
        ...     upper=lambda x, y, batch: 0.5 * (y["y"] ** 2).sum(),
        ...     lower=lambda x, y, batch: 0.5 * batch[0].mean() * ((y["y"] - x["x"]) ** 2).sum(),
        ...     x={"x": torch.tensor([1.0])},
        ...     y={"y": torch.tensor([3.0])},
        ... )
        >>> oracle = Oracle(problem)
        >>> x, y = problem.start
        >>> batch = fb.Batch(train=(torch.tensor([2.0]),), val=(torch.tensor([2.0]),))
        >>> oracle.lower_gradient_y(x, y, batch)
        {'y': tensor([4.])}
        >>> oracle.hessian_product(x, y, fb.Tree(y=torch.tensor([1.0])), batch)
        {'y': tensor([2.])}
        >>> oracle.gradients
        3
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.gradients = 0
        self.factors = (1.0, 1.0)  # of the lower and the upper loss, on a part of a batch

    @in_parts
    def upper(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The upper loss f(x, y), a 0-d tensor."""
        return self._value(self.problem.upper, UPPER, x, y, batch)

    @in_parts
    def lower(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The lower loss g(x, y), a 0-d tensor."""
        return self._value(self.problem.lower, LOWER, x, y, batch)

    def _value(
        self, loss: Callable[..., Tensor], level: int, x: Tree, y: Tree, batch: AnyBatch
    ) -> Tensor:
        """A loss, scaled so that the mean over the parts of a batch is the loss on all of it."""
        if isinstance(batch, EmbeddedBatch):
            batch = batch.rebuild(batch.features)
        data = data_of(self.problem, x, batch, level)
        value = loss(x, y, data, key_of(self.problem, batch, level))
        factor = self.factors[level]
        if factor == 1.0:
            return value
        return factor * value

    def kernels(self) -> AbstractContextManager[None]:
        """A context in which losses are evaluated whose gradients are differentiated again.

        Returns:
            `unfused_kernels()` where the losses need that (see `Problem.derivatives`); else a
            context in which nothing changes.
        """
        if self.problem.derivatives == "unfused":
            return unfused_kernels()
        return nullcontext()

    def project_x(self, x: Tree) -> Tree:
        """The feasible point closest to x; see `Problem.project`."""
        return self.problem.project(x)

    def embed(self, x: Tree, batch: Batch) -> AnyBatch:
        """Run the backbone (`Problem.embed`) once, for several derivatives at the same x.

        The methods below take the result in place of the batch. They return the same values but do
        not run the backbone again; a derivative in x passes through it once, backwards.

        Args:
            x: The upper variables at which all derivatives will be taken.
            batch: The batch to embed.

        Returns:
            The embedded batch, or `batch` itself if the problem has no `embed`, or if derivatives
            on it are evaluated in parts.
        """
        if self.problem.embed is None or is_split(batch, self.problem.micro_batch):
            return batch
        return embed(self.problem, x, batch)

    @in_parts
    def directions(
        self, x: Tree, y: Tree, z: Tree, batch: Batch, damping: float = 0.0
    ) -> Directions:
        """The three directions of a single-loop method, in one fused evaluation.

            d_x = grad_x f - d2xy g z
            d_y = grad_y g
            d_z = (d2yy g + damping I) z - grad_y f

        grad_y g is computed with a graph. One reverse pass through f - <grad_y g, z> then gives
        d_x in x and -d_z (without damping) in y. Costs 3 gradients.

        Args:
            z: Estimate of the solution of d2yy g z = grad_y f, a tree like y.
            damping: Added to the Hessian of the lower level.

        Examples:
            >>> import torch
            >>> import fedbilevel as fb
            >>> from fedbilevel.core.oracle import Oracle
            >>> problem = fb.Problem(
            ...     upper=lambda x, y, batch: 0.5 * (y["y"] ** 2).sum(),
            ...     lower=lambda x, y, batch: ((y["y"] - x["x"]) ** 2).sum(),
            ...     x={"x": torch.tensor([1.0])},
            ...     y={"y": torch.tensor([3.0])},
            ... )
            >>> data = (torch.zeros(1),)
            >>> z = fb.Tree(y=torch.tensor([1.0]))
            >>> d = Oracle(problem).directions(*problem.start, z, fb.Batch(data, data))
            >>> d.x, d.y, d.z
            ({'x': tensor([2.])}, {'y': tensor([4.])}, {'y': tensor([-1.])})
        """
        self.gradients += 3

        def surrogate(x: Tree, y: Tree) -> tuple[Tensor, Tree | None]:
            features = embed_sides_together(self.problem, x, differentiable(batch))
            slope, d_y = self._slope_and_gradient(x, y, z, features)
            return self.upper(x, y, features) - slope, d_y

        (d_x, minus_d_z), d_y = grad(surrogate, argnums=(0, 1), has_aux=True)(x, y)
        if d_y is None:
            d_y = self.lower_gradient_y(x, y, batch)
        if damping:
            d_z = damping * z - minus_d_z
        else:
            d_z = -minus_d_z
        return Directions(d_x, d_y, d_z)

    @in_parts
    def penalty_directions(
        self, x: Tree, y: Tree, u: Tree, batch: Batch, penalty: float
    ) -> PenaltyDirections:
        """The three directions of a penalty method, from first derivatives alone.

            d_x = grad_x f(x, u) + penalty (grad_x g(x, u) - grad_x g(x, y))
            d_y = grad_y g(x, y)
            d_u = grad_y g(x, u) + grad_y f(x, u) / penalty

        Without `Problem.embed`, the three losses are differentiated one after another, so that
        only one of their graphs is in memory; with it, they share one pass through the backbone.
        Costs 3 gradients.

        Args:
            y: Lower variables, an estimate of the minimiser of g.
            u: Lower variables, an estimate of the minimiser of g + f / penalty.
            penalty: The weight of the lower loss, above 0.

        Examples:
            >>> import torch
            >>> import fedbilevel as fb
            >>> from fedbilevel.core.oracle import Oracle
            >>> problem = fb.Problem(
            ...     upper=lambda x, y, batch: 0.5 * (y["y"] ** 2).sum(),
            ...     lower=lambda x, y, batch: 0.5 * ((y["y"] - x["x"]) ** 2).sum(),
            ...     x={"x": torch.tensor([1.0])},
            ...     y={"y": torch.tensor([3.0])},
            ... )
            >>> data = (torch.zeros(1),)
            >>> u = fb.Tree(y=torch.tensor([2.0]))
            >>> d = Oracle(problem).penalty_directions(*problem.start, u, fb.Batch(data, data), 4.0)
            >>> d.x, d.y, d.u
            ({'x': tensor([4.])}, {'y': tensor([2.])}, {'y': tensor([1.5000])})
        """
        if self.problem.embed is None:
            f_x, f_u = self.upper_gradients(x, u, batch)
            g_x, g_u = self.lower_gradients(x, u, batch)
            g_x_at_y, d_y = self.lower_gradients(x, y, batch)
            d_x = f_x + penalty * (g_x - g_x_at_y)
            return PenaltyDirections(d_x, d_y, g_u + f_u / penalty)
        self.gradients += 3

        def lagrangian(x: Tree, y: Tree, u: Tree) -> Tensor:
            features = embed_sides_together(self.problem, x, differentiable(batch))
            if not isinstance(features, FeatureBatch):
                train, val = (data_of(self.problem, x, features, level) for level in (LOWER, UPPER))
                features = FeatureBatch(train, val, features.rng)
            gap = self.lower(x, u, features) - self.lower(x, y, features)
            return self.upper(x, u, features) + penalty * gap

        d_x, by_y, by_u = grad(lagrangian, argnums=(0, 1, 2))(x, y, u)
        return PenaltyDirections(d_x, -by_y / penalty, by_u / penalty)

    @in_parts
    def lower_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y g. Costs 1 gradient."""
        self.gradients += 1
        return grad(self.lower, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    @in_parts
    def lower_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x g and grad_y g from one pass. Costs 1 gradient."""
        self.gradients += 1
        return gradients(self.lower, x, y, batch)

    @in_parts
    def upper_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x f and grad_y f from one pass. Costs 1 gradient."""
        self.gradients += 1
        return gradients(self.upper, x, y, batch)

    @in_parts
    def upper_gradient_x(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_x f. Costs 1 gradient."""
        self.gradients += 1
        return gradient_x(self.upper, x, y, batch)

    @in_parts
    def upper_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y f. Costs 1 gradient."""
        self.gradients += 1
        return grad(self.upper, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    @in_parts
    def hessian_product(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> Tree:
        """The Hessian product d2yy g v. Costs 2 gradients.

        Examples:
            Hessian products are all that the linear solvers of `fedbilevel.linear` need:

            >>> import fedbilevel as fb
            >>> from fedbilevel.core.oracle import Oracle
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> oracle = Oracle(task.problem)
            >>> x, y = task.problem.start
            >>> batch = fb.Batch(task.clients[0].train, task.clients[0].val)
            >>> b = oracle.upper_gradient_y(x, y, batch)
            >>> solution = fb.linear.CG()(lambda v: oracle.hessian_product(x, y, v, batch), b)
            >>> solution.residual < 1e-9
            True
        """
        self.gradients += 2
        return grad(self._lower_slope(v), argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    @in_parts
    def lower_gradient_and_product(
        self, x: Tree, y: Tree, v: Tree, batch: AnyBatch
    ) -> tuple[Tree, Tree]:
        """grad_y g and the Hessian product d2yy g v from one pass. Costs 2 gradients."""
        self.gradients += 2

        def slope(y: Tree) -> tuple[Tensor, Tree | None]:
            return self._slope_and_gradient(x, y, v, batch)

        product, g_y = grad(slope, has_aux=True)(y)
        if g_y is None:
            g_y = self.lower_gradient_y(x, y, batch)
        return g_y, product

    def hessian_matrix(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The Hessian d2yy g as a matrix. Costs 2 gradients per number in y.

        It has a row and a column for each number in y, in the order of `flatten`.
        """
        return self._for_each_unit_vector(
            y, lambda v: flatten(self.hessian_product(x, y, v, batch))
        )

    def cross_matrix(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The mixed second derivatives d2xy g as a matrix. Costs 2 gradients per number in y.

        It has a row for each number in x and a column for each in y, in the order of `flatten`.
        """
        columns = self._for_each_unit_vector(
            y, lambda v: flatten(self.cross_product(x, y, v, batch))
        )
        return columns.T

    def _for_each_unit_vector(self, y: Tree, product: Callable[[Tree], Tensor]) -> Tensor:
        """The product with each unit vector of the space of y, a row for each."""
        first = next(iter(y.values()))
        unit_vectors = torch.eye(y.numel, dtype=first.dtype, device=first.device)
        before = self.gradients
        rows: Tensor = vmap(lambda v: product(unflatten(v, y)))(unit_vectors)
        # The function was called once for all vectors.
        self.gradients = before + y.numel * (self.gradients - before)
        return rows

    @in_parts
    def cross_product(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> Tree:
        """The cross product d2xy g v. Costs 2 gradients."""
        self.gradients += 2
        return gradient_x(self._lower_slope(v), x, y, batch)

    @in_parts
    def products(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """The cross product d2xy g v and the Hessian product d2yy g v from one pass.

        Costs 2 gradients.
        """
        self.gradients += 2
        return gradients(self._lower_slope(v), x, y, batch)

    @in_parts
    def hypergradient(self, x: Tree, y: Tree, p: Tree, batch: AnyBatch) -> Tree:
        """grad_x f - d2xy g p, the hypergradient where d2yy g p = grad_y f. Costs 3 gradients.

        Args:
            p: An estimate of [d2yy g]^-1 grad_y f.

        Examples:
            The hypergradient of a single client at its own y*(x):

            >>> import torch
            >>> import fedbilevel as fb
            >>> from fedbilevel.core.oracle import Oracle
            >>> task = fb.tasks.load("quadratic", clients=1)
            >>> oracle = Oracle(task.problem)
            >>> x, _ = task.problem.start
            >>> y = task.y_star(x)
            >>> batch = fb.Batch(task.clients[0].train, task.clients[0].val)
            >>> b = oracle.upper_gradient_y(x, y, batch)
            >>> p = fb.linear.CG()(lambda v: oracle.hessian_product(x, y, v, batch), b).value
            >>> torch.allclose(oracle.hypergradient(x, y, p, batch)["x"], task.gradient(x)["x"])
            True
        """
        self.gradients += 3
        slope = self._lower_slope(p)

        def surrogate(x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
            if not isinstance(batch, EmbeddedBatch):
                batch = embed_sides_together(self.problem, x, batch)
            return self.upper(x, y, batch) - slope(x, y, batch)

        return gradient_x(surrogate, x, y, batch)

    @in_parts
    def difference_hypergradient(
        self, x: Tree, y: Tree, p: Tree, batch: AnyBatch, width: float
    ) -> Tree:
        """`hypergradient` without second derivatives. Costs 3 gradients.

        It is the gradient in x of

            f(x, y) - (g(x, y + h p) - g(x, y - h p)) / 2h    with    h = width / ||p||,

        whose error is of the order of width^2.

        Args:
            p: An estimate of [d2yy g]^-1 grad_y f.
            width: The distance of the two differenced points from y.
        """
        self.gradients += 3
        h = _factor_to(width, p)

        def surrogate(x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
            slope = self._difference_slope(x, y, p, batch, h)
            return self.upper(x, y, batch) - slope

        return gradient_x(surrogate, x, y, batch)

    def feature_gradient(self, loss: Callable[[Data, Data], Tensor], x: Tree, batch: Batch) -> Tree:
        """The gradient in x of a loss of the features of both sides. Costs 2 gradients.

        Args:
            loss: A function of the embedded training data and the embedded validation data.
            x: Upper variables.
        """
        self.gradients += 2
        raw = differentiable(batch)

        def loss_of_x(x: Tree) -> Tensor:
            return loss(data_of(self.problem, x, raw, LOWER), data_of(self.problem, x, raw, UPPER))

        return grad(loss_of_x)(x)  # type: ignore[no-any-return]

    def _lower_slope(self, v: Tree) -> Loss:
        """<grad_y g, v> as a function of (x, y, batch); its gradients are second-order products."""
        return lambda x, y, batch: self._slope_and_gradient(x, y, v, batch)[0]

    def _slope_and_gradient(
        self, x: Tree, y: Tree, v: Tree, batch: AnyBatch
    ) -> tuple[Tensor, Tree | None]:
        """<grad_y g, v>, and grad_y g if it was computed on the way."""
        if self.problem.derivatives == "differences":
            h = _factor_to(_difference_width(y), v)
            return self._difference_slope(x, y, v, batch, h), None
        with self.kernels():
            gradient = grad(self.lower, argnums=1)(x, y, batch)
        return dot(gradient, v), gradient

    def _difference_slope(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch, h: Tensor) -> Tensor:
        """(g(x, y + h v) - g(x, y - h v)) / 2h.

        It has the same gradients as <grad_y g, v>, up to h^2, and takes first derivatives only.
        """
        rise = self.lower(x, y + v * h, batch) - self.lower(x, y - v * h, batch)
        return rise / (2 * h)


def _factor_to(width: float | Tensor, v: Tree) -> Tensor:
    """The number h for which h v has the norm `width`."""
    return width / norm(v).clamp(min=torch.finfo(_dtype(v)).tiny)


def _dtype(tree: Tree) -> torch.dtype:
    return next(iter(tree.values())).dtype


def _difference_width(y: Tree) -> Tensor:
    """The distance from y of the two points of a difference.

    The cube root of the rounding balances it with the error h^2 of the difference.
    """
    size = norm(y.map(Tensor.detach))
    width: Tensor = torch.finfo(_dtype(y)).eps ** (1 / 3) * (1 + size)
    return width
