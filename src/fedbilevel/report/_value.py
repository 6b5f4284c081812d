"""A page that shows what clients are worth."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from importlib import resources

import matplotlib

from fedbilevel.diagnostics.value import Value
from fedbilevel.diagnostics.value_figure import STYLE, value_figure


def value_page(title: str, value: Value, losses: Mapping[str, float] | None, notes: str) -> str:
    """Return a self-contained HTML page with the picture, the table and notes.

    Args:
        title: The heading.
        value: What the clients are worth.
        losses: Test losses to compare, by name, or None.
        notes: Plain text below the picture; an empty line begins a paragraph.
    """
    picture = io.StringIO()
    with matplotlib.rc_context(STYLE):
        value_figure(value.bars(), losses).savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", '<svg role="img" aria-label="values" ', 1)
    css = (resources.files("fedbilevel.report") / "page.css").read_text("utf-8")
    paragraphs = "".join(f"<p>{escape(each)}</p>\n" for each in notes.split("\n\n") if each)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}\n"
        "figure { margin: 1.5rem 0; background: #ffffff; padding: .5rem; border-radius: .4rem; }\n"
        "figure svg { width: 100%; height: auto; }\n</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1></header>\n<figure>{svg}</figure>\n{paragraphs}"
        f'<div class="scroll" tabindex="0"><pre>{escape(str(value))}</pre></div>\n'
        "</body>\n</html>\n"
    )
