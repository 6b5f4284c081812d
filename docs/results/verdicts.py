"""Verdicts on the claims of the papers, and the parts of verdicts.md that are made of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cells import MISSING, Cell, Row, fewer_seeds
from curve_files import HERE

REPRODUCED = "reproduced"
VARIANT = "reproduced by our variant only"
REFUTED = "refuted"
NOT_COMPARABLE = "not comparable"
NOT_JUDGED = "not judged yet"
IN_ORDER = (REPRODUCED, VARIANT, REFUTED, NOT_COMPARABLE, NOT_JUDGED)


class Verdict(NamedTuple):
    """A verdict on one claim.

    Args:
        id: The experiment, which has a section on the results page.
        place: Where the paper makes the claim.
        claim: The claim.
        verdict: One of the above. It is not shown while a curve is missing; NOT_JUDGED also stands
            until somebody has looked at the runs.
        number: What was measured; "{}" stands for the values.
        values: Cells with the curves that they are about.
    """

    id: str
    place: str
    claim: str
    verdict: str
    number: str
    values: tuple[tuple[Cell, tuple[str, ...]], ...] = ()

    def measured(self) -> str:
        """Return the number with its values, and which curves lack seeds."""
        text = self.number.format(*self._cells())
        fewer = fewer_seeds(curve for _, curves in self.values for curve in curves)
        return f"{text} (fewer seeds so far: {fewer})" if fewer else text

    def shown(self) -> str:
        """Return the verdict, unless it rests on runs that are missing."""
        return NOT_JUDGED if MISSING in self._cells() else self.verdict

    def _cells(self) -> list[str]:
        return [cell(Row((), curves)) or MISSING for cell, curves in self.values]


def pairs(cell: Cell, *curves: str) -> tuple[tuple[Cell, tuple[str, ...]], ...]:
    """Return one cell for several curves."""
    return tuple((cell, (curve,)) for curve in curves)


def blocks(verdicts: Sequence[Verdict], results: str) -> dict[str, str]:
    """Return the generated parts of verdicts.md: the count, the table and the claims that are open.

    Args:
        verdicts: The verdicts.
        results: The text of the results page, to whose sections the table links.
    """
    anchors = {}
    for title, name in re.findall(r"^### ((\S+): .*)$", results, flags=re.MULTILINE):
        anchors[name] = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    counts = Counter(verdict.shown() for verdict in verdicts)
    count = ", ".join(f"{name}: {counts[name]}" for name in IN_ORDER if counts[name])
    lines = ["| paper | claim | verdict | measured | section |", "| --- " * 5 + "|"]
    waiting = []
    for verdict in verdicts:
        if verdict.shown() == NOT_JUDGED:
            waiting.append(f"- {verdict.place}: {verdict.claim} ({verdict.id}).")
            continue
        section = f"[{verdict.id}](README.md#{anchors[verdict.id]})"
        if (HERE / f"{verdict.id}.png").exists():
            section += f", [figure]({verdict.id}.png)"
        cells = (
            verdict.place,
            verdict.claim,
            f"**{verdict.shown()}**",
            verdict.measured(),
            section,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return {
        "count": f"{len(verdicts)} claims. {count}.",
        "verdicts": "\n".join(lines),
        "not-judged": "\n".join(waiting) or "All claims are judged.",
    }
