"""The server process: its run folder, its log and its report."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from flwr.app import Context, RecordDict

from fedbilevel.deploy.flower import app
from fedbilevel.deploy.flower.deployment import read_report
from tests.support.flower import QUADRATIC, FakeGrid

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server changes Flower's waits, a signal handler and the handlers of the log."""
    monkeypatch.setattr(app, "patch_flower_pull_backoff", lambda: None)
    log = logging.getLogger("fedbilevel")
    handlers = list(log.handlers)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, on_sigterm)
    for handler in set(log.handlers) - set(handlers):
        log.removeHandler(handler)
        handler.close()


def run_server(tmp_path: Path, **changes: object) -> dict[str, object]:
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(tomli_w.dumps({**QUADRATIC, "runtime": {"threads": 1}}))
    report = tmp_path / "report.json"
    run_config = {
        "launcher": 0,
        "experiment": str(experiment),
        "out": str(tmp_path / "run"),
        "clients": 0,
        "resume": False,
        "data-dir": "",
        "report": str(report),
        **changes,
    }
    app.main(FakeGrid(4), Context(1, 0, {}, RecordDict(), run_config))
    return read_report(report)


def test_a_run_leaves_its_folder_its_log_and_a_report(tmp_path: Path) -> None:
    report = run_server(tmp_path)
    assert report["status"] == "completed"
    assert report["error"] == ""
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rounds"] == 5
    lines = (tmp_path / "run/server.log").read_text()
    assert "client 3 has joined" in lines
    assert "completed after 5 rounds" in lines


def test_a_run_that_cannot_start_is_reported_in_one_line(tmp_path: Path) -> None:
    report = run_server(tmp_path, experiment="nowhere.toml")
    assert report["status"] == "failed"
    assert "nowhere.toml" in str(report["error"])
    assert "\n" not in str(report["error"])


def test_a_task_that_names_a_file_is_refused(tmp_path: Path) -> None:
    experiment = tmp_path / "table.toml"
    task = {"name": "table", "path": "a.csv", "by": "site", "target": "ill"}
    experiment.write_text(tomli_w.dumps({"task": task}))
    report = run_server(tmp_path, experiment=str(experiment))
    assert "task.path is a path, which nodes do not open" in str(report["error"])


def test_without_a_report_a_failure_is_raised(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"nowhere\.toml"):
        run_server(tmp_path, experiment="nowhere.toml", report="")
