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


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if value < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value}; it must be {f'at least {least}' if most is None else f'{least} to {most}'}"
        )
    return value


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
        close = get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{hint}")
    return str(value)


def pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r}; it must be a pair (low, high)")
    return number(name, value[0]), number(name, value[1])
