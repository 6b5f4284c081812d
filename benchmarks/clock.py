"""The virtual clock: neither an arrival nor the memory of a run grows with what came before."""

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

FEW_CLIENTS = 10_000
MANY_CLIENTS = 100_000
ARRIVALS_PER_ITERATION = 1_000


class SmallClients(Sequence[fb.ClientData]):
    """Clients that share seven small data sets, so that the clock is measured and not the data."""

    def __init__(self, count: int) -> None:
        self.count = count
        sides = [(torch.arange(4.0).unsqueeze(1) + number,) for number in range(7)]
        self.data = [fb.ClientData(train=side, val=side) for side in sides]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, client: Any) -> Any:
        return self.data[client % 7]


class AsynchronousSimFBO(SimFBO):
    """SimFBO without a barrier: an idle client is sent the newest x, y and z at once."""

    def iterate(self, s: State, fed: Federation) -> State:
        if fed.iteration == 0:
            fed.post(self.descend(), range(len(fed)), x=s.x, y=s.y, z=s.z)
        r = fed.collect()
        x = s.x - 0.01 * r.mean("qx")
        y = s.y - 0.1 * r.mean("qy")
        z = s.z - 0.1 * r.mean("qz")
        fed.post(self.descend(), r.idle, x=x, y=y, z=z)
        return State(x, y, z)


def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
    """A quadratic in three variables."""
    return 0.5 * ((y["y"] - batch[0]) ** 2).mean() + 0.5 * ((x["x"] - y["y"]) ** 2).sum()


def arrivals(clients: int, counts: Sequence[int]) -> list[tuple[float, float]]:
    """Run until so many replies have arrived.

    Args:
        clients: the number of clients, all of them in flight.
        counts: numbers of replies, in ascending order.

    Returns:
        For each count, the CPU seconds and the peak megabytes of this process until then.
    """
    torch.set_num_threads(1)
    problem = fb.Problem(loss, loss, x={"x": torch.zeros(3)}, y={"y": torch.zeros(3)})
    environment = fb.Environment(
        participation=ARRIVALS_PER_ITERATION,
        delay=LogNormal(),
        stragglers=Stragglers(clients // 10),
    )
    fed = fb.simulated_federation(problem, SmallClients(clients), environment)
    run = Run(AsynchronousSimFBO(), fed, {"rounds": 0}, every={"rounds": counts[-1]})
    measured = []
    started = time.process_time()
    for count in counts:
        run.limits = {"rounds": count // ARRIVALS_PER_ITERATION}
        for _ in run:
            pass
        measured.append((time.process_time() - started, peak_megabytes()))
    return measured


def rows() -> list[Row]:
    """Compare many clients with few, and late arrivals with early ones.

    As many arrivals as there are clients are left out: until then everyone's first task is
    computed.
    """
    processes = multiprocessing.get_context("spawn")
    rates = {}
    for clients in (FEW_CLIENTS, MANY_CLIENTS):
        with processes.Pool(1) as pool:
            early, late = pool.apply(arrivals, (clients, (clients, 2 * clients)))
        rates[clients] = clients / (late[0] - early[0])
    early_peak = early[1]
    late_peak = late[1]
    return [
        Row(
            f"an arrival with {MANY_CLIENTS:,} clients in flight / with {FEW_CLIENTS:,}, "
            f"{ARRIVALS_PER_ITERATION:,} arrivals per iteration",
            rates[FEW_CLIENTS] / rates[MANY_CLIENTS],
            "at most 3",
            ", ".join(f"{n:,} clients {rate:,.0f} arrivals/s" for n, rate in rates.items()),
        ),
        Row(
            f"peak memory at {2 * MANY_CLIENTS:,} arrivals / at {MANY_CLIENTS:,}, "
            f"{MANY_CLIENTS:,} clients in flight",
            late_peak / early_peak,
            "at most 1.1",
            f"{early_peak:.0f} MB, {late_peak:.0f} MB",
        ),
    ]
