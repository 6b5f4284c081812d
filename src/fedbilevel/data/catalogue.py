"""Which data sets there are; nothing is imported that reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

CLASSES = {"breast-cancer": 2, "cifar10": 10, "covertype": 7, "digits": 10, "mnist": 10}
CHARACTERS = ("digits", "omniglot")


REGISTERED: dict[str, Callable[[Path | None], Any]] = {}  # from outside, by `register`


def names() -> list[str]:
    """Return the names of the data sets that `load` or `characters` know.

    Returns:
        The names, sorted.

    Examples:
        >>> from fedbilevel import data
        >>> "digits" in data.names()
        True
    """
    return sorted(CLASSES.keys() | CHARACTERS | REGISTERED.keys())
