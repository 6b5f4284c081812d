"""Packages that come with an extra of this package."""

from importlib import import_module
from typing import Any

# The extra that brings a package which modules here import at their beginning.
EXTRA_OF = {"flwr": "flower", "cryptography": "flower", "httpx": "flower", "ray": "ray"}


class MissingPackageError(ImportError, ValueError):
    """A package that an extra installs is missing; the text says how to install it."""


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an extra of this package installs.

    Args:
        module: The name of the module.
        extra: The name of the extra.

    Returns:
        The module.

    Raises:
        MissingPackageError: If the module cannot be imported; the message says how to install it.

    Examples:
        >>> import_extra("json", "track").loads("1")
        1
        >>> import_extra("jason", "tune")
        Traceback (most recent call last):
            ...
        fedbilevel.core.extras.MissingPackageError: jason cannot be imported ...
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(missing_package(module, error, extra)) from error


def missing_package(module: str, error: ImportError, extra: str) -> str:
    """Return a sentence that says which package is missing and how to install it.

    Args:
        module: The name of the module that cannot be imported.
        error: Why not.
        extra: The extra that installs it.

    Examples:
        >>> missing_package("optuna", ImportError("No module named 'optuna'"), "tune")
        "optuna cannot be imported (No module named 'optuna'); pip install 'fedbilevel[tune]'"
    """
    return f"{module} cannot be imported ({error}); pip install 'fedbilevel[{extra}]'"
