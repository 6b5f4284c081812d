"""Draws the figures of the experiments from their curves.

    python docs/results/figures.py [ID ...]

It writes ID.png beside this file. A curve is the mean over seeds and a band from the least to the
greatest; it begins where all seeds have begun, and ends where the first of them ends. Numbers that
a paper reports are drawn as crosses; most figures of the papers have curves only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from curve_files import HERE, Run, load
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from panels import Bars, Panel
from papers import FIGURES

from fedbilevel.report._curves import LIGHT, curve_style
from fedbilevel.report._figure import LINE_STYLES, STYLE

AXIS_NAMES = {
    "round": "communication rounds",
    "virtual_s": "virtual seconds",
    "wall_s": "seconds on one core",
    "flops": "operations",
    "bytes": "bytes sent",
    "test_accuracy": "test accuracy",
    "train_accuracy": "training accuracy",
    "balanced_accuracy": "balanced test accuracy",
    "auc": "AUC of the weights",
}
UNITS = {
    "flops": ((1e12, "TFLOP"), (1e9, "GFLOP")),
    "bytes": ((1e9, "GB"), (1e6, "MB")),
}
# Positions in the order of curve_style: a method looks the same in all figures. No figure has two
# with one position.
POSITIONS = {
    "aggitd": 0,
    "asfbo": 0,
    "afbo, linear system (ours)": 0,
    "rabo": 0,
    "simfbo": 1,
    "rafbo": 1,
    "fednest": 2,
    "static": 2,
    "la-asfbo": 3,
    "unifbo": 3,
    "dsbo": 3,
    "sdbo": 3,
    "oap": 3,
    "shrofbo": 4,
    "fednest-reference": 4,
    "adbo": 4,
    "fedrolex": 4,
    "afbo as published": 5,
    "fiarse": 5,
    "lfednest": 6,
    "the same, products free": 6,
    "fedmbo": 6,
    "prometheus": 7,
    "prometheus, on a ring": 7,
    "fedavg": 7,
}
HEIGHT = 2.4  # inches, of a panel
LETTER = 0.055  # inches, in a legend
HANDLE = 0.5  # inches, of a line in a legend
REPORTED = "reported in the paper"


def positions(names: Iterable[str]) -> dict[str, int]:
    """Return the position of every curve of a figure in the order of `curve_style`."""
    fixed = {name: POSITIONS[name] for name in names if name in POSITIONS}
    free = (position for position in count() if position not in fixed.values())
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def mean_and_range(runs: Sequence[Run], panel: Panel) -> np.ndarray[Any, Any] | None:
    """Return the points of a curve: x, mean, least and greatest over its seeds."""
    kept = []
    for run in runs:
        x = run[panel.x]
        y = run[panel.y]
        known = np.isfinite(x) & np.isfinite(y)
        if panel.log:
            known &= x > 0
        if known.any():
            kept.append((x[known], y[known]))
    if not kept:
        return None
    start = max(xs[0] for xs, _ in kept)
    end = min(xs[-1] for xs, _ in kept)
    grid = np.unique(np.concatenate([xs for xs, _ in kept]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in kept])
    return np.stack([grid, values.mean(0), values.min(0), values.max(0)])


def run_curves(panel: Panel) -> dict[str, list[Run]]:
    """Return the seeds of the curves of a panel, without those that were not run."""
    found = {name: load(*curve.split("/", 1)) for name, curve in panel.curves.items()}
    return {name: runs for name, runs in found.items() if runs}


def unit_of(column: str, largest: float) -> tuple[float, str]:
    """Return the scale of an axis and its name, with the largest unit that its values reach."""
    units = UNITS.get(column)
    if units is None:
        return 1.0, AXIS_NAMES[column]
    scale, unit = next((each for each in units if largest >= each[0]), units[-1])
    return scale, f"{AXIS_NAMES[column]}, {unit}"


def draw_panel(plot: Axes, panel: Panel, places: Mapping[str, int]) -> None:
    """Draw curves; their colours are by their positions."""
    curves = {}
    for name, runs in run_curves(panel).items():
        points = mean_and_range(runs, panel)
        if points is not None:
            curves[name] = points
    scale, title = unit_of(panel.x, max(points[0, -1] for points in curves.values()))
    for name, (x, mean, low, high) in curves.items():
        line = line_style(places[name])
        plot.plot(x / scale, mean, **line)
        plot.fill_between(x / scale, low, high, color=line["color"], alpha=0.15, linewidth=0)
        for mark in panel.marks.get(name, ()):
            at = x[-1] if mark.x is None else mark.x
            style = {"color": line["color"], "markersize": 6, "clip_on": False, "zorder": 5}
            plot.plot(at / scale, mark.y, "x", **style)
    plot.set(title=panel.title, xlabel=title, ylabel=AXIS_NAMES[panel.y])
    if panel.log:
        plot.set_xscale("log")
        plot.xaxis.set_major_formatter("{x:g}")
    if panel.limits:
        plot.set_ylim(panel.limits)


def line_style(position: int) -> dict[str, Any]:
    """Return how a curve is drawn."""
    colour, dash = curve_style(position)
    return {"color": LIGHT[colour], "linestyle": LINE_STYLES[dash], "linewidth": 0.9}


def draw_bars(plot: Axes, bars: Bars) -> None:
    """Draw bars, with the reported values as crosses."""
    at = np.arange(len(bars.values))
    plot.bar(at, list(bars.values.values()), width=0.3, color=LIGHT[0])
    plot.plot(at, [bars.reported[name] for name in bars.values], "x", color=LIGHT[1])
    plot.set_xticks(at, list(bars.values))
    plot.set(title=bars.title, ylabel=bars.unit)


def draw(name: str) -> None:
    """Write one figure."""
    panels = [panel for panel in FIGURES[name] if isinstance(panel, Bars) or run_curves(panel)]
    names: dict[str, None] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            names |= dict.fromkeys(run_curves(panel))
    places = positions(names)
    handles: list[Artist] = [
        Line2D([], [], label=label, **line_style(position)) for label, position in places.items()
    ]
    if any(isinstance(panel, Bars) for panel in panels):
        handles.append(Patch(color=LIGHT[0], label="measured"))
    if any(isinstance(panel, Bars) or panel.marks for panel in panels):
        style = {"color": "#333333", "linestyle": "none", "marker": "x"}
        handles.append(Line2D([], [], label=REPORTED, **style))
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    lines = ceil(len(panels) / columns)
    width = {1: 4.5, 2: 7.0, 3: 8.0}[columns]
    legend_width = sum(LETTER * len(str(handle.get_label())) + HANDLE for handle in handles)
    legend_lines = ceil(legend_width / width)
    legend_columns = ceil(len(handles) / legend_lines)
    with matplotlib.rc_context(STYLE):
        size = (width, 0.2 + 0.15 * legend_lines + HEIGHT * lines)
        canvas = Figure(figsize=size, layout="constrained")
        for number, panel in enumerate(panels, start=1):
            plot = canvas.add_subplot(lines, columns, number)
            if isinstance(panel, Bars):
                draw_bars(plot, panel)
            else:
                draw_panel(plot, panel, places)
        canvas.legend(
            handles=handles, loc="outside upper center", ncols=legend_columns, frameon=False
        )
        canvas.savefig(HERE / f"{name}.png", dpi=150)


def main(names: Sequence[str]) -> None:
    """Draw the figures named, or all."""
    unknown = set(names) - FIGURES.keys()
    if unknown:
        raise SystemExit(f"{sorted(unknown)} is not one of {', '.join(FIGURES)}")
    for name in names or FIGURES:
        draw(name)
        print(Path(f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
