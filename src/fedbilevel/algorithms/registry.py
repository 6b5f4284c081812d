"""The registry of algorithms by name; code outside the package may register its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedbilevel.algorithms.base import Algorithm, takers, without_server
from fedbilevel.core import checks

A = TypeVar("A", bound=type[Algorithm])
_registry: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[A], A]:
    """Make an algorithm known by a name: a class decorator.

    A registered name is accepted by `fb.solve`, by experiments and on the command line, and is
    listed by `fedbilevel list algorithms`.

    Args:
        name: The name; it must not be taken.

    Returns:
        The decorator, which sets the class's `name` and returns the class.

    Raises:
        ValueError: If another algorithm has this name.

    Examples:
        A name stands for one class:

        >>> from fedbilevel.algorithms import SimFBO, register
        >>> @register("simfbo")
        ... class MySimFBO(SimFBO):
        ...     pass
        Traceback (most recent call last):
        ValueError: an algorithm named 'simfbo' is registered already
    """

    def add(algorithm: A) -> A:
        if name in _registry:
            raise ValueError(f"an algorithm named {name!r} is registered already")
        algorithm.name = name
        _registry[name] = algorithm
        for level in algorithm.client_levels:
            takers[level].append(name)
        if not algorithm.has_server:
            without_server.append(name)
        return algorithm

    return add


def names() -> list[str]:
    """Return the names of all registered algorithms.

    Returns:
        The names, in the order of registration.

    Examples:
        >>> import fedbilevel as fb
        >>> "simfbo" in fb.algorithms.names()
        True
    """
    return list(_registry)


def get(name: str) -> type[Algorithm]:
    """Return the algorithm of a name.

    Args:
        name: A registered name.

    Returns:
        The class; calling it with settings makes the algorithm.

    Raises:
        ValueError: If no algorithm has this name; the message suggests similar ones.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.algorithms.get("shrofbo")(lr_x=0.1).lr_x
        0.1
    """
    return _registry[checks.one_of("algorithm", name, _registry)]
