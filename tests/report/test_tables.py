"""The tables of a report: ranking, costs to targets, costs by phase and by client."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedbilevel import report
from fedbilevel.report._axes import Spread
from fedbilevel.report._curves import group_runs
from fedbilevel.report._tables import (
    PHASE_COSTS,
    client_costs,
    config_differences,
    phase_costs,
    rank,
    table_rows,
)
from fedbilevel.runs import folder
from fedbilevel.runs.folder import RunFolder
from tests.support.synthetic_runs import run_with, write_comparison, write_run


def test_the_cost_to_a_target_is_over_the_seeds_that_reached_it() -> None:
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
    std = np.std([0.92, 0.88], ddof=1)
    assert row.final == Spread(pytest.approx(0.9), pytest.approx(std), 2)
    assert row.finals["upper_loss"] is None
    assert row.seeds == 2
    assert row.statuses == {"unfinished": 2}


def labels_by_rank(runs: Sequence[RunFolder]) -> list[str]:
    return [row.label for row in rank(table_rows(group_runs(runs)), "round")]


def test_rows_are_ranked_by_highest_target_then_cost_then_final_values() -> None:
    runs = [
        run_with(0, [0, 10, 20], [0.1, 0.85, 0.96], name="slow"),
        run_with(0, [0, 10, 20], [0.1, 0.96, 0.95], name="fast"),
        run_with(0, [0, 1, 20], [0.1, 0.85, 0.86], name="low"),
        run_with(0, [0, 1, 20], [0.1, 0.2, 0.3], name="lowest"),
    ]
    assert labels_by_rank(runs) == ["fast", "slow", "low", "lowest"]
    losses = [
        run_with(0, [0, 1], [2, 0.5], "upper_loss", "b"),
        run_with(0, [0, 1], [2, 0.7], "upper_loss", "a"),
    ]
    assert labels_by_rank(losses) == ["b", "a"]


def test_targets_are_on_the_way_where_no_run_comes_near_the_usual_ones() -> None:
    runs = [
        run_with(0, [0, 10, 20], [0.5, 0.6, 0.7], name="slow"),
        run_with(0, [0, 10, 20], [0.5, 0.7, 0.7], name="fast"),
    ]
    assert labels_by_rank(runs) == ["fast", "slow"]
    fast, _ = rank(table_rows(group_runs(runs)), "round")
    assert [*fast.cost["round"]] == [0.6, 0.66, 0.68, 0.69, 0.698]


def test_run_folders_are_ranked_along_an_axis(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=3, seeds=2)
    table = report.ranked([tmp_path], "bytes")
    assert {row.label for row in table} == {"fedbio", "fedbioacc", "fednest"}
    assert all(row.statuses == {"completed": 2} for row in table)
    with pytest.raises(ValueError, match="axis is 'miles', expected one of round, bytes, "):
        report.ranked([tmp_path], "miles")


def test_settings_that_differ_are_listed_with_the_value_of_each_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedbio", 0, 2, algorithm={"name": "fedbio", "lr_x": 0.1})
    write_run(tmp_path / "b", "fedbio", 0, 2, algorithm={"name": "fedbio", "lr_x": 0.5})
    write_run(tmp_path / "c", "mdbo", 1, 2)
    groups = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    differences = config_differences(groups)
    assert differences["algorithm.lr_x"] == [0.1, 0.5, 0.1]
    assert differences["algorithm.local_steps"] == [None, None, 5]
    assert not {"seed", "data.name", "algorithm.name"} & differences.keys()


def test_phase_costs_are_means_over_finished_seeds(tmp_path: Path) -> None:
    for seed, phases in enumerate([{"lower": 10, "upper": 4}, {"lower": 20}]):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        summary["ledger"] = {}
        for phase, cost in phases.items():
            summary["ledger"][phase] = dict.fromkeys(PHASE_COSTS, cost)
        (path / "summary.json").write_text(json.dumps(summary))
    unfinished = write_run(tmp_path / "seed-2", "fedbio", 2, 2)
    (unfinished / "summary.json").unlink()
    (group,) = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    bytes_up = {phase: cost["bytes_up"] for phase, cost in phase_costs(group).items()}
    assert bytes_up == {"lower": 15, "upper": 2}


def test_client_costs_are_means_over_finished_seeds_for_each_peak_memory(tmp_path: Path) -> None:
    small = {"bytes_up": 1, "bytes_down": 2, "peak_bytes": 10}
    large = {"bytes_up": 3, "bytes_down": 4, "peak_bytes": 20, "clients": 2, "flops": 100}
    for seed, clients, flops in ((0, 3, 8), (1, 1, 16)):
        path = write_run(tmp_path / f"seed-{seed}", "fedbio", seed, 2)
        summary = json.loads((path / "summary.json").read_text())
        summary["clients"] = [{**small, "clients": clients, "flops": flops}, large]
        (path / "summary.json").write_text(json.dumps(summary))
    (group,) = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    assert client_costs(group) == [{**small, "clients": 2, "flops": 10}, large]


def test_costs_that_older_runs_do_not_have_are_unknown(tmp_path: Path) -> None:
    run = folder.read(write_run(tmp_path / "run", "fedbio", 0, 2))
    assert run.summary is not None
    del run.summary["clients"]
    del run.summary["ledger"]["lower"]["flops"]
    (group,) = group_runs([run])
    assert client_costs(group) == []
    assert np.isnan(phase_costs(group)["lower"]["flops"])
