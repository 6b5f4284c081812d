"""What a real federation costs: bytes on the wire, seconds per round, and Flower's own engine."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Row
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import prepare_run
from fedbilevel.runs.folder import read

ROUNDS = 20
NODES = 4
PARAMETERS = 161_260  # of the experiment below
WIDE_DIGITS = {
    "data.clients": NODES,
    "environment.participation": NODES,
    "task.hidden": 2150,
    "rounds": ROUNDS,
    "every": ROUNDS,
    "runtime.threads": 1,
}


class SecondsPerRound(NamedTuple):
    """Seconds per round, with the experiment's evaluations and without."""

    evaluated: float
    bare: float


class Relay:
    """A port that relays to another one and counts all bytes, with headers and polls."""

    def __init__(self, port: int) -> None:
        self.bytes = 0
        self.target_port = port
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.server.accept()
            server = socket.create_connection(("127.0.0.1", self.target_port))
            for end in (client, server):  # otherwise Nagle's algorithm adds 40 ms to a request
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.bytes += len(data)
                target.sendall(data)
        except OSError:
            pass
        target.close()


def in_process(config: configs.Config, warm_up: int = 0) -> SecondsPerRound:
    """Run an experiment in this process; leave out rounds before steps are traced."""
    run = prepare_run(config)
    times = [(time.perf_counter(), run.fed.ledger.wall_s) for _ in run]
    began, bare_before = times[warm_up]
    ended, bare_after = times[-1]
    rounds = run.fed.ledger.rounds - warm_up
    return SecondsPerRound((ended - began) / rounds, (bare_after - bare_before) / rounds)


def on_warm_nodes(config: configs.Config) -> tuple[float, float]:
    """Run an experiment on nodes that keep their process between tasks.

    Returns:
        Seconds per round, and bytes on the wire over the bytes of the tensors.
    """
    from fedbilevel.cli.federation import serve
    from fedbilevel.deploy.flower.deployment import Deployment

    relays: list[Relay] = []

    def start_nodes(deployment: Deployment) -> None:
        relay = Relay(deployment.port)
        relays.append(relay)
        join = [sys.executable, "-m", "fedbilevel.cli", "join", relay.address, "--warm"]
        for j in range(NODES):
            deployment.start_process(f"client-{j}", [*join, "--partition", j])

    with tempfile.TemporaryDirectory() as folder:
        summary = serve(
            config,
            "bench",
            Path(folder, "run"),
            deployment=Deployment(),
            clients=NODES,
            resume=False,
            data_dir=None,
            quiet=True,
            start_nodes=start_nodes,
        )
    evaluations = 2 * NODES * 4 * PARAMETERS  # x and y to every client, before and after the run
    tensor_bytes = summary["bytes_up"] + summary["bytes_down"] + evaluations
    return summary["wall_s"] / summary["rounds"], relays[0].bytes / tensor_bytes


def on_ray(config: configs.Config) -> SecondsPerRound:
    """Run an experiment on Flower's simulation engine."""
    from fedbilevel.cli.federation import simulate_on_ray

    with tempfile.TemporaryDirectory() as folder:
        simulate_on_ray(config, Path(folder, "run"), resume=False, data_dir=None)
        first, *_, last = read(Path(folder, "run")).history
    evaluated = (last["virtual_s"] - first["virtual_s"]) / last["round"]
    return SecondsPerRound(evaluated, last["wall_s"] / last["round"])


def warm_node_rows() -> list[Row]:
    """Compare warm nodes with one process."""
    config = configs.resolve(*configs.read("digits"), overrides=WIDE_DIGITS)
    nodes_s, bytes_ratio = on_warm_nodes(config)
    process_s = in_process(config).bare
    return [
        Row(
            "bytes on the wire / bytes of the tensors, 160k parameters",
            bytes_ratio,
            "at most 1.05",
            f"{NODES} warm nodes, polls and headers included",
        ),
        Row(
            f"a round on {NODES} warm nodes / in process",
            nodes_s / process_s,
            "",
            f"{nodes_s:.2f} s and {1e3 * process_s:.0f} ms per round",
        ),
        Row(
            "a message to a warm node and its reply / 0.1 s",
            nodes_s / NODES / 0.1,
            "at most 1",
            f"{nodes_s / NODES:.3f} s, {NODES} nodes on one machine",
        ),
    ]


def ray_row(name: str, limit: str) -> Row:
    """Compare an experiment in process with the same on Flower's simulation engine."""

    def resolve(rounds: int) -> configs.Config:
        overrides = {"rounds": rounds, "every": 1, "runtime.threads": 1}
        return configs.resolve(*configs.read(name), overrides=overrides)

    ours = in_process(resolve(200), warm_up=100)
    rays = on_ray(resolve(40))
    return Row(
        "rounds per second in process / on Flower's simulation engine, "
        f"simfbo on {name} as it ships",
        rays.evaluated / ours.evaluated,
        limit,
        f"{1 / ours.evaluated:.1f} and {1 / rays.evaluated:.2f} rounds/s; "
        f"without evaluations {rays.bare / ours.bare:.1f}x",
    )


def rows() -> list[Row]:
    """Compare runs on Flower with runs in process; leave out what is not installed."""
    if find_spec("flwr") is None:
        print("left out: Flower, which is not installed")
        return []
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = warm_node_rows()
    if find_spec("ray") is None:
        print("left out: Ray, which is not installed (pip install 'fedbilevel[ray]')")
        return rows
    rows.append(ray_row("digits", "at least 20"))
    if Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        rows.append(ray_row("mnist", ""))
    else:
        print("left out: MNIST on Ray, because it is not in $FEDBILEVEL_DATA")
    return rows
