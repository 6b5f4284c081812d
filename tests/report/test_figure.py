"""The figure for a paper: PDF or PNG, without a trace in matplotlib's settings."""

import json
from pathlib import Path

import matplotlib
import pytest

from fedbilevel import report
from fedbilevel.runs import folder
from tests.support.synthetic_runs import write_comparison, write_run


@pytest.mark.parametrize(
    ("name", "magic"), [("figure.pdf", b"%PDF"), ("figure.png", b"\x89PNG\r\n\x1a\n")]
)
def test_a_figure_is_written(tmp_path: Path, name: str, magic: bytes) -> None:
    def settings() -> dict[str, object]:  # without the backend, which reading it would choose
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    runs = write_comparison(tmp_path / "runs", algorithms=8, seeds=2)
    before = settings()
    report.write_figure([runs], tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(magic)
    assert len(data) > 10_000
    assert b"/Type3" not in data
    assert settings() == before


def test_a_figure_of_one_run_that_has_losses_only(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, algorithm={"name": r"$\frac"})
    lines = []
    for evaluation in folder.read(path).history:
        lines.append(json.dumps({key: evaluation[key] for key in ("round", "upper_loss")}))
    (path / "metrics.jsonl").write_text("\n".join(lines))
    report.write_figure([path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    with pytest.raises(ValueError, match=r"figure\.svg ends in '\.svg', expected \.pdf or \.png"):
        report.write_figure([path], tmp_path / "figure.svg")


def test_runs_without_an_evaluation_to_draw_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="hold no evaluation past round 0"):
        report.write_figure([path], tmp_path / "figure.pdf")
