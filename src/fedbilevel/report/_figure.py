"""A figure for a paper, drawn with matplotlib."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedbilevel.report._axes import AXES, Axis, metric_title
from fedbilevel.report._curves import (
    LIGHT,
    Group,
    curve_style,
    drawable,
    group_runs,
    main_metrics,
    mean_curve,
    needs_log_scale,
)
from fedbilevel.runs.folder import RunFolder

WIDTH = 7.0  # inches: both columns of a two-column page
LEGEND_COLUMNS = 5  # at most
STYLE: Any = {
    "font.family": "DejaVu Sans",  # matplotlib brings it: the same figure on every machine
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
    "pdf.fonttype": 42,  # TrueType: journals refuse type 3
    "savefig.dpi": 300,
}
LINE_STYLES = {
    "solid": "-",
    "dash": (0, (4, 1.5)),
    "dot": (0, (1, 1.2)),
    "dashdot": (0, (4, 1.2, 1, 1.2)),
}


def figure(runs: Sequence[RunFolder], path: Path) -> None:
    """Write a figure as PDF or PNG.

    Its panels show every metric over rounds, and the first metric also over virtual time, or over
    bytes if no time passed.
    """
    if path.suffix not in (".pdf", ".png"):
        raise ValueError(f"{path} ends in {path.suffix!r}, expected .pdf or .png")
    groups = group_runs(runs)
    axes, measured = drawable(runs)
    metrics = [name for name in main_metrics(runs) if name in measured] or measured[:1]
    panels = _panels(axes, metrics)
    columns = len(panels)
    if columns == 4:
        columns = 2
    lines = ceil(len(panels) / columns)
    metadata = None
    if path.suffix == ".pdf":
        metadata = {"CreationDate": None}  # the same runs give the same file
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(WIDTH, 0.35 + 1.9 * lines), layout="constrained")
        for number, (axis, metric) in enumerate(panels, start=1):
            plot = canvas.add_subplot(lines, columns, number)
            _draw(plot, groups, axis, metric, labelled=number == 1)
        legend_lines = ceil(len(groups) / LEGEND_COLUMNS)
        legend_columns = ceil(len(groups) / legend_lines)
        canvas.legend(
            loc="outside upper center", ncols=legend_columns, frameon=False, handlelength=2.4
        )
        canvas.savefig(path, metadata=metadata)


def _panels(axes: Sequence[Axis], metrics: Sequence[str]) -> list[tuple[Axis, str]]:
    """Return the horizontal axis and the metric of each panel."""
    panels = [(AXES["round"], metric) for metric in metrics]
    for axis in (AXES["virtual_s"], AXES["bytes"]):
        if axis in axes:
            panels.insert(1, (axis, metrics[0]))
            break
    return panels


def _draw(plot: Axes, groups: Sequence[Group], axis: Axis, metric: str, labelled: bool) -> None:
    """Draw one panel; the legend lists the curves of the panel that is labelled."""
    curves = {}
    for index, group in enumerate(groups):
        curve = mean_curve(group.runs, axis.key, metric)
        if curve is not None:
            curves[index] = curve
    largest = max((float(curve.x[-1]) for curve in curves.values()), default=0.0)
    divisor, _ = axis.unit(largest)
    for index, curve in curves.items():
        colour_index, dash = curve_style(index)
        colour = LIGHT[colour_index]
        x = curve.x / divisor
        label = None
        if labelled:
            label = groups[index].label.replace("$", r"\$")  # a bare $ would begin a formula
        plot.plot(x, curve.mean, color=colour, linestyle=LINE_STYLES[dash], label=label)
        plot.fill_between(x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    plot.set(xlabel=axis.heading(largest), ylabel=metric_title(metric))
    plot.margins(x=0)
    edges = [edge for curve in curves.values() for edge in (curve.low, curve.high)]
    if needs_log_scale(edges):
        _set_log_scale(plot)


def _set_log_scale(plot: Axes) -> None:
    plot.set_yscale("log")
    low, high = plot.get_ylim()
    if high / low < 1e3:  # few powers of ten: label 1, 2 and 5 of each, as plain numbers
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
