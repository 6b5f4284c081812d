"""Writes what is computed from the curves into the pages.

    python docs/results/tables.py

It rewrites what stands between `<!-- table NAME -->` and `<!-- end NAME -->` in README.md,
verdicts.md and docs/howto/choose.md, and the figures of `fedbilevel advise` (see advice.py). The
tables and verdicts are declared in papers/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import advice
import remaining
import verdicts
from curve_files import HERE
from papers import TABLES, VERDICTS


def rendered(text: str, blocks: Mapping[str, object]) -> str:
    """Return a page with its generated parts computed again.

    Args:
        text: The page.
        blocks: The parts by name; an empty one leaves nothing but its marks.

    Raises:
        ValueError: If a part of the page is not declared.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"table {name} is not declared")
        parts = (f"<!-- table {name} -->", str(blocks[name]), f"<!-- end {name} -->")
        return "\n\n".join(part for part in parts if part)

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def blocks() -> dict[str, object]:
    """Return the generated parts of README.md by name: the tables, and what is to be run."""
    return {**TABLES, "to-be-run": remaining.table()}


def pages() -> dict[Path, str]:
    """Return the pages, and the figures of `fedbilevel advise`, as they should be."""
    results = HERE / "README.md"
    text = results.read_text("utf-8")
    page = HERE / "verdicts.md"
    return {
        results: rendered(text, blocks()),
        page: rendered(page.read_text("utf-8"), verdicts.blocks(VERDICTS, text)),
        advice.PAGE: rendered(advice.PAGE.read_text("utf-8"), advice.blocks()),
        advice.FIGURES: advice.figures(),
    }


def main() -> None:
    """Rewrite the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
