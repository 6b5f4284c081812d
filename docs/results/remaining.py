"""What has no curve yet, and what it would cost: a table of README.md."""

from __future__ import annotations

import math
from typing import NamedTuple

from costs import GPU_RATE, START_S, measured
from curve_files import load
from members import BATTERY, Member
from plan import resolved

WAYS = "| experiment | runs left | on | PFLOP | seconds each, at least | minutes |"


class Left(NamedTuple):
    """The runs of an experiment that are left on one device."""

    runs: int = 0
    flops: float = 0.0
    least: float = math.inf
    most: float = 0.0
    seconds: float = 0.0

    def with_run(self, flops: float, seconds: float) -> Left:
        """Return it with one more run."""
        least = min(self.least, seconds)
        most = max(self.most, seconds)
        return Left(self.runs + 1, self.flops + flops, least, most, self.seconds + seconds)


def expected(curve: str, member: Member) -> tuple[str, float, float]:
    """Return where a run goes, its operations, and its seconds there."""
    config = resolved(member, {})
    limits = config.get("stop", {})
    if "wall_s" in limits:
        return "an idle machine", 0.0, START_S + float(limits["wall_s"])
    cost = measured().get(curve)
    if cost is None:
        return "not measured", 0.0, 0.0
    place = "a core"
    if cost.network in GPU_RATE:
        place = "the GPU"
    return place, *cost.of_run(config)


def left() -> dict[tuple[str, str], Left]:
    """Return what is left, by experiment and device."""
    found: dict[tuple[str, str], Left] = {}
    for name, members in BATTERY.items():
        for member in members:
            known = {run.seed for run in load(name, member.label)}
            missing = [seed for seed in member.seeds if seed not in known]
            if not missing:
                continue
            place, flops, seconds = expected(f"{name}/{member.label}", member)
            for _ in missing:
                before = found.get((name, place), Left())
                found[name, place] = before.with_run(flops, seconds)
    return found


def table() -> str:
    """Return the table."""
    lines = [WAYS, "| --- " * WAYS.count(" | ") + "| --- |"]
    totals: dict[str, float] = {}
    for (name, place), some in left().items():
        pace = f"{some.least:.0f} to {some.most:.0f}"
        cells = (name, str(some.runs), place, f"{some.flops / 1e15:.3g}", pace)
        lines.append("| " + " | ".join((*cells, f"{some.seconds / 60:.0f}")) + " |")
        totals[place] = totals.get(place, 0.0) + some.seconds / 60
    for place, minutes in totals.items():
        lines.append(f"| all | | {place} | | | {minutes:.0f} |")
    return "\n".join(lines)
