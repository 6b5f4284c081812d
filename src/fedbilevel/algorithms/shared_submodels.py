"""What methods on submodels share: who holds which part of the model in an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import Pick, Submodel, choose, importance, rolling, segments, static
from fedbilevel.core.tree import Tree, flatten, zeros_like
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.replies import coverage

Policy = Literal["static", "rolling", "importance", "segments"]


def check_policy(policy: str, numbers: Sequence[int]) -> None:
    if (policy == "segments") != bool(numbers):
        raise ValueError(
            f"policy is {policy!r} and segments is {tuple(numbers)}; it takes both or neither"
        )


def cut(
    fed: Federation,
    clients: Sequence[int],
    x: Tree,
    y: Tree,
    policy: Policy,
    numbers: Sequence[int] = (),
) -> list[Submodel | None]:
    """The submodels of these clients in this iteration. "segments": client i holds the segment numbers[i mod their
    count] of every axis (`fedbilevel.submodels` tells of the others)."""
    axes, t, ratios = fed.problem.axes, fed.iteration, fed.environment.capacities(clients)
    if all(ratio == (1, 1) for ratio in ratios):
        return [None] * len(ratios)
    picks: dict[str, Any] = {
        "static": lambda: static,
        "rolling": lambda: rolling(t),
        "importance": lambda: importance(axes, {**x, **y}),
        "segments": lambda: segments,
    }
    pick: Pick = picks[policy]()
    groups = [numbers[i % len(numbers)] for i in clients] if policy == "segments" else None
    return choose(axes, x, y, pick, ratios, groups)


def maskable(problem: Problem, x: Tree, y: Tree) -> Tree:
    """The tensors that methods mask weight by weight. Not those that start with all entries alike, which everyone
    holds: norm layers (unless they start trained), and heads and hyper-parameters that start at 0, whose size says
    nothing yet and which a mask by size would keep at 0."""
    start = {**problem.x, **problem.y}
    return Tree(
        {
            name: w
            for name, w in {**x, **y}.items()
            if bool((start[name] != start[name].reshape(-1)[0]).any())
        }
    )


def magnitudes(w: Tree) -> Tensor:
    return flatten(w).abs() if w else torch.zeros(0)


def budget(w: Tree, x: Tree, ratios: tuple[float, float]) -> int:
    """How many of the d weights w a client holds: int(r^2 d), about as many as a submodel of width r has."""
    held = sum(ratios[name not in x] ** 2 * tensor.numel() for name, tensor in w.items())
    return max(1, int(held + 1e-6))  # 0.7**2 * 100 is 48.99999999999999


def held_mean(fed: Federation, r: Replies, name: str, held: Sequence[Tree]) -> Tree:
    """`Replies.coverage_mean` where clients hold single weights: held[j] says which the j-th reply is of, and it is 0
    elsewhere. Records the coverage."""
    total = r.mean(name) * len(r)
    counts = weights = zeros_like(total)
    for reply, mask in zip(r, held, strict=True):
        ones = mask.map(Tensor.to, total)
        counts, weights = counts + ones, weights + reply.weight * ones
    fed.record(**coverage(str(r.phase.reply[name]), flatten(counts)))
    return total.map(lambda t, w: torch.where(w > 0, t / w, 0.0), weights)  # type: ignore[no-any-return]
