"""Ready-made problems with their data, partition, model and evaluation, by name."""

from typing import TYPE_CHECKING, Any

from fedbilevel.tasks.registry import get, load, names

if TYPE_CHECKING:
    from fedbilevel.tasks.task import Task

__all__ = ["Task", "get", "load", "names"]


def __getattr__(name: str) -> Any:
    """Import `Task` when it is first used: it needs PyTorch, the names of the tasks do not."""
    if name != "Task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbilevel.tasks.task import Task

    return Task
