"""`make bench`: one table of ratios, also written to bench.json."""

from pathlib import Path

from benchmarks import clock, flower, fused, rounds, scale, tool
from benchmarks.measure import show

if __name__ == "__main__":
    parts = (fused, rounds, scale, clock, tool, flower)
    show([row for part in parts for row in part.rows()], Path("bench.json"))
