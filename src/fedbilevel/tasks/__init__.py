"""Ready-made problems with their data, partition, model and evaluation, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbilevel import checks
from fedbilevel.problem import ClientData, Problem
from fedbilevel.tree import Tree


@dataclass(frozen=True)
class Task:
    """A problem, its clients, and `evaluate(x, y)`, the numbers by which methods are compared on it."""

    problem: Problem
    clients: Sequence[ClientData]
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] | None = None


Loader = Callable[..., Task]


def _quadratic(**options: Any) -> Task:
    from fedbilevel.tasks.quadratic import quadratic

    return quadratic(**options)


def _hyper_representation(**options: Any) -> Task:
    from fedbilevel.tasks.hyper_representation import hyper_representation

    return hyper_representation(**options)


_loaders: dict[str, Loader] = {"quadratic": _quadratic, "hyper-representation": _hyper_representation}


def names() -> list[str]:
    return list(_loaders)


def load(name: str, **options: Any) -> Task:
    """A task by name; the options are those of its function."""
    return _loaders[checks.one_of("task", name, _loaders)](**options)
