"""Packages that come with an extra of this package."""

from importlib import import_module
from typing import Any


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an extra of this package installs.

    Args:
        module: The name of the module.
        extra: The name of the extra.

    Returns:
        The module.

    Raises:
        ValueError: If the module cannot be imported; the message says how to install it.

    Examples:
        >>> import_extra("json", "track").loads("1")
        1
        >>> import_extra("jason", "tune")
        Traceback (most recent call last):
            ...
        ValueError: jason cannot be imported (No module named 'jason'); pip install fedbilevel[tune]
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); pip install fedbilevel[{extra}]"
        ) from error
