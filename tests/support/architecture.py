"""What docs/architecture.md defines: a stage and a transport, each read from the page and executed."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def snippets() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )


@functools.cache
def names() -> dict[str, Any]:
    """Everything that the page's snippets define; a class is registered once, however often it is asked for."""
    found: dict[str, Any] = {"__name__": "architecture"}
    for snippet in snippets():
        exec(compile(snippet, str(PAGE), "exec", dont_inherit=True), found)
    return found
