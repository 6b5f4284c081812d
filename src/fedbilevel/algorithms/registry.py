"""Every method by name; `register` works from outside the package too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import checks

A = TypeVar("A", bound=type[Algorithm])
_registry: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[A], A]:
    """Class decorator: make an algorithm known by `name`."""

    def enrol(cls: A) -> A:
        if name in _registry:
            raise ValueError(f"an algorithm named {name!r} is registered already")
        cls.name = name
        _registry[name] = cls
        return cls

    return enrol


def names() -> list[str]:
    return list(_registry)


def get(name: str) -> type[Algorithm]:
    return _registry[checks.one_of("algorithm", name, _registry)]
