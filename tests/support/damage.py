"""Damage to a file, as a bad disk or a careless user does it."""

import random
from collections.abc import Callable
from pathlib import Path


def flip(file: Path, draw: random.Random) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    """Cut the file somewhere."""
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) + 1)])


def empty(file: Path, draw: random.Random) -> None:
    """Cut the file to nothing."""
    file.write_bytes(b"")


def remove(file: Path, draw: random.Random) -> None:
    """Remove the file."""
    file.unlink()


Damage = Callable[[Path, random.Random], None]
DAMAGE: dict[str, Damage] = {"flip": flip, "cut": cut, "empty": empty, "remove": remove}
