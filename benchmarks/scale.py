"""A round costs what its cohort costs: 100 against 100,000 registered clients, data made when looked at."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from typing import Any

import torch

import fedbilevel as fb
from benchmarks.fused import problem
from benchmarks.measure import Row, describe, seconds
from fedbilevel.rng import fold_in, normal, root
from fedbilevel.solve import Run


class LazyClients(Sequence[fb.ClientData]):
    def __init__(self, count: int, samples: int = 64) -> None:
        self.count, self.samples = count, samples

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        key = fold_in(root(0, "lazy"), i)
        side = (normal(key, (self.samples, 784)), torch.arange(self.samples) % 10)
        return fb.ClientData(train=side, val=side)


def run(clients: int) -> Run:
    algorithm = fb.algorithms.get("simfbo")()
    environment = fb.Environment(participation=10, batch_size=32)
    fed = fb.SimulatedFederation(problem(fb.nets.mlp(784, 200, 10)), LazyClients(clients), algorithm, environment)
    return Run(fed, {})


def peak_memory(clients: int) -> float:
    """Megabytes a process needs at most for 20 rounds."""
    here = run(clients)
    for _ in range(20):
        here.advance()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows() -> list[Row]:
    few, many = run(100), run(100_000)
    times = seconds({"100": few.advance, "100,000": many.advance}, repeats=40)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (count,)) for name, count in (("100", 100), ("100,000", 100_000))}
    return [
        Row(
            "a round with 100,000 registered clients / with 100, cohort 10",
            times["100,000"] / times["100"],
            "at most 1.2",
            describe({f"{name} clients": value for name, value in times.items()}),
        ),
        Row(
            "peak memory with 100,000 registered clients / with 100",
            memory["100,000"] / memory["100"],
            "at most 1.2",
            ", ".join(f"{name} clients {value:.0f} MB" for name, value in memory.items()),
        ),
    ]
