"""What methods on submodels share: who holds which part of the model in an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from fedbilevel import checks
from fedbilevel.federation.base import Federation
from fedbilevel.submodels import Pick, Submodel, choose, importance, rolling, segments, static
from fedbilevel.tree import Tree

Policy = Literal["static", "rolling", "importance", "segments"]


def check_policy(policy: str, numbers: Sequence[int]) -> None:
    checks.one_of("policy", policy, get_args(Policy))
    for number in numbers:
        checks.integer("segments", number, least=0)
    if (policy == "segments") != bool(numbers):
        raise ValueError(f"policy is {policy!r} and segments is {tuple(numbers)}; it takes both or neither")


def cut(
    fed: Federation, clients: Sequence[int], x: Tree, y: Tree, policy: Policy, numbers: Sequence[int] = ()
) -> list[Submodel | None]:
    """The submodels of these clients in this iteration. "segments": client i holds the segment numbers[i mod their
    count] of every axis (`fedbilevel.submodels` tells of the others)."""
    axes, t = fed.problem.axes, fed.ledger.iterations
    picks: dict[str, Any] = {
        "static": lambda: static,
        "rolling": lambda: rolling(t),
        "importance": lambda: importance(axes, {**x, **y}),
        "segments": lambda: segments,
    }
    pick: Pick = picks[policy]()
    groups = [numbers[i % len(numbers)] for i in clients] if policy == "segments" else None
    return choose(axes, x, y, pick, fed.capacities(clients), groups)
