"""`make bench`: prints one table of ratios and writes it to bench.json."""

from pathlib import Path

import fedbilevel

fedbilevel.configure_process()  # as the command line does, before torch is imported

from benchmarks import (  # noqa: E402
    clock,
    first_order,
    flower,
    fused,
    rounds,
    scale,
    small,
    startup,
    tool,
    values,
)
from benchmarks.measure import show  # noqa: E402

if __name__ == "__main__":
    rows = []
    for module in (fused, rounds, first_order, small, scale, clock, startup, tool, values, flower):
        rows += module.rows()
    show(rows, Path("bench.json"))
