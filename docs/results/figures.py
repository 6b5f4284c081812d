"""Draws the figures of the experiments from their curves.

    python docs/results/figures.py [ID ...]

It writes ID.png beside this file. A curve is the mean over seeds and a band from the least to the
greatest; it begins where all seeds have begun, and ends where the first of them ends. Numbers that
a paper reports are drawn as crosses; most figures of the papers have curves only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from curve_files import HERE, Run, load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from panels import Bars, Panel
from papers import FIGURES

from fedbilevel.report._curves import LIGHT, curve_style
from fedbilevel.report._figure import LINE_STYLES, STYLE

AXIS_NAMES = {
    "round": "communication rounds",
    "virtual_s": "virtual seconds",
    "wall_s": "seconds",
    "flops": "TFLOP",
    "bytes": "MB",
    "test_accuracy": "test accuracy",
    "train_accuracy": "training accuracy",
    "balanced_accuracy": "balanced test accuracy",
    "auc": "AUC of the weights",
}
UNITS = {"flops": 1e12, "bytes": 1e6}


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
            kept.append((x[known] / UNITS.get(panel.x, 1.0), y[known]))
    if not kept:
        return None
    start = max(xs[0] for xs, _ in kept)
    end = min(xs[-1] for xs, _ in kept)
    grid = np.unique(np.concatenate([xs for xs, _ in kept]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in kept])
    return np.stack([grid, values.mean(0), values.min(0), values.max(0)])


def draw_panel(plot: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Draw curves; their colours are by their position in `names`."""
    for name, curve in panel.curves.items():
        points = mean_and_range(load(*curve.split("/", 1)), panel)
        if points is None:
            continue  # it was not run
        colour_index, dash = curve_style(names.index(name))
        colour = LIGHT[colour_index]
        x, mean, low, high = points
        plot.plot(x, mean, color=colour, linestyle=LINE_STYLES[dash])
        plot.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for mark in panel.marks.get(name, ()):
            at = x[-1] if mark.x is None else mark.x
            plot.plot(at, mark.y, "x", color=colour, markersize=5, clip_on=False, zorder=5)
    plot.set(title=panel.title, xlabel=AXIS_NAMES[panel.x], ylabel=AXIS_NAMES[panel.y])
    if panel.log:
        plot.set_xscale("log")
    if panel.limits:
        plot.set_ylim(panel.limits)


def draw_bars(plot: Axes, bars: Bars) -> None:
    """Draw bars, with the reported values as crosses."""
    positions = np.arange(len(bars.values))
    plot.bar(positions, list(bars.values.values()), width=0.5, color=LIGHT[0])
    plot.plot(positions, [bars.reported[name] for name in bars.values], "x", color=LIGHT[1])
    plot.set_xticks(positions, list(bars.values))
    plot.set(title=bars.title, ylabel=bars.unit)


def draw(name: str) -> None:
    """Write one figure."""
    panels = FIGURES[name]
    names: dict[str, None] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            names |= {n: None for n, curve in panel.curves.items() if load(*curve.split("/", 1))}
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    lines = -(-len(panels) // columns)
    width = {1: 4.5, 2: 7.0, 3: 8.0}[columns]
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(width, 0.5 + 2.1 * lines), layout="constrained")
        for number, panel in enumerate(panels, start=1):
            plot = canvas.add_subplot(lines, columns, number)
            if isinstance(panel, Bars):
                draw_bars(plot, panel)
            else:
                draw_panel(plot, panel, list(names))
        handles = []
        for index, label in enumerate(names):
            colour_index, dash = curve_style(index)
            style = {"color": LIGHT[colour_index], "linestyle": LINE_STYLES[dash]}
            handles.append(Line2D([], [], label=label, **style))
        if any(isinstance(panel, Bars) or panel.marks for panel in panels):
            style = {"color": "#333333", "linestyle": "none", "marker": "x"}
            handles.append(Line2D([], [], label="reported in the paper", **style))
        canvas.legend(
            handles=handles,
            loc="outside upper center",
            ncols=2 if columns == 1 else 4,
            frameon=False,
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
