"""Federations on Flower, with real processes: a SuperLink, nodes that stay up or do not, a proxy."""

from __future__ import annotations

import importlib.metadata
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

from fedbilevel.core.tree import flatten
from fedbilevel.deploy.flower import client, keys, warm
from fedbilevel.deploy.flower.deployment import (
    Deployment,
    DeploymentError,
    alive,
    end,
    free_port,
    read_report,
)
from fedbilevel.runs import checkpoint
from tests.support.flower import config, simulated

pytestmark = pytest.mark.xdist_group(
    "flower"
)  # one after the other: they need the machine for themselves

ROOT = Path(__file__).parents[1]
QUADRATIC: dict[str, Any] = {
    "task": {"name": "quadratic", "clients": 4, "samples": 6, "noise": 0.5},
    "environment": {"local_steps": [1, 4], "batch_size": 2},
    "rounds": 5,
    "every": 100,
}
SMALL_NET: dict[str, Any] = {
    "task": {"name": "loss-tuning", "clients": 4, "hidden": 8, "samples": 400},
    "data": {"name": "digits"},
    "environment": {"capacity": [1.0, 0.5], "batch_size": 8},
    "rounds": 2,
}
METHODS: dict[str, dict[str, Any]] = {
    "simfbo": QUADRATIC | {"algorithm": {"name": "simfbo"}},
    "shrofbo": QUADRATIC | {"algorithm": {"name": "shrofbo"}},
    "asfbo": QUADRATIC | {"algorithm": {"name": "asfbo"}},
    "aggitd": QUADRATIC | {"algorithm": {"name": "aggitd"}},
    "rabo": QUADRATIC | {"algorithm": {"name": "rabo"}},
    # Who is first gets the next task number, and with it other draws: without draws there is one outcome.
    "afbo": QUADRATIC | {"algorithm": {"name": "afbo"}, "environment": {"local_steps": 2}},
    "rabo-submodels": SMALL_NET
    | {"algorithm": {"name": "rabo", "policy": "rolling", "lower_steps": 2}},
    "afbo-alone": QUADRATIC
    | {"algorithm": {"name": "afbo"}, "environment": {"participation": 1, "local_steps": [1, 4]}},
}


@pytest.fixture(scope="module", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, _surroundings: None) -> Iterator[Deployment]:
    """A SuperLink with TLS and node keys."""
    folder = tmp_path_factory.mktemp("keys")
    keys.make(folder, 4, ["127.0.0.1", "localhost"])
    with Deployment(keys=folder) as found:
        found.superlink()
        yield found


