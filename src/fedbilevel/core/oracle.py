"""`Oracle`: gradients, Hessian products and cross products of the losses on a batch of one client.

Throughout, f is the upper loss on a validation batch and g the lower loss on a training batch. The
oracle knows neither clients nor rounds nor step sizes, and its functions work under
`torch.func.vmap`, which is how executors evaluate many clients at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.derivatives import grad, unfused_kernels, vjp, vmap
from fedbilevel.core.micro_batches import in_parts, is_split
from fedbilevel.core.problem import Batch, Data, Problem, named_tensors, repack
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import Tree, dot, flatten, nbytes, norm, unflatten

# The side of a batch that a loss is evaluated on, and the stream of its random numbers.
LOWER = 0
UPPER = 1


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


class FeatureBatch(Batch):
    """A batch of features, that is of embedded data: a constant, without derivatives in x."""


class EmbeddedBatch(NamedTuple):
    """A batch that was embedded at one x and can still be differentiated in x; see `Oracle.embed`.

    Attributes:
        raw: The batch before it was embedded.
        features: The floating tensors of the embedded batch.
        rebuild: Makes a batch of features; derivatives in the features pass through it.
        pullback: Maps a gradient in the features to the gradient in x.
    """

    raw: Batch
    features: list[Tensor]
    rebuild: Callable[[list[Tensor]], FeatureBatch]
    pullback: Callable[[list[Tensor]], Tree]


AnyBatch = Batch | EmbeddedBatch
Loss = Callable[[Tree, Tree, AnyBatch], Tensor]


class Oracle:
    """Values and derivatives of the two losses of a problem, on one batch of one client.

    Every call adds its cost to `gradients`, in units of one gradient on one batch: 1 for a
    gradient, 2 for a Hessian product or a cross product (or both from one pass), 3 for a
    hypergradient or for all three directions. Values of the losses cost nothing. How second
    derivatives are computed is `Problem.derivatives`; with "differences" the methods that return a
    first derivative beside a product cost 1 more.

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
        """The upper loss f(x, y).

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its validation side is used.

        Returns:
            A 0-d tensor.
        """
        if isinstance(batch, EmbeddedBatch):
            batch = batch.rebuild(batch.features)
        value = self.problem.upper(x, y, self._data(x, batch, UPPER), self._key(batch, UPPER))
        return self._of_part(value, UPPER)

    @in_parts
    def lower(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The lower loss g(x, y).

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its training side is used.

        Returns:
            A 0-d tensor.
        """
        if isinstance(batch, EmbeddedBatch):
            batch = batch.rebuild(batch.features)
        value = self.problem.lower(x, y, self._data(x, batch, LOWER), self._key(batch, LOWER))
        return self._of_part(value, LOWER)

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
        """The feasible point closest to x; see `Problem.project`.

        Args:
            x: A point.

        Returns:
            The projected point.
        """
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
        spec: pytree.TreeSpec
        is_feature: list[bool] = []

        def features_of(x: Tree) -> tuple[list[Tensor], list[Tensor]]:
            """Floating tensors, which have derivatives, and all others, such as labels."""
            nonlocal spec, is_feature
            embedded = (self._data(x, batch, LOWER), self._data(x, batch, UPPER), batch.rng)
            tensors, spec = pytree.tree_flatten(embedded)
            is_feature = [tensor.is_floating_point() for tensor in tensors]
            others = [tensor for tensor in tensors if not tensor.is_floating_point()]
            return list(itertools.compress(tensors, is_feature)), others

        def rebuild(features: list[Tensor]) -> FeatureBatch:
            sources = {True: iter(features), False: iter(others)}
            tensors = [next(sources[floating]) for floating in is_feature]
            return FeatureBatch(*pytree.tree_unflatten(tensors, spec))

        features, pullback, others = vjp(features_of, x)
        return EmbeddedBatch(batch, features, rebuild, pullback)

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
            x: Upper variables.
            y: Lower variables.
            z: Estimate of the solution of d2yy g z = grad_y f, a tree like y.
            batch: A batch with both sides.
            damping: Added to the Hessian of the lower level.

        Returns:
            d_x, a tree like x; d_y and d_z, trees like y.

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
            features = self._embed_sides_together(x, _differentiable(batch))
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
            x: Upper variables.
            y: Lower variables, an estimate of the minimiser of g.
            u: Lower variables, an estimate of the minimiser of g + f / penalty.
            batch: A batch with both sides.
            penalty: The weight of the lower loss, above 0.

        Returns:
            d_x, a tree like x; d_y and d_u, trees like y.

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
            features = self._embed_sides_together(x, _differentiable(batch))
            if not isinstance(features, FeatureBatch):
                train, val = (self._data(x, features, level) for level in (LOWER, UPPER))
                features = FeatureBatch(train, val, features.rng)
            gap = self.lower(x, u, features) - self.lower(x, y, features)
            return self.upper(x, u, features) + penalty * gap

        d_x, by_y, by_u = grad(lagrangian, argnums=(0, 1, 2))(x, y, u)
        return PenaltyDirections(d_x, -by_y / penalty, by_u / penalty)

    @in_parts
    def lower_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y g. Costs 1 gradient.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its training side is used.

        Returns:
            A tree like y.
        """
        self.gradients += 1
        return grad(self.lower, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    @in_parts
    def lower_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x g and grad_y g from one pass. Costs 1 gradient.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its training side is used.

        Returns:
            A tree like x and a tree like y.
        """
        self.gradients += 1
        return self._gradients(self.lower, x, y, batch)

    @in_parts
    def upper_gradients(self, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """grad_x f and grad_y f from one pass. Costs 1 gradient.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its validation side is used.

        Returns:
            A tree like x and a tree like y.
        """
        self.gradients += 1
        return self._gradients(self.upper, x, y, batch)

    @in_parts
    def upper_gradient_x(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_x f. Costs 1 gradient.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its validation side is used.

        Returns:
            A tree like x.
        """
        self.gradients += 1
        return self._gradient_x(self.upper, x, y, batch)

    @in_parts
    def upper_gradient_y(self, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """grad_y f. Costs 1 gradient.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its validation side is used.

        Returns:
            A tree like y.
        """
        self.gradients += 1
        return grad(self.upper, argnums=1)(x, y, batch)  # type: ignore[no-any-return]

    @in_parts
    def hessian_product(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> Tree:
        """The Hessian product d2yy g v. Costs 2 gradients.

        Args:
            x: Upper variables.
            y: Lower variables.
            v: The vector to multiply, a tree like y.
            batch: Its training side is used.

        Returns:
            A tree like y.

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
        """grad_y g and the Hessian product d2yy g v from one pass. Costs 2 gradients.

        Args:
            x: Upper variables.
            y: Lower variables.
            v: The vector to multiply, a tree like y.
            batch: Its training side is used.

        Returns:
            The gradient and the product, trees like y.
        """
        self.gradients += 2

        def slope(y: Tree) -> tuple[Tensor, Tree | None]:
            return self._slope_and_gradient(x, y, v, batch)

        product, g_y = grad(slope, has_aux=True)(y)
        if g_y is None:
            g_y = self.lower_gradient_y(x, y, batch)
        return g_y, product

    def hessian_matrix(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The Hessian d2yy g as a matrix. Costs 2 gradients per number in y.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its training side is used.

        Returns:
            A row and a column for each number in y, in the order of `flatten`.
        """
        return self._for_each_unit_vector(
            y, lambda v: flatten(self.hessian_product(x, y, v, batch))
        )

    def cross_matrix(self, x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
        """The mixed second derivatives d2xy g as a matrix. Costs 2 gradients per number in y.

        Args:
            x: Upper variables.
            y: Lower variables.
            batch: Its training side is used.

        Returns:
            A row for each number in x and a column for each in y, in the order of `flatten`.
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
        """The cross product d2xy g v. Costs 2 gradients.

        Args:
            x: Upper variables.
            y: Lower variables.
            v: The vector to multiply, a tree like y.
            batch: Its training side is used.

        Returns:
            A tree like x.
        """
        self.gradients += 2
        return self._gradient_x(self._lower_slope(v), x, y, batch)

    @in_parts
    def products(self, x: Tree, y: Tree, v: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """The cross product d2xy g v and the Hessian product d2yy g v from one pass.

        Costs 2 gradients.

        Args:
            x: Upper variables.
            y: Lower variables.
            v: The vector to multiply, a tree like y.
            batch: Its training side is used.

        Returns:
            The cross product, a tree like x, and the Hessian product, a tree like y.
        """
        self.gradients += 2
        return self._gradients(self._lower_slope(v), x, y, batch)

    @in_parts
    def hypergradient(self, x: Tree, y: Tree, p: Tree, batch: AnyBatch) -> Tree:
        """grad_x f - d2xy g p, the hypergradient where d2yy g p = grad_y f. Costs 3 gradients.

        Args:
            x: Upper variables.
            y: Lower variables.
            p: An estimate of [d2yy g]^-1 grad_y f, a tree like y.
            batch: A batch with both sides.

        Returns:
            A tree like x.

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
                batch = self._embed_sides_together(x, batch)
            return self.upper(x, y, batch) - slope(x, y, batch)

        return self._gradient_x(surrogate, x, y, batch)

    @in_parts
    def difference_hypergradient(
        self, x: Tree, y: Tree, p: Tree, batch: AnyBatch, width: float
    ) -> Tree:
        """`hypergradient` without second derivatives. Costs 3 gradients.

        It is the gradient in x of

            f(x, y) - (g(x, y + h p) - g(x, y - h p)) / 2h    with    h = width / ||p||,

        whose error is of the order of width^2.

        Args:
            x: Upper variables.
            y: Lower variables.
            p: An estimate of [d2yy g]^-1 grad_y f, a tree like y.
            batch: A batch with both sides.
            width: The distance of the two differenced points from y.

        Returns:
            A tree like x.
        """
        self.gradients += 3
        h = width / norm(p).clamp(min=torch.finfo(next(iter(p.values())).dtype).tiny)

        def surrogate(x: Tree, y: Tree, batch: AnyBatch) -> Tensor:
            rise = self.lower(x, y + p * h, batch) - self.lower(x, y - p * h, batch)
            return self.upper(x, y, batch) - rise / (2 * h)

        return self._gradient_x(surrogate, x, y, batch)

    def feature_gradient(self, loss: Callable[[Data, Data], Tensor], x: Tree, batch: Batch) -> Tree:
        """The gradient in x of a loss of the features of both sides. Costs 2 gradients.

        Args:
            loss: A function of the embedded training data and the embedded validation data.
            x: Upper variables.
            batch: A batch with both sides.

        Returns:
            A tree like x.
        """
        self.gradients += 2
        raw = _differentiable(batch)

        def loss_of_x(x: Tree) -> Tensor:
            return loss(self._data(x, raw, LOWER), self._data(x, raw, UPPER))

        return grad(loss_of_x)(x)  # type: ignore[no-any-return]

    def _embed_sides_together(self, x: Tree, batch: Batch) -> Batch:
        """Embed both sides in one pass through the backbone, where that is faster.

        One pass yields one gradient of the backbone's weights instead of two that are added. It
        copies the samples, so on a CPU it is faster where x is larger than they are.
        """
        embed = self.problem.embed
        if embed is None or not self.problem.embeds_samples:
            return batch
        if isinstance(batch, FeatureBatch) or not batch.train:
            return batch
        train = named_tensors(batch.train)
        val = named_tensors(batch.val)
        if _layout(train) != _layout(val):
            return batch
        # On a GPU a copy of the samples costs less than launching the kernels of a second pass.
        if nbytes((train, val)) > nbytes(x) and not train[0][1].is_cuda:
            return batch
        both = [torch.cat([a, b]) for (_, a), (_, b) in zip(train, val, strict=True)]
        features = embed(x, repack(batch.train, both), ())
        counts = [len(train[0][1]), len(val[0][1])]
        parts = [tensor.split(counts) for _, tensor in named_tensors(features)]
        return FeatureBatch(
            repack(features, [part for part, _ in parts]),
            repack(features, [part for _, part in parts]),
            batch.rng,
        )

    def _data(self, x: Tree, batch: Batch, level: int) -> Data:
        """The data that the loss of one level receives: its side of the batch, embedded."""
        data = (batch.train, batch.val)[level]
        if self.problem.embed is None or isinstance(batch, FeatureBatch) or not data:
            return data
        return self.problem.embed(x, data, self._key(batch, level))

    def _of_part(self, value: Tensor, level: int) -> Tensor:
        """The loss of a part of a batch, scaled so that the mean over the parts is that of all."""
        factor = self.factors[level]
        if factor == 1.0:
            return value
        return factor * value

    def _key(self, batch: Batch, level: int) -> Tensor | tuple[()]:
        """The key that the loss of one level draws from: one per level, one for an episode."""
        if not isinstance(batch.rng, Tensor) or self.problem.lower_level == "private":
            return batch.rng
        return fold_in(batch.rng, level)

    def _lower_slope(self, v: Tree) -> Loss:
        """<grad_y g, v> as a function of (x, y, batch); its gradients are second-order products."""
        return lambda x, y, batch: self._slope_and_gradient(x, y, v, batch)[0]

    def _slope_and_gradient(
        self, x: Tree, y: Tree, v: Tree, batch: AnyBatch
    ) -> tuple[Tensor, Tree | None]:
        """<grad_y g, v>, and grad_y g if it was computed on the way.

        By differences it is (g(x, y + h v) - g(x, y - h v)) / 2h, which has the same gradients up
        to h^2, and takes first derivatives only.
        """
        if self.problem.derivatives == "differences":
            h = _difference_width(y) / norm(v).clamp(min=torch.finfo(_dtype(v)).tiny)
            rise = self.lower(x, y + v * h, batch) - self.lower(x, y - v * h, batch)
            return rise / (2 * h), None
        with self.kernels():
            gradient = grad(self.lower, argnums=1)(x, y, batch)
        return dot(gradient, v), gradient

    def _gradient_x(self, fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
        """The gradient of fn(x, y, batch) in x, also through the features of an embedded batch."""
        if isinstance(batch, EmbeddedBatch):
            return self._gradients(fn, x, y, batch)[0]
        return grad(fn)(x, y, _differentiable(batch))  # type: ignore[no-any-return]

    def _gradients(self, fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
        """The gradients of fn(x, y, batch) in x and in y."""
        if not isinstance(batch, EmbeddedBatch):
            gradients: tuple[Tree, Tree] = grad(fn, argnums=(0, 1))(x, y, _differentiable(batch))
            return gradients
        rebuild = batch.rebuild

        def of_features(x: Tree, y: Tree, features: list[Tensor]) -> Tensor:
            return fn(x, y, rebuild(features))

        all_gradients = grad(of_features, argnums=(0, 1, 2), fill_unused=False)
        by_x, by_y, by_features = all_gradients(x, y, batch.features)
        for j, feature in enumerate(batch.features):
            if by_features[j] is None:
                by_features[j] = torch.zeros_like(feature)
        through_features = batch.pullback(by_features)
        # Most losses depend on x through the features alone.
        total = through_features.map(_sum_of_used, by_x)
        return total, by_y.map(_value_or_zero, y)


def _dtype(tree: Tree) -> torch.dtype:
    return next(iter(tree.values())).dtype


def _difference_width(y: Tree) -> Tensor:
    """The distance from y of the two points of a difference.

    The cube root of the rounding balances it with the error h^2 of the difference.
    """
    size = norm(y.map(Tensor.detach))
    width: Tensor = torch.finfo(_dtype(y)).eps ** (1 / 3) * (1 + size)
    return width


def _sum_of_used(a: Tensor, b: Tensor | None) -> Tensor:
    if b is None:
        return a
    return a + b


def _value_or_zero(value: Tensor | None, like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros_like(like)
    return value


def _layout(tensors: list[tuple[str, Tensor]]) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Name, shape and dtype of one sample."""
    return [(name, tensor.shape[1:], tensor.dtype) for name, tensor in tensors]


def _differentiable(batch: Batch) -> Batch:
    """The batch, refused if it consists of features, which have no derivatives in x."""
    if isinstance(batch, FeatureBatch):
        raise TypeError(
            "a phase with fixed_x receives features, which have no derivatives in x; "
            "its fixed_x must be False"
        )
    return batch
