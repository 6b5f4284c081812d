"""Federations with real processes: a SuperLink, warm nodes and stock SuperNodes, a proxy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedbilevel.cli import federation
from fedbilevel.core.tree import flatten
from fedbilevel.deploy.flower import client, keys, warm_node
from fedbilevel.deploy.flower.deployment import (
    Deployment,
    DeploymentError,
    free_port,
    is_running,
    read_report,
    stop_process,
)
from fedbilevel.deploy.flower.warm_node import ConnectionSettings, RefusedError
from fedbilevel.runs import checkpoint
from fedbilevel.runs.run import Run
from tests.support.flower import Table, resolve_config, simulated_run
from tests.support.processes import evaluations_written, with_descendants

# They run one after the other, because they have deadlines and start many processes.
pytestmark = pytest.mark.xdist_group("flower")

ROOT = Path(__file__).parents[3]
QUADRATIC: Table = {
    "task": {"name": "quadratic", "clients": 4, "samples": 6, "noise": 0.5},
    "environment": {"local_steps": [1, 4], "batch_size": 2},
    "rounds": 5,
    "every": 100,
}
SMALL_NET: Table = {
    "task": {"name": "loss-tuning", "clients": 4, "hidden": 8, "samples": 400},
    "data": {"name": "digits"},
    "environment": {"capacity": [1.0, 0.5], "batch_size": 8},
    "rounds": 2,
}
# Without a barrier, the client that is first gets the next task number and the draws that belong to
# it. Without draws there is only one result.
NO_DRAWS = {"local_steps": 2}
ONE_BY_ONE = {"participation": 1, "local_steps": [1, 4]}
METHODS: dict[str, Table] = {
    "simfbo": {**QUADRATIC, "algorithm": {"name": "simfbo"}},
    "shrofbo": {**QUADRATIC, "algorithm": {"name": "shrofbo"}},
    "asfbo": {**QUADRATIC, "algorithm": {"name": "asfbo"}},
    "aggitd": {**QUADRATIC, "algorithm": {"name": "aggitd"}},
    "rabo": {**QUADRATIC, "algorithm": {"name": "rabo"}},
    "afbo": {**QUADRATIC, "algorithm": {"name": "afbo"}, "environment": NO_DRAWS},
    "rabo-submodels": {
        **SMALL_NET,
        "algorithm": {"name": "rabo", "policy": "rolling", "lower_steps": 2},
    },
    "afbo-one-by-one": {**QUADRATIC, "algorithm": {"name": "afbo"}, "environment": ONE_BY_ONE},
}


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    keys.make(folder, 4, ["127.0.0.1", "localhost"])
    return folder


@pytest.fixture(scope="module")
def secure(key_folder: Path, _environment: None) -> Iterator[Deployment]:
    """A SuperLink with TLS and keys of nodes."""
    with Deployment(keys=key_folder) as deployment:
        deployment.start_superlink()
        yield deployment


@pytest.fixture(scope="module")
def behind_proxy(
    secure: Deployment, key_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """The same SuperLink, as it is reached from outside: through nginx."""
    assert shutil.which("nginx"), "nginx is not installed (Debian: nginx-light)"
    port = free_port()
    folder = tmp_path_factory.mktemp("nginx")
    server = (ROOT / "docs/nginx.conf").read_text()
    server = server.replace("8443", str(port))
    server = server.replace("KEYS", str(key_folder))
    server = server.replace("127.0.0.1:8000", secure.address)
    temporary = ""
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        temporary += f"{kind}_temp_path {folder};\n"
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log stderr; daemon off; events {{}}\n"
        f"http {{ access_log off;\n{temporary}{server}}}"
    )
    with Deployment("127.0.0.1", port, key_folder) as deployment:
        deployment.start_process("nginx", ["nginx", "-c", folder / "nginx.conf", "-p", folder])
        yield deployment


def wait_for(condition: Callable[[], Any], seconds: float, message: str) -> Any:
    """Wait until `condition()` is true, and return what it returns.

    It looks ten times per second only, because deadlines run and the machine may be small.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.1)
    return value


