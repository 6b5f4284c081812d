"""`make bench`: one table of ratios, also written to bench.json."""

from pathlib import Path

import fedbilevel

fedbilevel.configure_process()  # as the command line does, before torch is imported

from benchmarks import clock, flower, fused, rounds, scale, tool  # noqa: E402
from benchmarks.measure import show  # noqa: E402

if __name__ == "__main__":
    parts = (fused, rounds, scale, clock, tool, flower)
    show([row for part in parts for row in part.rows()], Path("bench.json"))
