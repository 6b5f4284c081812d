"""Curves over seeds: which runs belong together, their common range, thinning, log scales."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbilevel.report._curves import (
    MAX_POINTS,
    Curve,
    evaluated,
    group_runs,
    main_metrics,
    mean_curve,
    needs_log_scale,
)
from fedbilevel.runs import folder
from fedbilevel.runs.clients import distribution, with_suffixes
from fedbilevel.runs.folder import RunFolder
from tests.support.synthetic_runs import run_with, write_run


def accuracy_curve(runs: Sequence[RunFolder], axis: str = "round") -> Curve:
    curve = mean_curve(runs, axis, "test_accuracy")
    assert curve is not None
    return curve


def test_a_curve_is_the_mean_over_seeds_where_all_of_them_have_been() -> None:
    runs = [run_with(0, [0, 10, 20], [0, 1, 2]), run_with(1, [0, 5, 25], [0, 2, 4])]
    curve = accuracy_curve(runs)
    np.testing.assert_allclose(curve.x, [0, 5, 10, 20])
    np.testing.assert_allclose(curve.mean, [0, 1.25, 1.75, 2.75])
    np.testing.assert_allclose(curve.low, [0, 0.5, 1, 2])
    np.testing.assert_allclose(curve.high, [0, 2, 2.5, 3.5])
    np.testing.assert_allclose(accuracy_curve(runs, "bytes").x, [0, 10, 20, 40])


def test_missing_values_are_bridged() -> None:
    curve = accuracy_curve([run_with(0, [0, 1, 2, 3], [1, None, 3, float("nan")])])
    assert (curve.x.tolist(), curve.mean.tolist()) == ([0, 2], [1, 3])


def test_the_last_of_several_evaluations_at_one_point_counts() -> None:
    curve = accuracy_curve([run_with(0, [0, 0, 2], [9, 1, 3])])
    assert (curve.x.tolist(), curve.mean.tolist()) == ([0, 2], [1, 3])


def test_seeds_without_values_or_without_a_common_range_have_no_curve() -> None:
    assert mean_curve([run_with(0, [0], [None])], "round", "test_accuracy") is None
    apart = [run_with(0, [0, 1], [1, 1]), run_with(1, [2, 3], [1, 1])]
    assert mean_curve(apart, "round", "test_accuracy") is None


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    numbers = list(range(5001))
    curve = accuracy_curve([run_with(0, numbers, numbers)])  # type: ignore[arg-type]
    assert (curve.x.size, curve.x[0], curve.x[-1]) == (MAX_POINTS, 0, 5000)
    np.testing.assert_array_equal(curve.x, curve.mean)


def test_of_a_distribution_over_clients_the_mean_is_a_main_metric() -> None:
    """As the metrics of new clients, which the `evaluate` of a task returns."""
    of_clients = with_suffixes("new_accuracy", distribution("new_accuracy", [0.5, 0.9]))
    run = run_with(0, [0, 5], [0.1, 0.5])
    run = dataclasses.replace(run, summary={"evaluated": [*of_clients, "size", "size_worst"]})
    assert evaluated([run]) == ["new_accuracy", "size", "size_worst"]
    assert {"new_accuracy", "size_worst"} <= set(main_metrics([run]))
    assert "new_accuracy_p10" not in main_metrics([run])


def test_a_log_scale_is_for_positive_values_over_more_than_a_decade_and_a_half() -> None:
    def with_values(*values: float) -> bool:
        return needs_log_scale([np.array([np.nan, values[0]]), np.array([values[1]])])

    assert with_values(1, 100)
    assert not with_values(1, 20)
    assert not with_values(0, 100)
    assert not needs_log_scale([])


def test_labels_name_the_folder_if_configurations_differ(tmp_path: Path) -> None:
    for name, lr_x in (("low", 0.1), ("high", 0.5)):
        for seed in (0, 1):
            path = tmp_path / name / "fedbio" / f"seed-{seed}"
            write_run(path, "fedbio", seed, 2, algorithm={"name": "fedbio", "lr_x": lr_x})
    write_run(tmp_path / "low" / "mdbo" / "seed-0", "mdbo", 0, 2)
    groups = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    sizes = {group.label: len(group.runs) for group in groups}
    assert sizes == {"fedbio (high)": 2, "fedbio (low)": 2, "mdbo": 1}
    assert list(sizes) == sorted(sizes)


def test_a_seed_that_was_run_twice_does_not_count_as_two_seeds(tmp_path: Path) -> None:
    for name in ("first", "again"):
        write_run(tmp_path / name, "fedbio", 0, 2)
    groups = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    sizes = {group.label: len(group.runs) for group in groups}
    assert sizes == {"fedbio (again)": 1, "fedbio (first)": 1}
