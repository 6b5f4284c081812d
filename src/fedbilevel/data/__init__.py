"""Data sets as tensors: embedded, read from files, or downloaded once into the user's cache."""

from fedbilevel.data.datasets import Characters, DataSet, characters, load, names

__all__ = ["Characters", "DataSet", "characters", "load", "names"]
