"""Checks of values that a user passes in.

Every check takes the name of the value and the value, and returns the value. A value that is not
allowed raises a `TypeError` or `ValueError` whose message is one sentence: the name, the value and
what is allowed.

Examples:
    >>> from fedbilevel.core import checks
    >>> checks.integer("clients", 3, least=1)
    3
    >>> checks.positive("lr", 0)
    Traceback (most recent call last):
        ...
    ValueError: lr is 0; it must be above 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TypeVar

T = TypeVar("T")

ALIKE = 0.6  # how alike a name must be to be suggested


def instance(name: str, value: object, kind: type[T]) -> T:
    """Check that `value` is an object of a class."""
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} is {given}; it must be an object of {kind.__name__}")
    return value


def number(name: str, value: object) -> float:
    """Check that `value` is a finite int or float; a bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def boolean(name: str, value: object) -> bool:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be true or false")
    return value


def string(name: str, value: object) -> str:
    """Check that `value` is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Check that `value` is an int (not a bool) from `least` to `most`, both included.

    `most` may only be given together with `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    too_small = least is not None and value < least
    too_large = most is not None and value > most
    if too_small or too_large:
        allowed = f"at least {least}"
        if most is not None:
            allowed = f"{least} to {most}"
        raise ValueError(f"{name} is {value}; it must be {allowed}")
    return int(value)


def positive(name: str, value: object) -> float:
    """Check that `value` is a number above 0."""
    checked = number(name, value)
    if checked <= 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
    return float(checked)


def non_negative(name: str, value: object) -> float:
    """Check that `value` is a number, at least 0."""
    checked = number(name, value)
    if checked < 0:
        raise ValueError(f"{name} is {value}; it must not be negative")
    return float(checked)


def fraction(name: str, value: object) -> float:
    """Check that `value` is a number in (0, 1]."""
    checked = number(name, value)
    if not 0 < checked <= 1:
        raise ValueError(f"{name} is {value}; it must be in (0, 1]")
    return float(checked)


def pair(name: str, value: object) -> tuple[float, float]:
    """Check that `value` is a tuple or list of two numbers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r}; it must be a pair (low, high)")
    return number(name, value[0]), number(name, value[1])


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """Check that `value` is one of the `allowed` strings; the message suggests the closest one."""
    allowed = list(allowed)
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        hint = suggestion(value, allowed)
        raise ValueError(f"{name} is {value!r}{hint}; it must be one of {names}")
    return str(value)


def suggestion(value: object, allowed: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the allowed names that are closest to `value`, else "".

    It belongs right behind the value: lists of what is allowed can be long.
    """
    likeness = {str(name): SequenceMatcher(None, str(name), str(value)).ratio() for name in allowed}
    most = max(likeness.values(), default=0.0)
    if most < ALIKE:
        return ""
    closest = [repr(name) for name, ratio in likeness.items() if ratio == most]
    return f" (did you mean {' or '.join(closest)}?)"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the message for a dotted key (such as "task.clients") whose last part is not known."""
    known = list(known)
    hint = suggestion(key.split(".")[-1], known)
    return f"unknown key {key!r}{hint}; allowed are {', '.join(known) or 'none'}"


def one_line(text: str) -> str:
    """Return a text on one line, with an escape for each character that a terminal would obey.

    An error may quote a file name, a key, or what another machine has sent.

    Examples:
        >>> one_line("a key with a newline,\\n and a bell: \\a")
        'a key with a newline, and a bell: \\\\x07'
    """
    characters = []
    for character in " ".join(text.split()):
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)
