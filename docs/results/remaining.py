"""What has no curve yet, and what it would cost: a table of README.md."""

from __future__ import annotations

import math
from typing import NamedTuple

from costs import GPU_RATE, START_S, measured
from curve_files import load
from members import BATTERY, Member
from plan import resolved

HEADS = ("experiment", "what is missing", "runs", "on", "PFLOP", "seconds per run", "minutes")
MISSING = {
    "aggitd-cnn": "LeNet-5 on MNIST with batch 10",
    "aggitd-fig7": "MNIST, with steps that are not tuned",
    "simfbo-fig5": "each method alone on the machine, three seeds",
    "rabo-table2": "ResNet-12: 5 and 20 ways, 1 and 5 shots, nine methods, three seeds",
    "rabo-fig3": "ResNet-12, three seeds",
    "rabo-table3": "ResNet-12: RABO and RAFBO, 1 and 5 shots, three seeds",
    "rabo-fig5": "ResNet-18 on long-tailed CIFAR-10, three seeds",
}
GPU = "a GPU"
CORE = "one core"
IDLE = "one core of an idle machine"


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
        return IDLE, 0.0, START_S + float(limits["wall_s"])
    cost = measured().get(curve)
    if cost is None:
        return "not measured", 0.0, 0.0
    place = CORE
    if cost.network in GPU_RATE:
        place = GPU
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
    lines = ["| " + " | ".join(HEADS) + " |", "| --- " * len(HEADS) + "|"]
    totals: dict[str, float] = {}
    for (name, place), some in left().items():
        pace = f"{some.least:.0f}"
        if pace != f"{some.most:.0f}":
            pace += f" to {some.most:.0f}"
        cells = (
            name,
            MISSING[name],
            str(some.runs),
            place,
            f"{some.flops / 1e15:.3g}" if some.flops else "",
            pace,
            f"{some.seconds / 60:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
        totals[place] = totals.get(place, 0.0) + some.seconds / 60
    for place, minutes in totals.items():
        lines.append(f"| all | | | {place} | | | {minutes:.0f} |")
    return "\n".join(lines)
