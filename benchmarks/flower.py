"""What a real federation costs: bytes on the wire, seconds a round, and Flower's simulation engine beside ours."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Row
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare
from fedbilevel.runs.folder import read

ROUNDS = 20
NODES = 4
WIDE = {
    "data.clients": NODES,
    "environment.participation": NODES,
    "task.hidden": 2150,
}  # 161,260 parameters


class Relay:
    """A port that passes everything on to another and counts the bytes, headers and polls included."""

    def __init__(self, port: int) -> None:
        self.bytes, self.target = 0, port
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self.server.accept()
            there = socket.create_connection(("127.0.0.1", self.target))
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.bytes += len(data)
                target.sendall(data)
        except OSError:
            pass
        target.close()


def in_process(config: configs.Config, warm_up: int = 0) -> tuple[float, float]:
    """Seconds a round, with the experiment's evaluations and without; after so many rounds steps are traced."""
    run, times = prepare(config), []
    for _ in run:
        times.append((time.perf_counter(), run.fed.ledger.wall_s))
    (began, before), (ended, after), rounds = (
        times[warm_up],
        times[-1],
        run.fed.ledger.rounds - warm_up,
    )
    return (ended - began) / rounds, (after - before) / rounds


def warm_nodes(config: configs.Config) -> tuple[float, float]:
    """Seconds a round on warm nodes, and bytes on the wire over those of the tensors."""
    from fedbilevel.cli.federation import serve
    from fedbilevel.deploy.flower.deployment import Deployment

    relays: list[Relay] = []

    def nodes(site: Deployment) -> None:
        relays.append(Relay(site.port))
        for j in range(NODES):
            command = [
                sys.executable,
                "-m",
                "fedbilevel.cli",
                "join",
                relays[0].address,
                "--warm",
                "--partition",
                j,
            ]
            site.start(f"client-{j}", command)

    with tempfile.TemporaryDirectory() as folder:
        parts: Any = {
            "clients": NODES,
            "resume": False,
            "data_dir": None,
            "quiet": True,
            "local": nodes,
        }
        summary = serve(config, "bench", Path(folder, "run"), site=Deployment(), **parts)
    evaluations = 2 * NODES * 4 * 161_260  # before and after: x and y, to everyone
    return summary["wall_s"] / summary["rounds"], relays[0].bytes / (
        summary["bytes_up"] + summary["bytes_down"] + evaluations
    )


def on_ray(config: configs.Config) -> tuple[float, float]:
    """The same on Flower's simulation engine."""
    from fedbilevel.cli.federation import simulate

    with tempfile.TemporaryDirectory() as folder:
        simulate(config, Path(folder, "run"), resume=False, data_dir=None)
        first, *_, last = read(Path(folder, "run")).history
    return (last["virtual_s"] - first["virtual_s"]) / last["round"], last["wall_s"] / last["round"]


def rows() -> list[Row]:
    try:
        import flwr  # noqa: F401
    except ImportError:
        print("Flower is not installed: left out")
        return []
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found = []
    budget = {"rounds": ROUNDS, "every": ROUNDS, "runtime.threads": 1}
    wide = configs.resolve(*configs.read("digits"), overrides={**budget, **WIDE})
    seconds, bytes_ratio = warm_nodes(wide)
    _, inside = in_process(wide)
    title = "bytes on the wire / bytes of the tensors, 160k parameters"
    found.append(
        Row(title, bytes_ratio, "at most 1.05", f"{NODES} warm nodes, polls and headers included")
    )
    detail = f"{seconds:.2f} s and {1e3 * inside:.0f} ms a round, {seconds / NODES:.2f} s a message"
    found.append(Row(f"a round on {NODES} warm nodes / in process", seconds / inside, "", detail))
    try:
        import ray  # noqa: F401
    except ImportError:
        print("Ray is not installed (pip install 'fedbilevel[ray]'): left out")
        return found
    for name, limit in (("digits", "at least 20"), ("mnist", "")):
        if name == "mnist" and not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
            print("MNIST is not in $FEDBILEVEL_DATA: left out")
            continue
        long, short = (
            configs.resolve(
                *configs.read(name), overrides={"rounds": rounds, "every": 1, "runtime.threads": 1}
            )
            for rounds in (200, 40)
        )
        (inside, bare), (outside, bare_outside) = in_process(long, warm_up=100), on_ray(short)
        title = f"rounds a second in process / on Flower's simulation engine, simfbo on {name} as it ships"
        detail = f"{1 / inside:.1f} and {1 / outside:.2f} rounds/s; without evaluations {bare_outside / bare:.1f}x"
        found.append(Row(title, outside / inside, limit, detail))
    return found
