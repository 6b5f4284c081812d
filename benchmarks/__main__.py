"""`make bench`: one table of ratios, also written to bench.json."""

from pathlib import Path

from benchmarks import fused, scale
from benchmarks.measure import show

if __name__ == "__main__":
    show([*fused.rows(), *scale.rows()], Path("bench.json"))
