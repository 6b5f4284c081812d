"""What a learning task is: a problem with its clients and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedbilevel.core.problem import ClientData, Problem
from fedbilevel.core.tree import Tree


@dataclass(frozen=True)
class Task:
    """A problem, its clients, and `evaluate(x, y)`, the numbers by which methods are compared on it."""

    problem: Problem
    clients: Sequence[ClientData]
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] | None = None
