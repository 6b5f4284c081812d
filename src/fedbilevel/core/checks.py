"""Checks of what a user gives: each failure is one sentence with the name, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be true or false")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string")
    return value


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    return value


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if whole(name, value) < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value}; it must be {f'at least {least}' if most is None else f'{least} to {most}'}"
        )
    return int(value)


def positive(name: str, value: Any) -> float:
    if number(name, value) <= 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
    return float(value)


def non_negative(name: str, value: Any) -> float:
    if number(name, value) < 0:
        raise ValueError(f"{name} is {value}; it must not be negative")
    return float(value)


def fraction(name: str, value: Any) -> float:
    """A number in (0, 1]."""
    if not 0 < number(name, value) <= 1:
        raise ValueError(f"{name} is {value}; it must be in (0, 1]")
    return float(value)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        hint = suggestion(value, allowed)
        raise ValueError(f"{name} is {value!r}; it must be one of {names}{hint}")
    return str(value)


def suggestion(value: Any, allowed: Iterable[str]) -> str:
    """The end of a sentence that refuses a misspelt name; empty if no allowed name is close."""
    close = get_close_matches(str(value), list(map(str, allowed)), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(key: str, known: Iterable[str]) -> str:
    """The sentence that refuses a dotted key."""
    known = list(known)
    hint = suggestion(key.split(".")[-1], known)
    return f"unknown key {key!r}; allowed are {', '.join(known) or 'none'}{hint}"


def pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r}; it must be a pair (low, high)")
    return number(name, value[0]), number(name, value[1])
