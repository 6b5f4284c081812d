"""What a loss receives of a batch, and derivatives of losses through the embedding of its samples.

A problem with `Problem.embed` runs its samples through a backbone first. A batch may be embedded in
advance: as constants, where x is fixed (`FeatureBatch`), or such that derivatives in x still pass
through the backbone (`EmbeddedBatch`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, Data, named_tensors, repack
from fedbilevel.core.derivatives import grad, vjp
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in
from fedbilevel.core.tree import Tree, nbytes

# The side of a batch that a loss is evaluated on, and the stream of its random numbers.
LOWER = 0
UPPER = 1


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


def data_of(problem: Problem, x: Tree, batch: Batch, level: int) -> Data:
    """The data that the loss of one level receives: its side of the batch, embedded."""
    data = (batch.train, batch.val)[level]
    if problem.embed is None or isinstance(batch, FeatureBatch) or not data:
        return data
    return problem.embed(x, data, key_of(problem, batch, level))


def key_of(problem: Problem, batch: Batch, level: int) -> Tensor | tuple[()]:
    """The key that the loss of one level draws from: one per level, one for an episode."""
    if not isinstance(batch.rng, Tensor) or problem.lower_level == "private":
        return batch.rng
    return fold_in(batch.rng, level)


def embed(problem: Problem, x: Tree, batch: Batch) -> EmbeddedBatch:
    """Embed both sides of a batch, such that derivatives in x still pass through the backbone."""
    spec: pytree.TreeSpec
    is_feature: list[bool] = []

    def features_of(x: Tree) -> tuple[list[Tensor], list[Tensor]]:
        """Floating tensors, which have derivatives, and all others, such as labels."""
        nonlocal spec, is_feature
        train, val = (data_of(problem, x, batch, level) for level in (LOWER, UPPER))
        tensors, spec = pytree.tree_flatten((train, val, batch.rng))
        is_feature = [tensor.is_floating_point() for tensor in tensors]
        others = [tensor for tensor in tensors if not tensor.is_floating_point()]
        return list(itertools.compress(tensors, is_feature)), others

    def rebuild(features: list[Tensor]) -> FeatureBatch:
        sources = {True: iter(features), False: iter(others)}
        tensors = [next(sources[floating]) for floating in is_feature]
        return FeatureBatch(*pytree.tree_unflatten(tensors, spec))

    features, pullback, others = vjp(features_of, x)
    return EmbeddedBatch(batch, features, rebuild, pullback)


def embed_sides_together(problem: Problem, x: Tree, batch: Batch) -> Batch:
    """Embed both sides in one pass through the backbone, where that is faster.

    One pass yields one gradient of the backbone's weights instead of two that are added. It copies
    the samples, so on a CPU it is faster where x is larger than they are.
    """
    if problem.embed is None or not problem.embeds_samples:
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
    features = problem.embed(x, repack(batch.train, both), ())
    counts = [len(train[0][1]), len(val[0][1])]
    parts = [tensor.split(counts) for _, tensor in named_tensors(features)]
    return FeatureBatch(
        repack(features, [part for part, _ in parts]),
        repack(features, [part for _, part in parts]),
        batch.rng,
    )


def gradient_x(fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> Tree:
    """The gradient of fn(x, y, batch) in x, also through the features of an embedded batch."""
    if isinstance(batch, EmbeddedBatch):
        return gradients(fn, x, y, batch)[0]
    return grad(fn)(x, y, differentiable(batch))  # type: ignore[no-any-return]


def gradients(fn: Loss, x: Tree, y: Tree, batch: AnyBatch) -> tuple[Tree, Tree]:
    """The gradients of fn(x, y, batch) in x and in y, also through the features of a batch."""
    if not isinstance(batch, EmbeddedBatch):
        both: tuple[Tree, Tree] = grad(fn, argnums=(0, 1))(x, y, differentiable(batch))
        return both
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


def differentiable(batch: Batch) -> Batch:
    """The batch, refused if it consists of features, which have no derivatives in x."""
    if isinstance(batch, FeatureBatch):
        raise TypeError(
            "a phase with fixed_x receives features, which have no derivatives in x; "
            "its fixed_x must be False"
        )
    return batch


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
