"""The figure for a paper: PDF or PNG, and nothing else is changed."""

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
def test_figure_is_written(tmp_path: Path, name: str, magic: bytes) -> None:
    def settings() -> dict[str, object]:  # looking at the backend alone would choose one
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    runs, before = write_comparison(tmp_path / "runs", algorithms=8, seeds=2), settings()
    report.write_figure([runs], tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(magic)
    assert len(data) > 10_000
    assert b"/Type3" not in data
    assert settings() == before


def test_figure_of_one_run_with_losses_alone(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0, algorithm={"name": r"$\frac"})
    kept = ("round", "upper_loss")
    history = [{key: line[key] for key in kept} for line in folder.read(path).history]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, history)))
    report.write_figure([path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_figure_refuses_other_formats(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "fedbio", 0)
    with pytest.raises(ValueError, match=r"figure\.svg ends in '\.svg', expected \.pdf or \.png"):
        report.write_figure([path], tmp_path / "figure.svg")