def run_all(
    deployment: Deployment, tables: dict[str, Table], folder: Path, send_nonsense: bool = False
) -> dict[str, Any]:
    """Run experiments on a server, and return the checkpoint of each."""
    experiments = {"tables": tables, "send_nonsense": send_nonsense}
    (folder / "experiments.json").write_text(json.dumps(experiments))
    report = deployment.submit(
        "tests.support.flower_app:app",
        experiment=str(folder / "experiments.json"),
        out=str(folder),
    )
    wait_for(lambda: "status" in read_report(report), 300, "the server has not ended")
    assert read_report(report) == {"status": "completed"}
    return {name: checkpoint.load(folder / f"{name}.safetensors") for name in tables}


def assert_same_state(saved: dict[str, Any], run: Run, tolerance: float = 1e-9) -> None:
    for part, value in saved.items():
        expected = flatten(getattr(run.state, part))
        assert torch.allclose(flatten(value), expected, rtol=0, atol=tolerance), part


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedbilevel.cli", *map(str, arguments)]


def start_server(
    experiment: Path, folder: Path, port: int, *options: str
) -> subprocess.Popen[bytes]:
    command = command_line("serve", experiment, "--out", folder, "--port", port, *options)
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def start_nodes(address: str, file: Path, *behaviours: str) -> subprocess.Popen[bytes]:
    """Start a node per behaviour (see `tests.support.flower_node`)."""
    command = [sys.executable, "-m", "tests.support.flower_node", address, str(file), *behaviours]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    )


def is_node(pid: int) -> bool:
    return b"\0join\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_methods_on_warm_nodes_with_tls_and_keys_move_as_in_simulation(
    secure: Deployment, behind_proxy: Deployment, tmp_path: Path
) -> None:
    """Two nodes connect to the SuperLink itself, two through the proxy."""
    for partition in (0, 2):
        behind_proxy.start_node(partition)
    for partition in (1, 3):
        secure.start_node(partition)
    for name, saved in run_all(secure, METHODS, tmp_path, send_nonsense=True).items():
        run = simulated_run(resolve_config(METHODS[name]))
        while run.fed.ledger.rounds < METHODS[name]["rounds"]:
            run.advance()
        ledger = saved["ledger"]
        assert ledger["refused_replies"] == ledger["lost_tasks"] == 0
        if name == "afbo-one-by-one":  # which client is first is chance; each arrival is a step
            assert saved["iteration"] == ledger["phases"]["work"]["rounds"] == 5
            continue
        tolerance = 1e-5
        if flatten(saved["state"]["x"]).dtype == torch.float64:
            tolerance = 1e-9
        assert_same_state(saved["state"], run, tolerance)
        expected_costs = {phase: vars(cost) for phase, cost in run.fed.ledger.phases.items()}
        assert ledger["phases"] == expected_costs
    answers = json.loads((tmp_path / "answers.json").read_text())
    reasons = ("phase is 'nonsense'", "the run's name is not hexadecimal", "'table'")
    for answer, reason in zip(answers, reasons, strict=True):
        assert reason in answer
        assert "\n" not in answer


def test_nodes_that_must_not_join_are_refused(
    secure: Deployment, key_folder: Path, tmp_path: Path
) -> None:
    keys.make(tmp_path, 1, ["127.0.0.1"])
    ca = key_folder / keys.CA
    other_ca = tmp_path / keys.CA
    unregistered = tmp_path / keys.CLIENTS / "client-0"
    address = secure.address
    for settings, reason in (
        (ConnectionSettings(address, ca, unregistered), "Failed to activate"),
        (ConnectionSettings(address, ca, key=None), "must be registered"),
        (ConnectionSettings(address, other_ca, unregistered), "(?i)certificate"),
        (ConnectionSettings(address, plain=True), "disconnected|reset|Server"),
    ):
        with pytest.raises(RefusedError, match=reason) as caught:
            warm_node.run_node(settings, client.app, {"partition-id": 0}, connect_timeout_s=0.1)
        assert "\n" not in str(caught.value)


