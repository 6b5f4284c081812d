"""Costs are written in readable units."""

import pytest

from fedbilevel.report._axes import AXES, Spread


@pytest.mark.parametrize(
    ("axis", "cost", "text"),
    [
        ("round", Spread(120, 0, 1), "120"),
        ("round", Spread(7, 0, 1), "7"),
        ("round", Spread(12.5, 3.5, 2), "12.5 ± 3.5"),
        ("round", Spread(12345, 6.7, 2), "12,345 ± 7"),
        ("bytes", Spread(999, 0, 1), "999 B"),
        ("bytes", Spread(1_234_000, 100_000, 3), "1.23 ± 0.10 MB"),
        ("bytes", Spread(52e9, 1e9, 3), "52.0 ± 1.0 GB"),
        ("samples", Spread(944_000, 0, 1), "944 k"),
        ("flops", Spread(1.56e12, 4e10, 3), "1.56 ± 0.04 TFLOP"),
        ("flops", Spread(12, 0, 1), "12 FLOP"),
        ("wall_s", Spread(4321.5, 0, 1), "4,322 s"),
    ],
)
def test_costs_are_written_in_readable_units(axis: str, cost: Spread, text: str) -> None:
    assert AXES[axis].format(cost) == text
