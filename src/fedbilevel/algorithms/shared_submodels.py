"""Which part of the model each client holds, for methods that train submodels or masked models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import (
    Submodel,
    UnitSelector,
    choose_submodels,
    importance,
    rolling,
    segments,
    static,
)
from fedbilevel.core.tree import Tree, flatten, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.totals import coverage_metrics

Policy = Literal["static", "rolling", "importance", "segments"]


def check_policy(policy: str, segment_numbers: Sequence[int]) -> None:
    """Check that segments are given where the policy needs them, and only there."""
    if (policy == "segments") != bool(segment_numbers):
        raise ValueError(
            f"policy is {policy!r} and segments is {tuple(segment_numbers)}; "
            "it takes both or neither"
        )


def assign_submodels(
    fed: Federation,
    clients: Sequence[int],
    x: Tree,
    y: Tree,
    policy: Policy,
    segment_numbers: Sequence[int] = (),
) -> list[Submodel | None]:
    """Return the submodels of some clients in this iteration; None stands for the whole model.

    Args:
        fed: The federation; its environment has the clients' capacities.
        clients: The clients.
        x: The server's x.
        y: The server's y.
        policy: "static", the first units of every axis; "rolling", a window that moves by one unit
            per iteration; "importance", the units with the largest weights; "segments", the segment
            of `segment_numbers`.
        segment_numbers: With "segments", client i holds the segment with the number at position
            i mod len(segment_numbers), of every axis.

    Returns:
        A submodel per client; clients with equal submodels share one object.
    """
    ratios = fed.environment.capacities(clients)
    if all(ratio == (1, 1) for ratio in ratios):
        return [None] * len(ratios)
    axes = fed.problem.axes
    groups = None
    select: UnitSelector
    if policy == "static":
        select = static
    elif policy == "rolling":
        select = rolling(fed.iteration)
    elif policy == "importance":
        select = importance(axes, {**x, **y})
    else:
        select = segments
        groups = [segment_numbers[i % len(segment_numbers)] for i in clients]
    return choose_submodels(axes, x, y, select, ratios, groups)


def maskable(problem: Problem, x: Tree, y: Tree) -> Tree:
    """Return the tensors that are masked weight by weight; everyone holds all others.

    Tensors that start with equal entries are not masked: norm layers (unless they start trained),
    and heads and hyper-parameters that start at 0. Their magnitudes say nothing yet, and a mask by
    magnitude would keep them where they started.
    """
    start = {**problem.x, **problem.y}
    masked = {}
    for name, w in {**x, **y}.items():
        first = start[name].reshape(-1)[0]
        if bool((start[name] != first).any()):
            masked[name] = w
    return Tree(masked)


def magnitudes(w: Tree) -> Tensor:
    """Return the absolute values of all weights as one vector."""
    if not w:
        return torch.zeros(0)
    return flatten(w).abs()


def weight_budget(w: Tree, x: Tree, ratios: tuple[float, float]) -> int:
    """Return how many of the weights w a client holds.

    That is int(r^2 d) of d weights, about as many as a submodel of width r has; r is the first of
    `ratios` for tensors of x, the second for those of y.
    """
    held = sum(ratios[name not in x] ** 2 * tensor.numel() for name, tensor in w.items())
    return max(1, int(held + 1e-6))  # 0.7**2 * 100 is 48.99999999999999


def masked_mean(fed: Federation, r: Replies, name: str, masks: Sequence[Tree]) -> Tree:
    """Return the mean of each coordinate over the clients that hold it, and record the coverage.

    This is `Replies.coverage_mean` for clients that hold single weights.

    Args:
        fed: The federation.
        r: The replies; they are 0 where a client holds nothing.
        name: The value that is averaged.
        masks: Which coordinates of it each reply holds, in the order of the replies.

    Returns:
        The mean, 0 where no client holds the coordinate.
    """
    total = r.mean(name) * len(r)
    counts = zeros_like(total)
    weights = zeros_like(total)
    for reply, mask in zip(r, masks, strict=True):
        ones = mask.map(Tensor.to, total)
        counts = counts + ones
        weights = weights + reply.weight * ones
    fed.record(**coverage_metrics(str(r.phase.reply[name]), flatten(counts)))
    return total.map(lambda t, w: torch.where(w > 0, t / w, 0.0), weights)  # type: ignore[no-any-return]
