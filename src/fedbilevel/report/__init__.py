"""Reports on runs: a page to read, a figure to print and a ranked table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.report._axes import AXES, Axis, Spread
from fedbilevel.report._curve_files import read_runs
from fedbilevel.report._curves import group_runs
from fedbilevel.report._tables import Row, rank, table_rows

if TYPE_CHECKING:
    from fedbilevel.diagnostics.value import Value

__all__ = [
    "AXES",
    "Axis",
    "Row",
    "Spread",
    "ranked",
    "write_figure",
    "write_page",
    "write_value_page",
]


def ranked(paths: Sequence[Path | str], axis: str = "round") -> list[Row]:
    """Return the ranked table of runs.

    Args:
        paths: Run folders, folders that hold some, or files of curves (.csv, .csv.xz).
        axis: The key in `AXES` of the cost to rank by.

    Returns:
        A row per algorithm and configuration, the best first.

    Raises:
        FileNotFoundError: If one of the paths holds no run.
        ValueError: If there is no such axis.
    """
    if axis not in AXES:
        raise ValueError(f"axis is {axis!r}, expected one of {', '.join(AXES)}")
    return rank(table_rows(group_runs(read_runs(paths))), axis)


def write_page(paths: Sequence[Path | str], out: Path | str, command: str = "") -> None:
    """Write a self-contained HTML file about runs.

    Args:
        paths: Run folders, folders that hold some, or files of curves (.csv, .csv.xz).
        out: The file to write.
        command: The command that writes it, which the page tells, with date, version and machine.

    Raises:
        FileNotFoundError: If one of the paths holds no run.
        ValueError: If no run has an evaluation to draw.
    """
    from fedbilevel.report._page import page  # plotly takes long to import

    html = page(read_runs(paths), command, Path(out).parent)
    Path(out).write_text(html, encoding="utf-8", newline="\n")


def write_figure(paths: Sequence[Path | str], out: Path | str) -> None:
    """Write a figure about runs, for a paper.

    Args:
        paths: Run folders, folders that hold some, or files of curves (.csv, .csv.xz).
        out: The file to write, .pdf or .png.

    Raises:
        FileNotFoundError: If one of the paths holds no run.
        ValueError: If the file is of another type, or no run has an evaluation to draw.
    """
    from fedbilevel.report._figure import figure  # matplotlib takes long to import

    figure(read_runs(paths), Path(out))


def write_value_page(
    title: str,
    value: "Value",
    out: Path | str,
    losses: Mapping[str, float] | None = None,
    notes: str = "",
) -> None:
    """Write a self-contained HTML file about what clients are worth.

    Args:
        title: The heading.
        value: What the clients are worth.
        out: The file to write.
        losses: Losses to draw beside the values, by name.
        notes: Plain text below the picture; an empty line begins a paragraph.
    """
    from fedbilevel.report._value import value_page

    Path(out).write_text(value_page(title, value, losses, notes), encoding="utf-8", newline="\n")
