"""The tables of a report: ranking, costs to targets, costs by phase and by client."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedbilevel import report
from fedbilevel.report._axes import Spread
from fedbilevel.report._curves import group_runs
from fedbilevel.report._page import page
from fedbilevel.report._tables import client_costs, phase_costs, rank, table_rows
from fedbilevel.runs import folder
from tests.support.synthetic_runs import run_with, write_comparison, write_run


def test_costs_to_targets() -> None:
    runs = [
        run_with(0, [0, 10, 20, 30], [0.1, 0.8, 0.79, 0.92]),
        run_with(1, [0, 10, 20, 30], [0.1, 0.5, 0.85, 0.88]),
    ]
    (row,) = table_rows(group_runs(runs))
    assert row.cost["round"][0.8] == Spread(15.0, pytest.approx(np.sqrt(50)), 2)
    assert row.cost["bytes"][0.8] == Spread(30.0, pytest.approx(np.sqrt(200)), 2)
    assert row.cost["round"][0.9] == Spread(30.0, 0.0, 1)
    assert row.cost["round"][0.93] is None
    assert row.reached("round").keys() == {0.8}
    assert row.accuracy == Spread(
        pytest.approx(0.9), pytest.approx(np.std([0.92, 0.88], ddof=1)), 2
    )
    assert (row.loss, row.seeds, row.statuses) == (None, 2, {"unfinished": 2})


def test_rank_is_highest_target_then_cost_then_final_values() -> None:
    runs = [
        run_with(0, [0, 10, 20], [0.1, 0.85, 0.96], name="slow"),
        run_with(0, [0, 10, 20], [0.1, 0.96, 0.95], name="fast"),
        run_with(0, [0, 1, 20], [0.1, 0.85, 0.86], name="low"),
        run_with(0, [0, 1, 20], [0.1, 0.2, 0.3], name="lowest"),
    ]
    assert [row.label for row in rank(table_rows(group_runs(runs)), "round")] == [
        "fast",
        "slow",
        "low",
        "lowest",
    ]
    losses = [
        run_with(0, [0, 1], [2, 0.5], "upper_loss", "b"),
        run_with(0, [0, 1], [2, 0.7], "upper_loss", "a"),
    ]
    assert [row.label for row in rank(table_rows(group_runs(losses)), "round")] == ["b", "a"]


def test_ranked_reads_folders(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=3, seeds=2)
    table = report.ranked([tmp_path], "bytes")
    assert {row.label for row in table} == {"fedbio", "fedbioacc", "fednest"}
    assert all(row.statuses == {"completed": 2} for row in table)
    with pytest.raises(ValueError, match="axis is 'miles', expected one of round, bytes, "):
        report.ranked([tmp_path], "miles")


def test_ledger_is_the_mean_over_finished_seeds(tmp_path: Path) -> None:
    for seed, phases in enumerate([{"lower": 10, "upper": 4}, {"lower": 20}]):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        columns = (
            "rounds",
            "bytes_up",
            "bytes_down",
            "samples",
            "gradients",
            "flops",
            "peak_bytes",
        )
        summary["ledger"] = {phase: dict.fromkeys(columns, cost) for phase, cost in phases.items()}
        (path / "summary.json").write_text(json.dumps(summary))
    (write_run(tmp_path / "seed-2", "fedbio", 2, 2) / "summary.json").unlink()
    (one,) = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    assert {phase: cost["bytes_up"] for phase, cost in phase_costs(one).items()} == {
        "lower": 15,
        "upper": 2,
    }


def test_what_clients_paid_is_the_mean_over_finished_seeds_and_older_runs_have_none(
    tmp_path: Path,
) -> None:
    small, large = (
        {"bytes_up": 1, "bytes_down": 2, "peak_bytes": 10},
        {"bytes_up": 3, "bytes_down": 4, "peak_bytes": 20},
    )
    for seed, entries in enumerate(
        [[{**small, "clients": 3, "flops": 8}], [{**small, "clients": 1, "flops": 16}], None]
    ):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        summary["clients"] = [*(entries or []), {**large, "clients": 2, "flops": 100}]
        if entries is None:
            del summary["clients"]
            summary["ledger"]["lower"].pop("flops")
        (path / "summary.json").write_text(json.dumps(summary))
    runs = [folder.read(path) for path in folder.find([tmp_path])]
    (one,) = group_runs(runs[:2])
    assert client_costs(one) == [
        {**small, "clients": 2, "flops": 10},
        {**large, "clients": 2, "flops": 100},
    ]
    assert '<h2 id="clients">Cost by client</h2>' in page(runs[:2])
    (old,) = group_runs(runs[2:])
    assert client_costs(old) == []
    assert np.isnan(phase_costs(old)["lower"]["flops"])
    assert "nan FLOP" not in page(runs[2:])