@pytest.fixture(scope="module")
def outside(site: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same as seen from outside, through nginx; Debian's package `nginx-light` is in the way of nothing."""
    assert shutil.which("nginx"), "nginx is not installed (Debian: nginx-light)"
    port, folder = free_port(), tmp_path_factory.mktemp("nginx")
    text = (ROOT / "docs/nginx.conf").read_text()
    for old, new in (
        ("8443", str(port)),
        ("KEYS", str(site.keys)),
        ("127.0.0.1:8000", site.address),
    ):
        text = text.replace(old, new)
    folders = " ".join(
        f"{kind}_temp_path {folder};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log stderr; daemon off; events {{}} http {{ access_log off; {folders}\n{text}}}"
    )
    with Deployment("127.0.0.1", port, site.keys) as found:
        found.start("nginx", ["nginx", "-c", folder / "nginx.conf", "-p", folder])
        yield found


def wait(done: Callable[[], Any], seconds: float, what: str) -> Any:
    until = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < until, what
        time.sleep(0.1)
    return found


def finished(report: Path, seconds: float = 300) -> dict[str, Any]:
    return wait(
        lambda: (said := read_report(report)).get("status") and said,
        seconds,
        "the server has not ended",
    )


def several(
    site: Deployment, tables: dict[str, Any], folder: Path, nonsense: bool = False
) -> dict[str, Any]:
    (folder / "jobs.json").write_text(json.dumps({"tables": tables, "nonsense": nonsense}))
    report = site.submit(
        "tests.support.flower_app:app", experiment=str(folder / "jobs.json"), out=str(folder)
    )
    assert finished(report) == {"status": "completed"}
    return {name: checkpoint.load(folder / f"{name}.safetensors") for name in tables}


def test_what_we_use_of_flower_is_what_was_tested() -> None:
    """Another release may have moved what `warm` imports, or changed what it means: read its changes first."""
    assert importlib.metadata.version("flwr") == warm.FLWR_VERSION


def test_methods_on_warm_nodes_with_tls_and_keys_move_as_in_simulation(
    site: Deployment, outside: Deployment, tmp_path: Path
) -> None:
    """Two nodes on the SuperLink's own port, two through the proxy."""
    for partition in range(4):
        (site if partition % 2 else outside).node(partition)
    for name, found in several(site, METHODS, tmp_path, nonsense=True).items():
        run = simulated(config(METHODS[name]))
        while run.fed.ledger.rounds < METHODS[name]["rounds"]:
            run.advance()
        assert found["ledger"]["refused_replies"] == found["ledger"]["lost_tasks"] == 0
        if name == "afbo-alone":  # who is first is chance: it must have moved with every arrival
            assert found["iteration"] == found["ledger"]["phases"]["work"]["rounds"] == 5
            continue
        close = 1e-9 if flatten(found["state"]["x"]).dtype == torch.float64 else 1e-5
        for part, value in found["state"].items():
            assert torch.allclose(
                flatten(value), flatten(getattr(run.state, part)), rtol=0, atol=close
            ), name
        expected = {phase: vars(cost) for phase, cost in run.fed.ledger.phases.items()}
        assert found["ledger"]["phases"] == expected
    told = json.loads((tmp_path / "told.json").read_text())
    for said, why in zip(
        told, ("phase is 'nonsense'", "the run's name is not hexadecimal", "'table'"), strict=True
    ):
        assert why in said
        assert "\n" not in said


def test_who_must_not_join_does_not(site: Deployment, tmp_path: Path) -> None:
    keys.make(tmp_path / "other", 1, ["127.0.0.1"])
    ca, strange = site.keys / keys.CA, tmp_path / "other" / keys.CLIENTS / "client-0"  # type: ignore[operator]
    links = {
        "an unregistered key": (warm.Link(site.address, ca, strange), "Failed to activate"),
        "no key": (warm.Link(site.address, ca), "must be registered"),
        "a wrong authority": (
            warm.Link(site.address, tmp_path / "other" / keys.CA, strange),
            "(?i)certificate",
        ),
        "plain text": (warm.Link(site.address, plain=True), "disconnected|reset|Server"),
    }
    for what, (link, why) in links.items():
        with pytest.raises(warm.RefusedError, match=why) as caught:
            warm.serve(link, client.app, {"partition-id": 0}, patience_s=0.1)
        assert "\n" not in str(caught.value), what


def test_behind_the_proxy_outsiders_cannot_submit(
    site: Deployment, outside: Deployment, tmp_path: Path
) -> None:
    for command in (
        ("list", "fedbilevel"),
        ("supernode", "register", site.keys / keys.CLIENTS / "client-0.pub", "fedbilevel"),  # type: ignore[operator]
    ):
        with pytest.raises(DeploymentError, match=r"403|Forbidden|denied|PERMISSION"):
            outside.flwr(*command)
    with pytest.raises(DeploymentError):
        outside.submit(experiment="digits")
    keys.make(tmp_path, 1, ["127.0.0.1"])
    link = warm.Link(outside.address, site.keys / keys.CA, tmp_path / keys.CLIENTS / "client-0")  # type: ignore[operator]
    with pytest.raises(
        warm.RefusedError, match="Failed to activate"
    ):  # the answer of the SuperLink itself
        warm.serve(link, client.app, {"partition-id": 0}, patience_s=0.1)
    assert "runs" in site.flwr("list", "fedbilevel", "--format", "json")


def test_a_stock_supernode_with_tls_and_a_key_moves_as_in_simulation(tmp_path: Path) -> None:
    """One, and one round: it starts a process for every message."""
    keys.make(tmp_path / "keys", 1, ["127.0.0.1"])
    table = METHODS["simfbo"] | {"task": QUADRATIC["task"] | {"clients": 1}, "rounds": 1}
    with Deployment(keys=tmp_path / "keys") as found:
        found.superlink()
        found.node(0, warm=False)
        ended = several(found, {"simfbo": table}, tmp_path)["simfbo"]
    run = simulated(config(table))
    run.advance()
    for part, value in ended["state"].items():
        assert torch.allclose(flatten(value), flatten(getattr(run.state, part)), rtol=0, atol=1e-9)


def test_flowers_simulation_engine_moves_as_ours(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an option of its own: pip install 'fedbilevel[ray]'")
    (tmp_path / "e.toml").write_text(tomli_w.dumps(METHODS["simfbo"]))
    command = [
        sys.executable,
        "-m",
        "fedbilevel.cli",
        "run",
        str(tmp_path / "e.toml"),
        "--federation",
        "ray",
    ]
    command += ["--data-dir", str(tmp_path)]  # of which the nodes that Ray plays must be told
    subprocess.run([*command, "--out", str(tmp_path / "run"), "--quiet"], check=True, timeout=180)
    saved, run = (
        checkpoint.load(tmp_path / "run/checkpoint/latest.safetensors"),
        simulated(config(METHODS["simfbo"])),
    )
    for _ in run:
        pass
    for part, value in saved["state"].items():
        assert torch.allclose(flatten(value), flatten(getattr(run.state, part)), rtol=0, atol=1e-9)


def test_an_interrupted_run_leaves_a_folder_and_no_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedbilevel.cli",
        "run",
        "digits",
        "--federation",
        "flower",
        "--clients",
        "1",
    ]
    command += ["--data-dir", str(tmp_path), "--rounds", "1000", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        wait(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= 2,
            180,
            "it does not get on",
        )
        pids = descendants(process.pid)
        assert len(pids) >= 5  # ours, the SuperLink, its SuperExec and server, a node
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        wait(lambda: not any(map(alive, pids)), 60, "a process is left")
    finally:
        end(process)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] >= 1


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def misbehaving(
    address: str, partition: int, behaviour: str, *wait_for: str
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.support.flower_node",
        address,
        str(partition),
        behaviour,
        *wait_for,
    ]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)


