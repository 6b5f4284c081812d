"""Every ready-made task by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedbilevel.core import checks
from fedbilevel.tasks.task import Task

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
