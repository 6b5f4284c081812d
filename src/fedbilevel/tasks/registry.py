"""Every ready-made learning task by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from fedbilevel.core import checks

if TYPE_CHECKING:
    from fedbilevel.tasks.task import Task

B = TypeVar("B", bound=Callable[..., Any])

# Name of a task: its module in this package, and the function of the same name in it. Modules are
# imported on demand, because tasks import PyTorch and data sets, and these further libraries.
_MODULES = {
    "table": "table",
    "sites": "sites",
    "survival": "survival",
    "quadratic": "quadratic",
    "hyper-representation": "hyper_representation",
    "hyper-cleaning": "hyper_cleaning",
    "regularization": "regularization",
    "few-shot": "few_shot",
    "loss-tuning": "loss_tuning",
    "mixture": "mixture",
}


_registered: dict[str, Callable[..., Task]] = {}  # from outside


def register(name: str) -> Callable[[B], B]:
    """Make a task known by a name: a decorator of the function that builds it.

    The name is accepted by `load`, by experiments of this process and on the command line. An
    experiment that is run by others had better name the function, as "module:function".

    Args:
        name: The name; it must not be taken.

    Returns:
        The decorator, which returns the function.

    Raises:
        ValueError: If another task has this name.

    Examples:
        >>> import fedbilevel as fb
        >>> @fb.tasks.register("quadratic")
        ... def mine(*, clients: int = 4):
        ...     return fb.tasks.load("quadratic", clients=clients)
        Traceback (most recent call last):
        ValueError: a task named 'quadratic' is registered already
    """

    def add(builder: B) -> B:
        if name in names():
            raise ValueError(f"a task named {name!r} is registered already")
        _registered[name] = builder
        return builder

    return add


def names() -> list[str]:
    """Return the names of all ready-made tasks, and of those that were registered.

    Returns:
        The names that `get` and `load` accept.

    Examples:
        >>> import fedbilevel as fb
        >>> "quadratic" in fb.tasks.names()
        True
    """
    return [*_MODULES, *_registered]


def get(name: str) -> Callable[..., Task]:
    """Return the function that builds a task.

    Args:
        name: One of `names()`.

    Returns:
        A function of keyword arguments, the options of the task, that returns a `Task`.

    Raises:
        ValueError: No task has this name.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.tasks.get("quadratic").__name__
        'quadratic'
    """
    checks.one_of("task", name, names())
    if name in _registered:
        return _registered[name]
    module_name = _MODULES[name]
    module = import_module(f"fedbilevel.tasks.{module_name}")
    builder: Callable[..., Task] = getattr(module, module_name)
    return builder


def load(name: str, **options: object) -> Task:
    """Build a task by name.

    Args:
        name: One of `names()`.
        **options: The keyword arguments of the task's function, for instance `clients=10`.

    Returns:
        The problem, its clients and its evaluation.

    Raises:
        ValueError: No task has this name, or an option is out of range.
        TypeError: The task has no such option.

    Examples:
        >>> import fedbilevel as fb
        >>> len(fb.tasks.load("quadratic", clients=4).clients)
        4
    """
    return get(name)(**options)
