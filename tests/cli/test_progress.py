"""Following a run that another process writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbilevel.cli.progress import FollowedFile, FollowedRun


def evaluation(count: int, accuracy: float | None) -> str:
    """Return a line of metrics."""
    metrics = {"round": count, "test_accuracy": accuracy, "bytes_up": 1e6, "bytes_down": 5e5}
    return json.dumps(metrics) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_only_complete_and_new_lines_are_returned(file: Path) -> None:
    followed = FollowedFile(file)
    assert followed.new_lines() == []
    file.write_text("a\nb\nhalf")
    assert followed.new_lines() == ["a", "b"]
    assert followed.new_lines() == []
    with file.open("a") as stream:
        stream.write(" a line\n")
    assert followed.new_lines() == ["half a line"]
    assert FollowedFile(file, at_end=True).new_lines() == []


def test_a_file_that_was_cut_is_read_again(file: Path) -> None:
    followed = FollowedFile(file)
    file.write_text("a\nb\n")
    followed.new_lines()
    file.write_text("a\n")
    assert followed.new_lines() == ["a"]


def test_the_curve_shows_the_accuracy_over_the_budget_of_rounds(file: Path) -> None:
    run = FollowedRun(file, rounds=40)
    run.update()
    assert (run.last, run.curve, str(run)) == (None, "", "")
    file.write_text(evaluation(0, 0.1) + evaluation(10, 0.3) + evaluation(20, 0.5))
    run.update()
    assert run.curve == 5 * "▃" + 5 * "▅"
    assert str(run) == "round 20/40  accuracy 0.5  1.5 MB  ▃▃▃▃▃▅▅▅▅▅"
    with file.open("a") as stream:
        stream.write(evaluation(30, 1.0) + evaluation(44, 0.0))  # an iteration of several rounds
    run.update()
    assert run.curve == 5 * "▃" + 5 * "▅" + 5 * "█" + 5 * "▁"


def test_the_curve_of_a_resumed_run_goes_back(file: Path) -> None:
    run = FollowedRun(file, rounds=20)
    file.write_text(evaluation(5, 0.0) + evaluation(10, 0.0))
    run.update()
    file.write_text(evaluation(5, 0.0))
    run.update()
    assert (run.curve, str(run)[:10]) == (5 * "▁", "round 5/20")


def test_without_an_accuracy_there_is_no_curve(file: Path) -> None:
    run = FollowedRun(file, rounds=10)
    file.write_text(evaluation(5, None) + "damaged\n")
    run.update()
    assert (run.curve, str(run)) == ("", "round 5/10  1.5 MB")
