"""A page that shows what clients are worth."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from importlib import resources

import matplotlib
from matplotlib.figure import Figure

from fedbilevel.diagnostics.value import Value
from fedbilevel.diagnostics.value_figure import STYLE, panels


def value_page(title: str, value: Value, losses: Mapping[str, float] | None, notes: str) -> str:
    """Return a self-contained HTML page with the picture, the table and notes.

    Args:
        title: The heading.
        value: What the clients are worth.
        losses: Test losses to compare, by name, or None.
        notes: Plain text below the picture; an empty line begins a paragraph.
    """
    labels = ("values with their intervals", "losses")
    pictures = ""
    for label, panel in zip(labels, panels(value.bars(), losses), strict=False):
        pictures += f"<figure>{_svg(panel, label)}</figure>\n"
    css = (resources.files("fedbilevel.report") / "page.css").read_text("utf-8")
    paragraphs = "".join(f"<p>{escape(each)}</p>\n" for each in notes.split("\n\n") if each)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}\n"
        ".panels { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }\n"
        "figure { flex: 1 1 20rem; max-width: 44rem; margin: 0; padding: .5rem;\n"
        "  background: #ffffff; border-radius: .4rem; }\n"
        "caption { padding: .4rem .6rem; text-align: left; }\n"
        "figure svg { display: block; width: 100%; height: auto; }\n</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1></header>\n<div class="panels">\n{pictures}</div>\n'
        f'{paragraphs}<div class="scroll" tabindex="0">{value.to_html()}</div>\n</body>\n</html>\n'
    )


def _svg(figure: Figure, label: str) -> str:
    """Return a figure as an element of a page."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
