"""Interleaved timing, and the table of results.

What is compared runs in turns, so that a noisy moment of the machine hits both sides.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One ratio.

    Attributes:
        name: what is measured, over what it is compared with.
        ratio: the ratio.
        limit: what the ratio should keep to: "at most N" or "at least N", and words if need be;
            empty if there is no limit.
        detail: the times that the ratio was computed from.
    """

    name: str
    ratio: float
    limit: str
    detail: str

    @property
    def is_over_limit(self) -> bool:
        """Whether the ratio does not keep to its limit, "at most N" or "at least N"."""
        if not self.limit:
            return False
        _, side, number = self.limit.split()[:3]
        if side == "most":
            return self.ratio > float(number)
        return self.ratio < float(number)


def seconds(
    functions: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3
) -> dict[str, float]:
    """Return the median seconds that each function takes; they are called in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_megabytes() -> float:
    """Return the most memory that this process has held.

    `getrusage` would include what the parent process held when it forked.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def describe(times: Mapping[str, float]) -> str:
    """Return times as text, in milliseconds."""
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())


def show(rows: list[Row], path: Path) -> None:
    """Print a table of ratios and write it to a JSON file."""
    table = Table("benchmark", "ratio", "limit", "measured", title="fedbilevel: ratios of one run")
    for row in rows:
        table.add_row(row.name, f"{row.ratio:.2f}", row.limit, row.detail)
    Console(width=150).print(table)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    print(f"written to {path}")
    limits = [row for row in rows if row.limit]
    over = [row for row in limits if row.is_over_limit]
    print(f"{len(limits) - len(over)} of {len(limits)} limits are kept")
    for row in over:
        print(f"over its limit: {row.name}: {row.ratio:.2f}, {row.limit}")
