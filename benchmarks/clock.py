"""The virtual clock: the cost of an arrival whatever the number in flight, and memory that does not grow with time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fedbilevel as fb
from benchmarks.measure import Row, peak_megabytes
from fedbilevel.algorithms.simfbo import SimFBO, State
from fedbilevel.federation import Federation
from fedbilevel.federation.delays import LogNormal, Stragglers
from fedbilevel.runs.run import Run

FEW, MANY, BATCH = 10_000, 100_000, 1_000


class SmallClients(Sequence[fb.ClientData]):
    """Clients of four samples, of seven kinds: what is measured is the clock, not the making of data."""

    def __init__(self, count: int) -> None:
        self.count = count
        sides = [(torch.arange(4.0).unsqueeze(1) + kind,) for kind in range(7)]
        self.kinds = [fb.ClientData(train=side, val=side) for side in sides]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        return self.kinds[i % 7]


class Arrivals(SimFBO):
    """SimFBO without a barrier: every client is sent the newest x, y and z as soon as it is idle."""

    def iterate(self, s: State, fed: Federation) -> State:
        if fed.iteration == 0:
            fed.post(self.descend(), range(len(fed)), x=s.x, y=s.y, z=s.z)
        r = fed.collect()
        x, y, z = s.x - 0.01 * r.mean("qx"), s.y - 0.1 * r.mean("qy"), s.z - 0.1 * r.mean("qz")
        fed.post(self.descend(), r.idle, x=x, y=y, z=z)
        return State(x, y, z)


def loss(x: Any, y: Any, batch: tuple[Tensor]) -> Tensor:
    return 0.5 * ((y["y"] - batch[0]) ** 2).mean() + 0.5 * ((x["x"] - y["y"]) ** 2).sum()


def arrivals(clients: int, marks: Sequence[int]) -> list[tuple[float, float]]:
    """Seconds of one core, and megabytes at most, that it took this process until so many replies had arrived."""
    torch.set_num_threads(1)
    problem = fb.Problem(loss, loss, x={"x": torch.zeros(3)}, y={"y": torch.zeros(3)})
    environment = fb.Environment(
        participation=BATCH, delay=LogNormal(), stragglers=Stragglers(clients // 10)
    )
    fed = fb.simulated_federation(problem, SmallClients(clients), environment)
    run = Run(Arrivals(), fed, {"rounds": 0}, every={"rounds": marks[-1]})
    found, started = [], time.process_time()
    for mark in marks:
        run.limits = {"rounds": mark // BATCH}
        for _ in run:
            pass
        found.append((time.process_time() - started, peak_megabytes()))
    return found


def rows() -> list[Row]:
    """The first so many arrivals are left out: before them everyone's first task is evaluated."""
    pools = multiprocessing.get_context("spawn")
    rates = {}
    for clients in (FEW, MANY):
        with pools.Pool(1) as pool:
            (early, low), (late, high) = pool.apply(arrivals, (clients, (clients, 2 * clients)))
        rates[f"{clients:,} clients"] = clients / (late - early)
    return [
        Row(
            f"an arrival with {MANY:,} clients in flight / with {FEW:,}, {BATCH:,} arrivals an iteration",
            rates[f"{FEW:,} clients"] / rates[f"{MANY:,} clients"],
            "at most 3",
            ", ".join(f"{name} {rate:,.0f} arrivals/s" for name, rate in rates.items()),
        ),
        Row(
            f"peak memory at {2 * MANY:,} arrivals / at {MANY:,}, {MANY:,} clients in flight",
            high / low,
            "at most 1.1",
            f"{low:.0f} MB, {high:.0f} MB",
        ),
    ]
