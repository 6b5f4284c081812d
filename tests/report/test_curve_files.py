"""Files of curves: read as runs, drawn and ranked like run folders."""

import lzma
from pathlib import Path

import pytest

from fedbilevel import report
from fedbilevel.report._curve_files import read_runs
from tests.support.synthetic_runs import write_run

CURVES = """label,seed,round,bytes_up,bytes_down,test_accuracy,upper_loss,status
simfbo iid,0,0,0,0,0.1,2.3,
simfbo iid,0,10,5,7,0.9,0.4,completed
simfbo iid,1,0,0,0,0.1,2.3,
simfbo iid,1,20,10,14,0.92,,diverged
fednest iid,0,0,0,0,0.1,2.3,
fednest iid,0,10,5,7,0.8,0.7,
"""


@pytest.fixture(params=["curves.csv", "curves.csv.xz"])
def curves(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    content = CURVES.encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def test_a_run_of_a_file_has_a_label_a_seed_a_history_and_a_status(curves: Path) -> None:
    runs = read_runs([curves])
    assert [(run.algorithm, run.seed, run.status) for run in runs] == [
        ("simfbo iid", 0, "completed"),
        ("simfbo iid", 1, "diverged"),
        ("fednest iid", 0, "unfinished"),
    ]
    assert [evaluation["upper_loss"] for evaluation in runs[1].history] == [2.3, None]


def test_files_and_folders_are_ranked_together(curves: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "mdbo", 0)
    rows = {row.label: row for row in report.ranked([curves, tmp_path / "run"], "bytes")}
    assert rows.keys() == {"simfbo iid", "fednest iid", "mdbo"}
    cost = rows["simfbo iid"].cost["bytes"][0.9]
    assert cost is not None
    assert (cost.mean, cost.count) == (18.0, 2)


def test_a_file_is_drawn(curves: Path, tmp_path: Path) -> None:
    report.write_page([curves], tmp_path / "page.html")
    assert "simfbo iid" in (tmp_path / "page.html").read_text("utf-8")
    report.write_figure([curves], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("round,test_accuracy\n0,0.1\n", "is not a file of curves"),
        ("label,seed,round\na,0,ten\n", "is not a file of curves"),
        ("label,seed,round\n", "holds no evaluation"),
    ],
)
def test_another_table_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_runs([path])
