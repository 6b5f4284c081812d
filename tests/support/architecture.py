"""The stage and the transport of docs/howto/own-stage.md, made by running its snippets."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own-stage.md"


def snippets() -> list[str]:
    """Return the Python snippets of the page."""
    text = PAGE.read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def names() -> dict[str, Any]:
    """Return all names that the snippets define.

    They run only once, because a class cannot be registered twice.
    """
    defined: dict[str, Any] = {"__name__": "architecture"}
    for snippet in snippets():
        exec(compile(snippet, str(PAGE), "exec", dont_inherit=True), defined)
    return defined
