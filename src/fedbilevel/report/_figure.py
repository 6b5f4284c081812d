"""Curves for a paper, through matplotlib."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedbilevel.report._curves import (
    AXES,
    LIGHT,
    METRICS,
    Axis,
    Group,
    curve,
    drawable,
    group,
    logarithmic,
    look,
)
from fedbilevel.runs.folder import RunFolder

WIDTH = 7.0  # inches: both columns of a two-column page
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the figure is the same on every machine
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "lines.linewidth": 1.1,
    "figure.constrained_layout.w_pad": 0.08,
    "pdf.fonttype": 42,  # fonts stay text: journals refuse type 3
    "savefig.dpi": 300,
}
LINES = {
    "solid": "-",
    "dash": (0, (4, 1.5)),
    "dot": (0, (1, 1.2)),
    "dashdot": (0, (4, 1.2, 1, 1.2)),
}


def figure(runs: Sequence[RunFolder], path: Path) -> None:
    """Write the first metric over rounds and over virtual time (else bytes), and the other metrics over rounds."""
    if path.suffix not in (".pdf", ".png"):
        raise ValueError(f"{path} ends in {path.suffix!r}, expected .pdf or .png")
    groups = group(runs)
    panels = _panels(*drawable(runs))
    columns = 2 if len(panels) == 4 else len(panels)
    lines = ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(WIDTH, 0.35 + 1.9 * lines), layout="constrained")
        for number, (axis, metric) in enumerate(panels, start=1):
            plot = canvas.add_subplot(lines, columns, number)
            _draw(plot, groups, axis, metric, labelled=number == 1)
        wide = ceil(
            len(groups) / ceil(len(groups) / 5)
        )  # rows of five entries at most, evenly filled
        canvas.legend(loc="outside upper center", ncols=wide, frameon=False, handlelength=2.4)
        # No date inside: the same runs give the same file.
        canvas.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)


def _panels(along: Sequence[Axis], measured: Sequence[str]) -> list[tuple[Axis, str]]:
    """What each panel shows: its horizontal axis and its metric."""
    panels = [(AXES["round"], metric) for metric in measured]
    for cost in (AXES["virtual_s"], AXES["bytes"]):
        if cost in along:
            panels.insert(1, (cost, measured[0]))
            break
    return panels


def _draw(plot: Axes, groups: Sequence[Group], axis: Axis, metric: str, labelled: bool) -> None:
    """Draw one panel; the legend lists the curves of the panel that is labelled."""
    curves = {}
    for index, g in enumerate(groups):
        found = curve(g.runs, axis.key, metric)
        if found is not None:
            curves[index] = found
    largest = max((float(c.x[-1]) for c in curves.values()), default=0.0)
    divisor, _ = axis.unit(largest)
    for index, c in curves.items():
        place, dash = look(index)
        colour = LIGHT[place]
        x = c.x / divisor
        # A bare $ would begin a formula.
        label = groups[index].label.replace("$", r"\$") if labelled else None
        plot.plot(x, c.mean, color=colour, linestyle=LINES[dash], label=label)
        plot.fill_between(x, c.low, c.high, color=colour, alpha=0.15, linewidth=0)
    plot.set(xlabel=axis.heading(largest), ylabel=METRICS[metric])
    plot.margins(x=0)
    if logarithmic(curves.values()):
        _log_scale(plot)


def _log_scale(plot: Axes) -> None:
    plot.set_yscale("log")
    low, high = plot.get_ylim()
    if high / low < 1e3:  # few powers of ten: label 1, 2 and 5 of each, as plain numbers
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
