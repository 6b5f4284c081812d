"""Commands for real federations: wrong options, and what the launcher does while a run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.cli import federation, main
from fedbilevel.deploy.flower.deployment import MAX_RESTARTS, Deployment, DeploymentError
from fedbilevel.runs.progress import Progress
from tests.support.flower import QUADRATIC, resolve_config


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("serve digits --host 0.0.0.0", "no keys are given"),
        ("join 10.0.0.1:8000 --partition 0", "no keys are given"),
        ("join 10.0.0.1 --partition 0", "must be host:port"),
        ("join 127.0.0.1:1 --partition 0 --client-data nowhere:load", "cannot be imported"),
        ("serve digits --keys nowhere", "has no ca.crt"),
        ("serve digits --clients 4 --set conduct.deadline_s=0", "deadline_s is 0"),
        ("run digits --stock", "for --federation flower"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    command: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert reason in printed
    assert printed.count("\n") == 1


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with Deployment() as deployment:
        yield deployment


def start_nodes(deployment: Deployment, *codes: int) -> None:
    """Start processes in the place of nodes, which end at once with these codes."""
    for partition, code in enumerate(codes):
        command = [sys.executable, "-c", f"import sys; print('ending'); sys.exit({code})"]
        deployment.nodes[f"client-{partition}"] = command
        deployment.start_process(f"client-{partition}", command)


def wait_for_nodes(deployment: Deployment) -> None:
    for process in deployment.processes.values():
        process.wait(20)


def test_a_node_that_ends_is_started_again_and_then_left_out(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    start_nodes(deployment, 3)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    deployment.nodes["client-1"] = sleeper
    deployment.start_process("client-1", sleeper)
    for _ in range(MAX_RESTARTS + 1):
        deployment.processes["client-0"].wait(20)
        deployment.restart_nodes(needed=1)
    assert caplog.text.count("client-0 has ended and is started again: ending") == MAX_RESTARTS
    assert "client-0 has ended again; the run goes on without it" in caplog.text
    assert list(deployment.nodes) == ["client-1"]


def test_a_run_ends_when_too_few_nodes_are_left(deployment: Deployment) -> None:
    start_nodes(deployment, 3)
    for _ in range(MAX_RESTARTS):
        wait_for_nodes(deployment)
        deployment.restart_nodes(needed=1)
    wait_for_nodes(deployment)
    with pytest.raises(DeploymentError, match="client-0 has ended: ending"):
        deployment.restart_nodes(needed=1)


@pytest.mark.parametrize(
    ("has_begun", "requests", "reason"),
    [
        (False, 1, "interrupted before clients were present"),
        (True, 2, "interrupted within a round, which --resume repeats"),
    ],
)
def test_requests_to_stop_end_as_interrupted(
    has_begun: bool,
    requests: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exit code of a `KeyboardInterrupt` is 130; there is no summary of an unfinished round."""
    code = "import signal, time; signal.signal(15, print); print(flush=True); time.sleep(60)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()

    def submit(deployment: Deployment, **run_config: Any) -> Path:
        report = deployment.folder / "report-1.json"
        report.write_text(json.dumps({"pid": server.pid}))
        return report

    def stop(monitor: federation.RunMonitor) -> None:
        monitor._began = has_begun
        monitor.stop_requests = min(monitor.stop_requests + 1, requests)

    monkeypatch.setattr(Deployment, "start_superlink", lambda deployment: None)
    monkeypatch.setattr(Deployment, "submit", submit)
    monkeypatch.setattr(federation.RunMonitor, "_show_news", stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            federation.serve(
                resolve_config(QUADRATIC),
                "test",
                tmp_path / "run",
                deployment=Deployment(),
                clients=4,
                resume=False,
                data_dir=None,
                quiet=True,
            )
    finally:
        server.kill()
        server.communicate()
    assert reason in caplog.text


def test_only_a_run_that_has_begun_starts_its_nodes_again(
    tmp_path: Path, deployment: Deployment
) -> None:
    """A node that cannot even join has a wrong setting, which a restart does not mend."""
    start_nodes(deployment, 3)
    wait_for_nodes(deployment)
    with Progress("test", 5, True) as progress:
        monitor = federation.RunMonitor(tmp_path / "report.json", tmp_path, progress, 1)
        with pytest.raises(DeploymentError, match="client-0 has ended: ending"):
            monitor.wait(deployment)
    assert not deployment.restarts
