"""What a figure shows: panels of curves, or bars. figures.py draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PARTITIONS = {"iid": "iid", "shards": "label shards"}


class Mark(NamedTuple):
    """A value that a paper reports for a curve: y at x; without an x, at the end of the curve."""

    y: float
    x: float | None = None


@dataclass(frozen=True)
class Panel:
    """Curves under one title, by the names that the legend has for them.

    A name that several panels of a figure share has one colour in all of them.
    """

    title: str
    curves: Mapping[str, str]
    x: str = "round"
    y: str = "test_accuracy"
    marks: Mapping[str, Sequence[Mark]] = field(default_factory=dict)
    limits: tuple[float, float] | None = None  # of the y axis
    log: bool = False  # the x axis


@dataclass(frozen=True)
class Bars:
    """Bars under one title, with the values that the paper reports."""

    title: str
    values: Mapping[str, float]
    reported: Mapping[str, float]
    unit: str
