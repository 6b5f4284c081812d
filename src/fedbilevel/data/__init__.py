"""Data sets as tensors: embedded, read from files, or downloaded once into the user's cache."""

from typing import TYPE_CHECKING, Any

from fedbilevel.data.catalogue import names

if TYPE_CHECKING:
    from fedbilevel.data.datasets import Characters, DataSet, characters, load, register

__all__ = ["Characters", "DataSet", "characters", "load", "names", "register"]


def __getattr__(name: str) -> Any:
    """Import what loads data when it is first used: it needs PyTorch, `names` does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbilevel.data import datasets

    return getattr(datasets, name)
