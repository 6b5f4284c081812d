"""Run folders: how they are found and read; damaged files are named."""

import json
from pathlib import Path

import pytest

from fedbilevel.runs import folder
from tests.support.synthetic_runs import write_comparison, write_run


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, evaluations=4)
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    assert [line["round"] for line in folder.read(path).history] == [0, 10, 20]


def test_a_damaged_line_before_the_last_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, evaluations=3)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:-5], lines[2]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        folder.read(path)


def test_a_run_without_a_summary_is_unfinished(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    assert folder.read(path).status == "completed"
    (path / "summary.json").unlink()
    assert folder.read(path).status == "unfinished"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", "seed =", "config.toml is not TOML"),
        ("config.toml", "seed = 1", "algorithm is None, expected a table with a name"),
        (
            "config.toml",
            'algorithm = "fedbio"',
            "algorithm is 'fedbio', expected a table with a name",
        ),
        (
            "config.toml",
            'seed = "x"\n[algorithm]\nname = "fedbio"',
            "seed is 'x', expected an integer",
        ),
        ("summary.json", "{", "summary.json is not JSON"),
        ("summary.json", "[]", "summary.json is not a summary"),
        ("summary.json", '{"status": "completed"}', "summary.json lacks 'ledger'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    (path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        folder.read(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("ledger", [1]),
        ("ledger", {"descend": None}),
        ("client_metrics", {"rmse": 1.0}),
        ("clients", "all"),
        ("clients", [{"clients": 4, "peak_bytes": 8.0}]),
        ("metric", {"name": "rmse"}),
    ],
)
def test_a_damaged_part_of_a_summary_is_named(tmp_path: Path, part: str, value: object) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, part: value}))
    with pytest.raises(ValueError, match=rf"summary\.json is damaged in '{part}'"):
        folder.read(path)


def test_runs_are_found_once_at_or_below_the_paths(tmp_path: Path) -> None:
    write_comparison(tmp_path / "all", algorithms=2, seeds=2, evaluations=2)
    found = folder.find([tmp_path / "all", str(tmp_path / "all" / "fedbio" / "seed-1")])
    names = ["fedbio/seed-0", "fedbio/seed-1", "fedbioacc/seed-0", "fedbioacc/seed-1"]
    assert [str(path.relative_to((tmp_path / "all").resolve())) for path in found] == names


def test_paths_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no run: expected config\.toml and metrics\.jsonl"
    ):
        folder.find([tmp_path])
    with pytest.raises(FileNotFoundError, match="missing is not a folder"):
        folder.find([tmp_path / "missing"])
