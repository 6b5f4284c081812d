"""Reports over run folders: a page to read, a figure to print and a ranked table."""

from collections.abc import Iterable
from pathlib import Path

from fedbilevel.report import _curves as curves
from fedbilevel.report._curves import AXES, TARGETS, Axis, Row, Spread
from fedbilevel.runs import folder

__all__ = ["AXES", "TARGETS", "Axis", "Row", "Spread", "ranked", "write_figure", "write_page"]


def ranked(paths: Iterable[Path | str], axis: str = "round") -> list[Row]:
    """The ranked table over every run at or below the paths; `axis` is the key of the cost that decides."""
    if axis not in AXES:
        raise ValueError(f"axis is {axis!r}, expected one of {', '.join(AXES)}")
    return curves.ranked(curves.rows(curves.group(map(folder.read, folder.find(paths)))), axis)


def write_page(paths: Iterable[Path | str], out: Path | str) -> None:
    """Write one HTML file, complete in itself, about every run at or below the paths."""
    from fedbilevel.report._page import page  # plotly takes long to import

    html = page([folder.read(path) for path in folder.find(paths)])
    Path(out).write_text(html, encoding="utf-8", newline="\n")


def write_figure(paths: Iterable[Path | str], out: Path | str) -> None:
    """Write a PDF or PNG for a paper about every run at or below the paths."""
    from fedbilevel.report._figure import figure  # matplotlib takes long to import

    figure([folder.read(path) for path in folder.find(paths)], Path(out))