def serving(folder: Path, experiment: Path, port: int, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "fedbilevel.cli",
        "serve",
        str(experiment),
        "--out",
        str(folder),
    ]
    return subprocess.Popen(
        [*command, "--port", str(port), *more], start_new_session=True, stderr=subprocess.DEVNULL
    )


def test_faults_are_survived_counted_and_named(tmp_path: Path) -> None:
    """One dies in its second task, one lies, each time otherwise, until it is put aside, one is slow in its fifth, one
    comes in round 2, which lasts a deadline."""
    conduct = {"deadline_s": 8.0, "start_clients": 3, "strikes": 5}
    table = QUADRATIC | {
        "algorithm": {"name": "simfbo"},
        "rounds": 12,
        "every": 1,
        "conduct": conduct,
    }
    (tmp_path / "e.toml").write_text(tomli_w.dumps(table))
    port = free_port()
    address = f"127.0.0.1:{port}"
    server = serving(tmp_path / "run", tmp_path / "e.toml", port)
    nodes = [misbehaving(address, j, what) for j, what in enumerate(("dies", "lies", "slow"))]
    nodes.append(misbehaving(address, 3, "late", str(tmp_path / "go")))
    log, metrics = tmp_path / "run/server.log", tmp_path / "run/metrics.jsonl"
    try:
        wait(
            lambda: metrics.exists() and metrics.read_text().count("\n") == 2, 180, "no round ends"
        )
        (tmp_path / "go").touch()
        assert server.wait(180) == 0
    finally:
        for process in (*nodes, server):
            end(process)
    summary, said = json.loads((tmp_path / "run/summary.json").read_text()), log.read_text()
    assert (summary["status"], summary["refused_replies"], summary["lost_tasks"]) == (
        "completed",
        5,
        2,
    )
    lies = re.findall("reply refused, client 1: (.*)", said)
    assert len(lies) == 5
    for lie, why in zip(
        lies,
        ("qx is not finite", "another shape", "../../qx", "answers task", "records"),
        strict=True,
    ):
        assert why in lie
    assert "client 1 is put aside after 5 refused replies" in said
    assert "client 0 did not answer in time" in said
    assert "client 2 did not answer in time" in said
    assert said.count("client 2 has joined") == 2  # it was left alone until it answered again
    assert "client 3 has joined" in said
    assert nodes[0].returncode == -signal.SIGKILL


def test_a_killed_server_is_started_again_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    table = QUADRATIC | {
        "algorithm": {"name": "simfbo"},
        "rounds": 6,
        "every": 1,
        "checkpoint_every": 1,
    }
    table |= {"task": QUADRATIC["task"] | {"clients": 2}}
    (tmp_path / "e.toml").write_text(tomli_w.dumps(table))
    port = free_port()
    nodes = [misbehaving(f"127.0.0.1:{port}", j, "none") for j in range(2)]
    metrics, folder = tmp_path / "run/metrics.jsonl", tmp_path / "run"
    server = serving(folder, tmp_path / "e.toml", port)
    try:
        wait(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= 3,
            180,
            "it does not get on",
        )
        pids = descendants(server.pid)
        ours = [
            pid for pid in pids if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        for pid in (server.pid, *ours):
            os.kill(pid, signal.SIGKILL)
        server.wait()
        wait(
            lambda: not any(map(alive, pids)),
            60,
            "the SuperLink or its SuperExec outlives the server",
        )
        before = metrics.read_text().count("\n")
        assert before < 7
        server = serving(folder, tmp_path / "e.toml", port, "--resume")
        assert server.wait(180) == 0
    finally:
        for process in (*nodes, server):
            end(process)
    saved, run = checkpoint.load(folder / "checkpoint/latest.safetensors"), simulated(config(table))
    for _ in run:
        pass
    for part in ("x", "y", "z"):
        assert torch.allclose(
            flatten(saved["state"][part]), flatten(getattr(run.state, part)), rtol=0, atol=1e-9
        )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(7))
    assert [line["upper_loss"] for line in lines] == pytest.approx(
        [m["upper_loss"] for m in run.history], abs=1e-9
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["refused_replies"], summary["lost_tasks"]) == (
        "completed",
        0,
        0,
    )
