"""Costs of a run as its metrics, its stopping rule and its summary show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tool import QUADRATIC, invoke_ok, read_summary, write


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("costs") / "a.toml", QUADRATIC)


def read_lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_can_stop_by_operations(experiment: Path, tmp_path: Path) -> None:
    invoke_ok("run", experiment, "--rounds", 6, "--out", tmp_path / "all")
    flops = [line["flops"] for line in read_lines(tmp_path / "all")]
    assert flops[0] == 0
    assert flops == sorted(set(flops))
    limit = f"stop.flops={flops[3]}"
    invoke_ok("run", experiment, "--rounds", 6, "--set", limit, "--out", tmp_path / "less")
    assert read_summary(tmp_path / "less")["rounds"] == 3


def test_the_summary_tells_what_clients_paid(experiment: Path, tmp_path: Path) -> None:
    invoke_ok("run", experiment, "--rounds", 6, "--out", tmp_path / "all")
    last = read_lines(tmp_path / "all")[-1]
    summary = read_summary(tmp_path / "all")
    assert summary["flops"] == last["flops"]
    assert summary["peak_bytes"] == last["peak_bytes"]
    assert summary["peak_bytes"] == max(group["peak_bytes"] for group in summary["clients"])
    for name in ("flops", "bytes_up", "bytes_down"):
        paid = sum(group["clients"] * group[name] for group in summary["clients"])
        assert paid == pytest.approx(summary[name])
