"""What page.js draws: the numbers of all runs, thinned so that a page stays small."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.report._axes import Axis, metric_title
from fedbilevel.report._curves import (
    MAX_POINTS,
    Array,
    Group,
    column,
    curve_style,
    needs_log_scale,
)
from fedbilevel.report._personal import LINES, final_values
from fedbilevel.runs.folder import RunFolder

NUMBERS = 120_000  # of a page: about 400 kB
MIN_POINTS = 40
CLIENT_POINTS = 200  # of the curve of all clients: more than a screen tells apart
DIGITS = 4  # significant ones, as in the tables


class Columns:
    """Columns of numbers, each distinct one stored once: runs often agree in what a round costs."""

    def __init__(self) -> None:
        self._indices: dict[bytes, int] = {}
        self._columns: list[Array] = []

    def add(self, values: Array) -> int:
        """Store a column and return its index."""
        key = values.tobytes()
        if key not in self._indices:
            self._indices[key] = len(self._columns)
            self._columns.append(values)
        return self._indices[key]

    def thinned(self) -> list[list[float | None]]:
        """Return the columns with as many of their evaluations as a page has room for."""
        room = NUMBERS // max(1, len(self._columns))
        points = min(MAX_POINTS, max(MIN_POINTS, room))
        return [_rounded(_thin(values, points)) for values in self._columns]


def chart_data(
    groups: Sequence[Group], axes: Sequence[Axis], metrics: Sequence[str], personal: Sequence[str]
) -> dict[str, Any]:
    """Return what page.js draws: of every curve its runs, of every run its columns."""
    columns = Columns()
    curves: list[dict[str, Any]] = []
    of_key: dict[str, list[Array]] = {key: [] for key in (*(axis.key for axis in axes), *metrics)}
    for index, group in enumerate(groups):
        colour, dash = curve_style(index)
        runs = [_run_data(run, of_key, columns) for run in group.runs]
        curves.append({"label": group.label, "colour": colour, "dash": dash, "runs": runs})
    headings = {}
    divisors = {}
    for axis in axes:
        largest = max(_largest(values) for values in of_key[axis.key])
        headings[axis.key] = axis.heading(largest)
        divisors[axis.key] = axis.unit(largest)[0]
    charts = {}
    for metric in metrics:
        charts[metric] = {"title": metric_title(metric), "log": needs_log_scale(of_key[metric])}
    return {
        "axes": headings,
        "divisors": divisors,
        "charts": charts,
        "columns": columns.thinned(),
        "curves": curves,
        "personal": [_personal_data(groups, name) for name in personal],
    }


def _run_data(run: RunFolder, of_key: Mapping[str, list[Array]], columns: Columns) -> Any:
    """Return the seed of a run and the indices of its columns; also collect these in `of_key`."""
    indices = {}
    for key, collected in of_key.items():
        values = column(run, key)
        if np.isfinite(values).any():
            collected.append(values)
            indices[key] = columns.add(values)
    return {"seed": run.seed, "columns": indices}


def _largest(values: Array) -> float:
    return float(np.nanmax(values))


def _personal_data(groups: Sequence[Group], name: str) -> dict[str, Any]:
    """Return what is drawn of single clients: lines over rounds, and at the end all clients."""
    sorted_values = {}
    for index, group in enumerate(groups):
        values = np.sort(final_values(group, name))
        if len(values):
            sorted_values[index] = _rounded(_thin(values, CLIENT_POINTS))
    lines = {title: f"{name}_{suffix}" for suffix, title in LINES.items()}
    return {
        "metric": name,
        "title": metric_title(name),
        "lines": lines,
        "values": sorted_values,
    }


def _thin(values: Array, count: int) -> Array:
    """Return `count` of the values, evenly chosen, the first and the last among them."""
    if len(values) <= count:
        return values
    chosen: Array = values[np.linspace(0, len(values) - 1, count).round().astype(int)]
    return chosen


def _rounded(values: Array) -> list[float | None]:
    """Return numbers as JSON holds them briefly: rounded, null where they are not finite."""
    numbers: list[float | None] = []
    for text in (f"{value:.{DIGITS}g}" for value in values):
        number = float(text)
        if not np.isfinite(number):
            numbers.append(None)
        elif number.is_integer():
            numbers.append(int(number))
        else:
            numbers.append(number)
    return numbers


def packed(data: Mapping[str, Any]) -> str:
    """Return data as compressed JSON in base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
