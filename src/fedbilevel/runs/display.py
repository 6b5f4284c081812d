"""Pictures of one run, for a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

PANEL_INCHES = (3.4, 2.5)
COLOUR = "#0072b2"


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=110)
        return stream.getvalue()


def plot_history(
    history: Sequence[Mapping[str, float]], metrics: Sequence[str], against: str
) -> Picture:
    """Draw metrics of a run side by side.

    Args:
        history: The metrics of each evaluation.
        metrics: The names of those to draw.
        against: The name of what they are drawn against.

    Raises:
        ValueError: If the history does not hold one of the names.
    """
    known = sorted({name for evaluation in history for name in evaluation})
    for name in (*metrics, against):
        if name not in known:
            raise ValueError(f"{name!r} is not in the history; there are {', '.join(known)}")
    width, height = PANEL_INCHES
    picture = Picture(figsize=(width * len(metrics), height), layout="constrained")
    for position, metric in enumerate(metrics, start=1):
        panel = picture.add_subplot(1, len(metrics), position)
        values = np.array([evaluation.get(metric, np.nan) for evaluation in history], dtype=float)
        costs = np.array([evaluation.get(against, np.nan) for evaluation in history], dtype=float)
        known_values = np.isfinite(values)
        drawn = values[known_values]
        panel.plot(costs[known_values], drawn, color=COLOUR, marker="." if len(drawn) < 20 else "")
        panel.set(xlabel=against.replace("_", " "), ylabel=metric.replace("_", " "))
        if len(drawn) and drawn.min() > 0 and drawn.max() > 30 * drawn.min():
            panel.set_yscale("log")
        panel.grid(color="#e4e4e4", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    return picture


def html_image(picture: Picture | Figure) -> str:
    """Return a figure as an element of HTML that needs no file.

    Args:
        picture: The figure.
    """
    stream = io.BytesIO()
    picture.savefig(stream, format="png", dpi=110)
    return (
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}">'
    )
