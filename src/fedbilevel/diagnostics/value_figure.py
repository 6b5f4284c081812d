"""The picture of what clients are worth, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"harms": "#d55e00", "helps": "#0072b2", "unclear": "#9a9a9a"}
LEARNT = "#009268"
OTHER = "#c4c8cd"
STYLE: Any = {
    "font.family": "DejaVu Sans",  # matplotlib brings it: the same picture on every machine
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.4,
    "axes.axisbelow": True,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # TrueType: journals refuse type 3
    "svg.fonttype": "path",
    "svg.hashsalt": "fedbilevel",  # the same values give the same file
}
PANEL_WIDTH = 3.8  # inches
SUFFIXES = (".pdf", ".png", ".svg")


class Bars(NamedTuple):
    """What is drawn of values: for each client its name, value, interval and verdict.

    Attributes:
        names: The name of each client.
        values: The value of each client.
        low: The lower end of each interval.
        high: The upper end of each interval.
        verdicts: "helps", "harms" or "unclear".
        level: The probability that all intervals together cover.
    """

    names: Sequence[str]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    verdicts: Sequence[str]
    level: float


def value_figure(bars: Bars, losses: Mapping[str, float] | None = None) -> Figure:
    """Return bars of values with their intervals, and beside them bars of losses if there are any.

    Args:
        bars: What the clients are worth.
        losses: Test losses to compare, by name, or None.
    """
    order = sorted(range(len(bars.values)), key=bars.values.__getitem__, reverse=True)
    height = 0.9 + 0.22 * max(len(order), 5)
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(7.0, height), layout="constrained")
        plots = canvas.subplots(1, 2 if losses else 1, squeeze=False)[0]
        _draw_values(plots[0], bars, order)
        if losses:
            _draw_losses(plots[1], losses)
    return canvas


def panels(bars: Bars, losses: Mapping[str, float] | None = None) -> list[Figure]:
    """Return the same as one picture per panel, each narrow enough for a phone.

    Args:
        bars: What the clients are worth.
        losses: Test losses to compare, by name, or None.
    """
    drawn = [value_figure(bars)]
    if losses:
        with matplotlib.rc_context(STYLE):
            drawn.append(Figure(layout="constrained"))
            _draw_losses(drawn[-1].subplots(), losses)
    for figure in drawn:
        figure.set_size_inches(PANEL_WIDTH, drawn[0].get_figheight())
    return drawn


def _draw_values(plot: Axes, bars: Bars, order: list[int]) -> None:
    for row, client in enumerate(order):
        low, high = bars.low[client], bars.high[client]
        plot.barh(row, bars.values[client], color=COLOURS[bars.verdicts[client]], height=0.7)
        plot.plot([low, high], [row, row], color="black", linewidth=0.9)
        for end in (low, high):
            plot.plot([end, end], [row - 0.13, row + 0.13], color="black", linewidth=0.9)
    plot.axvline(0, color="black", linewidth=0.6)
    plot.set_yticks(range(len(order)), [bars.names[client] for client in order])
    plot.grid(visible=False, axis="y")
    plot.set_xlabel("rise of the loss on the trusted samples without the client")
    plot.set_title(f"Who helps, who harms ({bars.level:.0%} intervals, jointly)", loc="left")


def _draw_losses(plot: Axes, losses: Mapping[str, float]) -> None:
    names = list(losses)
    for row, name in enumerate(reversed(names)):
        is_learnt = name == "learnt weights"
        plot.barh(row, losses[name], color=LEARNT if is_learnt else OTHER, height=0.7)
        plot.text(losses[name], row, f" {losses[name]:.4f}", va="center", fontsize=6.5)
    plot.set_yticks(range(len(names)), list(reversed(names)))
    plot.grid(visible=False, axis="y")
    least, most = min(losses.values()), max(losses.values())
    margin = (most - least) or 0.1 * most
    plot.set_xlim(least - 0.4 * margin, most + 0.4 * margin)
    plot.set_xlabel("log loss on test people (the axis does not begin at 0)")
    plot.set_title("What it costs, and what weights win back", loc="left")


def save_value_figure(bars: Bars, path: Path, losses: Mapping[str, float] | None = None) -> None:
    """Write the picture as .pdf, .png or .svg.

    Args:
        bars: What the clients are worth.
        path: The file to write.
        losses: Test losses to compare, by name, or None.

    Raises:
        ValueError: The file is of another type.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected .pdf, .png or .svg")
    metadata = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix)
    with matplotlib.rc_context(STYLE):
        value_figure(bars, losses).savefig(path, metadata=metadata)
