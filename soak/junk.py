"""Random values that nobody expects, and random changes of tables, texts and bytes."""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable
from typing import Any

Table = dict[str, Any]

LARGE_NUMBERS = [2**31, 2**62, 2**63, -(2**63) - 1, 10**30, 10**400]
EXTREME_FLOATS = [math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0]
WORDS = [
    "",
    "full",
    "uniform",
    "a:b",
    "simfbo",
    "../..",
    "/etc/passwd",
    "\n",
    "\x1b[31m",
    "[/red]",
    "\u2028",
    "\u202e",
    "é" * 200,
    "%s{0}$HOME",
]
CHARACTERS = "ab=.,:/\\'\"[]{}#-_ 019eE\n\t\0\x1b\x7f\x85é\u2028\U0001f600"


def text(draw: random.Random, longest: int = 8) -> str:
    """A short text of awkward characters, or one of the words."""
    if draw.random() < 0.3:
        return draw.choice(WORDS)
    return "".join(draw.choices(CHARACTERS, k=draw.randint(0, longest)))


def number(draw: random.Random) -> float:
    """A number of any size and sign, also one that is not finite."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randint(-5, 3)
    if kind == 1:
        return draw.choice([*LARGE_NUMBERS, *EXTREME_FLOATS])
    if kind == 2:
        return draw.uniform(-2, 2)
    return draw.choice([-1, 1]) * 10 ** draw.uniform(-200, 200)


def value(draw: random.Random, depth: int = 2) -> Any:
    """A value as TOML has it: a scalar, or a nest of lists and tables."""
    kind = draw.randrange(8 if depth else 6)
    if kind < 2:
        return number(draw)
    if kind < 4:
        return text(draw)
    if kind == 4:
        return draw.random() < 0.5
    if kind == 5:
        return draw.choice([datetime.date(2024, 2, 29), {}, []])
    size = draw.randint(0, 3)
    if kind == 6:
        return [value(draw, depth - 1) for _ in range(size)]
    return {text(draw, 6): value(draw, depth - 1) for _ in range(size)}


def key_paths(table: Table, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every key in a nested table."""
    paths = [(*prefix, key) for key in table]
    for key, inner in table.items():
        if isinstance(inner, dict):
            paths += key_paths(inner, (*prefix, key))
    return paths


def change_table(draw: random.Random, table: Table, is_costly: Callable[[str, Any], bool]) -> None:
    """Change something in a nested table, in place: a value, a key, or what there is.

    Args:
        draw: The source of randomness.
        table: The table.
        is_costly: Whether a key must not get a value, because the value may be meant and would
            take long.
    """
    *parents, key = draw.choice(key_paths(table))
    inner = table
    for parent in parents:
        inner = inner[parent]
    change = draw.choice(["value", "value", "number", "number", "misspell", "add", "empty", "drop"])
    if change in ("value", "number"):
        new: Any = number(draw) if change == "number" else value(draw)
        if type(inner[key]) is int and isinstance(new, float) and math.isfinite(new):
            new = int(new)
        if not is_costly(key, new):
            inner[key] = new
    elif change == "misspell" and key:
        position = draw.randrange(len(key))
        inner[key[:position] + key[position + 1 :]] = inner.pop(key)
    elif change == "add":
        inner.setdefault(text(draw, 6), value(draw))
    elif change == "empty":
        inner[key] = {}
    elif not is_costly(key, None):
        del inner[key]


def change_text(draw: random.Random, original: str) -> str:
    """Replace some characters of a text by others, at a random place."""
    start = draw.randint(0, len(original))
    end = start + draw.randint(0, 3)
    return original[:start] + text(draw, 4) + original[end:]


def change_bytes(draw: random.Random, original: bytes) -> bytes:
    """Flip, cut, extend, empty or replace bytes."""
    position = draw.randint(0, max(len(original) - 1, 0))
    kind = draw.randrange(6)
    if kind == 0 and original:
        flipped = original[position] ^ (1 << draw.randrange(8))
        return original[:position] + bytes([flipped]) + original[position + 1 :]
    if kind == 1:
        return original[:position]
    if kind == 2:
        return original + draw.randbytes(draw.randint(1, 20))
    if kind == 3:
        return original[:position] + draw.randbytes(8) + original[position:]
    if kind == 4:
        return draw.choice([b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x80\x05."]) + original
    return b""
