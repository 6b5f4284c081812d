"""`make bench`: one table of ratios, also written to bench.json."""

from pathlib import Path

from benchmarks import clock, flower, fused, scale, tool
from benchmarks.measure import show

if __name__ == "__main__":
    show([*fused.rows(), *scale.rows(), *clock.rows(), *tool.rows(), *flower.rows()], Path("bench.json"))
