"""Interleaved timing: what is compared runs in turns, so that a noisy moment hits both sides."""

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
    """One ratio: what was measured over what it is measured against, and the limit it is meant to keep."""

    name: str
    ratio: float
    limit: str
    detail: str


def seconds(
    functions: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3
) -> dict[str, float]:
    """The median seconds of each function, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_megabytes() -> float:
    """The most memory that this process has held; `getrusage` would count what its parent held when it was made."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def describe(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in times.items())


def show(rows: list[Row], path: Path) -> None:
    table = Table("benchmark", "ratio", "limit", "measured", title="fedbilevel: ratios of one run")
    for row in rows:
        table.add_row(row.name, f"{row.ratio:.2f}", row.limit, row.detail)
    Console(width=150).print(table)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    print(f"written to {path}")
