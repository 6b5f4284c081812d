"""Ready-made problems with their data, partition, model and evaluation, by name."""

from fedbilevel.tasks.registry import get, load, names, register
from fedbilevel.tasks.task import Task

__all__ = ["Task", "get", "load", "names", "register"]