def test_behind_the_proxy_nobody_can_submit_code_or_register_nodes(
    secure: Deployment, behind_proxy: Deployment, key_folder: Path, tmp_path: Path
) -> None:
    key = key_folder / keys.CLIENTS / "client-0.pub"
    for command in (("list", "fedbilevel"), ("supernode", "register", key, "fedbilevel")):
        with pytest.raises(DeploymentError, match=r"403|Forbidden|denied|PERMISSION"):
            behind_proxy.flwr(*command)
    with pytest.raises(DeploymentError):
        behind_proxy.submit(experiment="digits")
    keys.make(tmp_path, 1, ["127.0.0.1"])
    unregistered = tmp_path / keys.CLIENTS / "client-0"
    settings = ConnectionSettings(behind_proxy.address, key_folder / keys.CA, unregistered)
    # A node does reach the SuperLink, whose answer this is.
    with pytest.raises(RefusedError, match="Failed to activate"):
        warm_node.run_node(settings, client.app, {"partition-id": 0}, connect_timeout_s=0.1)
    assert "runs" in secure.flwr("list", "fedbilevel", "--format", "json")


def test_a_stock_supernode_with_tls_and_a_key_moves_as_in_simulation(tmp_path: Path) -> None:
    """One node and one round, because it starts a process for every message."""
    keys.make(tmp_path / "keys", 1, ["127.0.0.1"])
    task = {**QUADRATIC["task"], "clients": 1}
    table = {**METHODS["simfbo"], "task": task, "rounds": 1}
    with Deployment(keys=tmp_path / "keys") as deployment:
        deployment.start_superlink()
        deployment.start_node(0, warm=False)
        saved = run_all(deployment, {"simfbo": table}, tmp_path)
    run = simulated_run(resolve_config(table))
    run.advance()
    assert_same_state(saved["simfbo"]["state"], run)


def test_flowers_simulation_engine_moves_as_ours(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an option: pip install 'fedbilevel[ray]'")
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(tomli_w.dumps(METHODS["simfbo"]))
    command = command_line("run", experiment, "--federation", "ray", "--out", tmp_path / "run")
    command += ["--quiet", "--data-dir", str(tmp_path)]  # which the nodes on Ray must be told
    subprocess.run(command, check=True, timeout=180)
    saved = checkpoint.load(tmp_path / "run/checkpoint/latest.safetensors")
    run = simulated_run(resolve_config(METHODS["simfbo"]))
    for _ in run:
        pass
    assert_same_state(saved["state"], run)


def test_a_run_survives_a_killed_node_and_leaves_no_process_when_it_is_interrupted(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    command = command_line("run", "digits", "--federation", "flower", "--clients", 1)
    command += ["--data-dir", str(tmp_path), "--rounds", "1000", "--out", str(folder)]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: evaluations_written(folder) >= 2, 180, "no round ends")
        (node,) = [pid for pid in with_descendants(process.pid) if is_node(pid)]
        os.kill(node, signal.SIGKILL)
        before = evaluations_written(folder)
        wait_for(lambda: evaluations_written(folder) > before + 1, 180, "the node stays away")
        pids = with_descendants(process.pid)
        assert len(pids) >= 5  # the command, the SuperLink, its SuperExec and server, a node
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        wait_for(lambda: not any(map(is_running, pids)), 60, "a process is left")
    finally:
        stop_process(process)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] >= 1
    assert summary["lost_tasks"] == 0  # a task of the killed node was sent again


