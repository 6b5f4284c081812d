"""Curves over seeds: which runs belong together, their common range, thinning, log scales."""

from pathlib import Path

import numpy as np

from fedbilevel.report._curves import MAX_POINTS, group_runs, mean_curve, needs_log_scale
from fedbilevel.report._tables import config_differences
from fedbilevel.runs import folder
from tests.support.synthetic_runs import run_with, write_run


def test_seeds_meet_on_the_grid_of_both_where_both_have_been() -> None:
    runs = [run_with(0, [0, 10, 20], [0, 1, 2]), run_with(1, [0, 5, 25], [0, 2, 4])]
    c = mean_curve(runs, "round", "test_accuracy")
    assert c is not None
    np.testing.assert_allclose(c.x, [0, 5, 10, 20])
    np.testing.assert_allclose(c.mean, [0, 1.25, 1.75, 2.75])  # of 0 .5 1 2 and of 0 2 2.5 3.5
    np.testing.assert_allclose(c.low, [0, 0.5, 1, 2])
    np.testing.assert_allclose(c.high, [0, 2, 2.5, 3.5])
    sent = mean_curve(runs, "bytes", "test_accuracy")
    assert sent is not None
    np.testing.assert_allclose(sent.x, [0, 10, 20, 40])


def test_missing_values_are_bridged_and_the_later_of_two_evaluations_at_one_place_counts() -> None:
    c = mean_curve(
        [run_with(0, [0, 0, 1, 2, 3], [9, 1, None, 3, float("nan")])], "round", "test_accuracy"
    )
    assert c is not None
    assert (c.x.tolist(), c.mean.tolist()) == ([0, 2], [1, 3])
    assert mean_curve([run_with(0, [0], [None])], "round", "test_accuracy") is None
    assert (
        mean_curve(
            [run_with(0, [0, 1], [1, 1]), run_with(1, [2, 3], [1, 1])], "round", "test_accuracy"
        )
        is None
    )


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    x = list(range(5001))
    c = mean_curve([run_with(0, x, x)], "round", "test_accuracy")  # type: ignore[arg-type]
    assert c is not None
    assert (c.x.size, c.x[0], c.x[-1]) == (MAX_POINTS, 0, 5000)
    np.testing.assert_array_equal(c.x, c.mean)


def test_log_scale_is_for_positive_values_over_more_than_a_decade_and_a_half() -> None:
    def wide(*values: float) -> bool:
        c = mean_curve([run_with(0, [0, 1], list(values))], "round", "test_accuracy")
        assert c is not None
        return needs_log_scale([c])

    assert wide(1, 100)
    assert not wide(1, 20)
    assert not wide(0, 100)
    assert not needs_log_scale([])


def test_labels_carry_the_folder_where_configurations_differ(tmp_path: Path) -> None:
    for place, rate in (("low", 0.1), ("high", 0.5)):
        for seed in (0, 1):
            algorithm = {"name": "fedbio", "lr_x": rate}
            write_run(
                tmp_path / place / "fedbio" / f"seed-{seed}", "fedbio", seed, 2, algorithm=algorithm
            )
    write_run(tmp_path / "low" / "mdbo" / "seed-0", "mdbo", 0, 2)
    groups = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("fedbio (high)", 2),
        ("fedbio (low)", 2),
        ("mdbo", 1),
    ]
    assert config_differences(groups)["algorithm.lr_x"] == [0.5, 0.1, 0.1]
    assert config_differences(groups)["algorithm.local_steps"] == [None, None, 5]
    assert not {"seed", "data.name", "algorithm.name"} & config_differences(groups).keys()


def test_a_seed_run_twice_is_not_two_seeds(tmp_path: Path) -> None:
    for place in ("first", "again"):
        write_run(tmp_path / place, "fedbio", 0, 2)
    groups = group_runs(folder.read(path) for path in folder.find([tmp_path]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("fedbio (again)", 1),
        ("fedbio (first)", 1),
    ]
