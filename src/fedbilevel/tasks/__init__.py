"""Ready-made problems with their data, partition, model and evaluation, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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


_names = {
    "quadratic": "quadratic",
    "hyper-representation": "hyper_representation",
    "hyper-cleaning": "hyper_cleaning",
    "regularization": "regularization",
    "few-shot": "few_shot",
    "loss-tuning": "loss_tuning",
}


def names() -> list[str]:
    return list(_names)


def get(name: str) -> Callable[..., Task]:
    """The function that makes a task; imported when asked for, because tasks bring data and data brings libraries."""
    function = _names[checks.one_of("task", name, _names)]
    return getattr(import_module(f"fedbilevel.tasks.{function}"), function)  # type: ignore[no-any-return]


def load(name: str, **options: Any) -> Task:
    """A task by name; the options are those of its function."""
    return get(name)(**options)
