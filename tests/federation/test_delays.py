"""Delay models: means and quantiles of their durations, traces from files, and wrong settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbilevel.core.rng import fold_in, root
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Pareto, Stragglers, Trace
from tests.support.probe import ask, federation
from tests.support.tool import write

KEYS = fold_in(root(1, "test"), torch.arange(20_000))


def assert_share_below(seconds: list[float], limit: float, share: float) -> None:
    """The number of durations below the limit is within 5 standard deviations of its mean."""
    found = sum(s < limit for s in seconds)
    deviation = math.sqrt(share * (1 - share) * len(seconds))
    assert abs(found - share * len(seconds)) < 5 * deviation


def test_a_constant_delay_is_constant() -> None:
    assert Constant(0.3).seconds(KEYS[:4], range(4)) == [0.3] * 4


def test_log_normal_delays_have_their_mean_and_quantiles() -> None:
    n = len(KEYS)
    seconds = LogNormal(2.0, 0.7).seconds(KEYS, range(n))
    standard_error = 2.0 * math.sqrt(math.expm1(0.7**2) / n)
    assert abs(sum(seconds) / n - 2.0) < 5 * standard_error
    for share, normal in ((0.5, 0.0), (0.8413447, 1.0), (0.0227501, -2.0), (0.9986501, 3.0)):
        assert_share_below(seconds, 2.0 * math.exp(0.7 * normal - 0.7**2 / 2), share)


def test_pareto_delays_have_their_mean_and_quantiles() -> None:
    n = len(KEYS)
    seconds = Pareto(2.0, 3.0).seconds(KEYS, range(n))
    # The variance is mean^2 / (shape (shape - 2)).
    standard_error = 2.0 / math.sqrt(3.0 * (3.0 - 2.0) * n)
    assert abs(sum(seconds) / n - 2.0) < 5 * standard_error
    minimum = 2.0 * 2 / 3
    assert min(seconds) >= minimum
    for share in (0.1, 0.5, 0.9, 0.999):
        assert_share_below(seconds, minimum * (1 - share) ** (-1 / 3), share)


def test_a_delay_belongs_to_the_key_not_to_the_client() -> None:
    assert LogNormal().seconds(KEYS[:3], [9, 9, 9]) == LogNormal().seconds(KEYS[:3], [0, 1, 2])


def test_a_trace_is_drawn_from_by_client(tmp_path: Path) -> None:
    by_client = Trace(str(write(tmp_path / "a.csv", "0,1.5\n1,2\n0,2.5\n")))
    seconds = by_client.seconds(KEYS, [0] * len(KEYS))
    assert set(seconds) == {1.5, 2.5}
    assert_share_below(seconds, 2.0, 0.5)
    assert by_client.seconds(KEYS[:3], [1, 1, 1]) == [2.0] * 3
    with pytest.raises(ValueError, match=r"a.csv holds no duration of client 2$"):
        federation(environment={"delay": by_client})


def test_clients_without_lines_draw_from_the_lines_without_a_client(tmp_path: Path) -> None:
    mixed = Trace(str(write(tmp_path / "b.csv", "7\r\n1, 3\r\n")))
    assert mixed.seconds(KEYS[:3], [0, 1, 2]) == [7.0, 3.0, 7.0]
    fed = federation(environment={"delay": mixed})
    ask(fed, [1], 1.0)
    ask(fed, [0, 1], 1.0)
    assert fed.now == 10.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\nfast\n", 2),
        ("0,1,2\n", 1),
        ("1\n\n2\n", 2),
        ("-1,2", 1),
        (",2", 1),
        ("0,-3", 1),
        ("nan", 1),
        ("1e999", 1),
    ],
)
def test_a_wrong_line_of_a_trace_is_refused(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(
        ValueError, match=f"a.csv, line {line} is '.*'; it must be seconds, or client,seconds$"
    ):
        Trace(str(write(tmp_path / "a.csv", text)))


def test_a_wrong_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a.csv is empty; it must hold one duration per line$"):
        Trace(str(write(tmp_path / "a.csv", "")))
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe1")
    with pytest.raises(
        ValueError, match=r"b.csv is not UTF-8 text; it must hold one duration per line$"
    ):
        Trace(str(tmp_path / "b.csv"))
    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        Trace(str(tmp_path / "c.csv"))


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (Constant, {"mean": 0}, "mean is 0; it must be above 0"),
        (LogNormal, {"sigma": -1.0}, "sigma is -1.0; it must be above 0"),
        (Pareto, {"shape": 1}, "shape is 1; it must be above 1, or there is no mean"),
        (Stragglers, {"clients": 0}, "clients is 0; it must be at least 1"),
        (Stragglers, {"clients": 1, "slowdown": 0.5}, "slowdown is 0.5; it must be at least 1"),
        (Faults, {"drop": 1.5}, "drop is 1.5; it must be in [0, 1]"),
        (
            Faults,
            {"drop": 0.5, "corrupt": 0.5},
            "drop is 0.5 and corrupt is 0.5; some replies must get through",
        ),
        (Faults, {"away_s": 0.0}, "away_s is 0.0; it must be above 0"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(
    kind: Any, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        kind(**fields)