def test_the_listing_of_the_docs_runs_as_printed_and_joins_end_with_the_study(
    tmp_path: Path, key_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/deploy.md").read_text("utf-8")
    for name in ("study.py", "study.toml"):
        (listing,) = re.findall(rf"^```\w+\n(# {name}\n.*?)^```", text, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(listing, "utf-8")
    port = free_port()
    printed = re.findall(
        r"^fedbilevel (serve study.toml.*?|join (?:.*\\\n)*.*)$", text, re.MULTILINE
    )
    serve, join = [line.replace("\\\n", " ").split() for line in printed]
    serve = [{"keys": str(key_folder), "8000": str(port)}.get(word, word) for word in serve]
    join = [word.replace("fl.example.org:8443", f"127.0.0.1:{port}") for word in join]
    tool = [sys.executable, "-m", "fedbilevel.cli"]
    server = subprocess.Popen([*tool, *serve, "--rounds", "2"], cwd=tmp_path)
    clients = []
    for partition in range(2):
        hospital = tmp_path / f"hospital-{partition}"
        hospital.mkdir()
        shutil.copy(tmp_path / "study.py", hospital)
        shutil.copy(key_folder / "ca.crt", hospital)
        shutil.copy(key_folder / "clients" / f"client-{partition}", hospital / "client-0")
        for side in ("train.pt", "val.pt"):
            torch.save((torch.randn(40, 20), torch.randint(2, (40,)).float()), hospital / side)
        words = [str(partition) if word == "0" else word for word in join]
        clients.append(subprocess.Popen([*tool, *words], cwd=hospital, stdout=subprocess.PIPE))
    try:
        assert server.wait(180) == 0
        for process in clients:
            assert process.wait(60) == 0
            assert process.stdout is not None
            assert b"the study has ended: completed" in process.stdout.read()
    finally:
        for process in (*clients, server):
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert json.loads((tmp_path / "runs/study/summary.json").read_text())["status"] == "completed"


def test_a_stock_supernode_ends_with_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    ended = tmp_path / "ended"
    script = f"import pathlib, time; pathlib.Path({str(ended)!r}).touch(); time.sleep(60)"
    before = time.monotonic()
    federation._supervise([sys.executable, "-c", script], ended.exists)
    assert time.monotonic() - before < 20


def test_faults_are_survived_counted_and_logged(tmp_path: Path) -> None:
    """Client 0 dies in its second task; client 1 lies in every task until it is excluded; client 2
    is slow in its fifth task; client 3 joins in round 2, which lasts until the deadline."""
    folder = tmp_path / "run"
    experiment = tmp_path / "experiment.toml"
    table = {
        **QUADRATIC,
        "algorithm": {"name": "simfbo"},
        "rounds": 12,
        "every": 1,
        "conduct": {"deadline_s": 8.0, "start_clients": 3, "strikes": 5},
    }
    experiment.write_text(tomli_w.dumps(table))
    port = free_port()
    address = f"127.0.0.1:{port}"
    server = start_server(experiment, folder, port)
    nodes = start_nodes(address, tmp_path / "join", "dies", "lies", "slow", "late")
    try:
        wait_for(lambda: evaluations_written(folder) == 2, 180, "no round ends")
        (tmp_path / "join").touch()
        assert server.wait(180) == 0
        nodes.terminate()
        exit_codes, _ = nodes.communicate(timeout=60)
    finally:
        for process in (nodes, server):
            stop_process(process)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["refused_replies"] == 5
    assert summary["lost_tasks"] == 2
    log = (folder / "server.log").read_text()
    refused = re.findall("reply refused, client 1: (.*)", log)
    reasons = ("qx is not finite", "another shape", "../../qx", "the reply is to task", "records")
    for line, reason in zip(refused, reasons, strict=True):
        assert reason in line
    assert "client 1 is excluded after 5 refused replies" in log
    assert "client 0 did not answer in time" in log
    assert "client 2 did not answer in time" in log
    assert log.count("client 2 has joined") == 2  # it was sent nothing until it answered again
    assert "client 3 has joined" in log
    assert json.loads(exit_codes)[0] == -signal.SIGKILL


def test_a_killed_server_that_is_resumed_ends_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    experiment = tmp_path / "experiment.toml"
    table = {
        **QUADRATIC,
        "task": {**QUADRATIC["task"], "clients": 2},
        "algorithm": {"name": "simfbo"},
        "rounds": 6,
        "every": 1,
        "checkpoint_every": 1,
    }
    experiment.write_text(tomli_w.dumps(table))
    port = free_port()
    nodes = start_nodes(f"127.0.0.1:{port}", tmp_path / "join", "none", "none")
    server = start_server(experiment, folder, port)
    try:
        wait_for(lambda: evaluations_written(folder) >= 3, 180, "no round ends")
        pids = with_descendants(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        wait_for(lambda: not any(map(is_running, pids)), 60, "a process outlives the launcher")
        assert evaluations_written(folder) < 7
        server = start_server(experiment, folder, port, "--resume")
        assert server.wait(180) == 0
    finally:
        for process in (nodes, server):
            stop_process(process)
        assert nodes.stdout is not None
        nodes.stdout.close()
    run = simulated_run(resolve_config(table))
    for _ in run:
        pass
    saved = checkpoint.load(folder / "checkpoint/latest.safetensors")
    assert_same_state({part: saved["state"][part] for part in ("x", "y", "z")}, run)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in metrics] == list(range(7))
    losses = [line["upper_loss"] for line in metrics]
    expected_losses = [line["upper_loss"] for line in run.history]
    assert losses == pytest.approx(expected_losses, abs=1e-9)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["refused_replies"] == 0
    assert summary["lost_tasks"] == 0
