"""A round costs what its cohort costs, whatever the number of clients, and its cost is linear in what it is made of."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import fedbilevel as fb
from benchmarks.fused import problem
from benchmarks.measure import Row, describe, peak_megabytes, seconds
from fedbilevel.algorithms.simfbo import Descend, SimFBO
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.federation.ledger import Sent
from fedbilevel.federation.phase import Message
from fedbilevel.runs.run import Run

FEW, MANY, COHORT = 1_000, 1_000_000, 100


class LazyClients(Sequence[fb.ClientData]):
    """Data made when looked at."""

    def __init__(self, count: int, samples: int, features: int) -> None:
        self.count, self.samples, self.features = count, samples, features

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        key = fold_in(root(0, "lazy"), i)
        side = (normal(key, (self.samples, self.features)), torch.arange(self.samples) % 10)
        return fb.ClientData(train=side, val=side)


class Remembering(Descend):
    """SimFBO's phase, with a memory of x's size that it adds to."""

    remembers = True

    def start(self, m: Message) -> Any:
        return super().start(m), m.memory.get("sum", m.x)

    def step(self, c: Any, *rest: Any) -> Any:
        return super().step(c[0], *rest), c[1]

    def finish(self, c: Any) -> dict[str, Any]:
        reply = super().finish(c[0])
        return {**reply, "memory": {"sum": c[1] + reply["qx"]}}


class Remember(SimFBO):
    local_phase: ClassVar[type[Descend]] = Remembering


def small(clients: int, method: type[SimFBO] = SimFBO) -> Run:
    """A small network: what could grow with the number of clients would show."""
    environment = fb.Environment(participation=COHORT, batch_size=16)
    net, data = problem(fb.nets.mlp(64, 32, 10)), LazyClients(clients, samples=32, features=64)
    return Run(method(), fb.simulated_federation(net, data, environment), {})


def iteration(run: Run, every: int = 10) -> Callable[[], None]:
    """As a run does it: with a mark to go back to, and a checkpoint now and then."""

    def one() -> None:
        run.fed.mark()
        run.advance()
        if run.fed.iteration % every == 0:
            run.fed.snapshot()

    return one


def experienced(clients: int) -> Run:
    """All of them have taken part before."""
    run = small(clients)
    run.fed.ledger.book(Sent("descend", range(clients), [0] * clients))
    return run


def remembering(clients: int, folder: str) -> Run:
    """All of them remember something, of which 4 MB are held in memory."""
    run = small(clients, Remember)
    (Path(folder) / str(clients)).mkdir()
    run.fed.transport.keep_in(Path(folder) / str(clients))
    memories = run.fed.transport.executor.memories  # type: ignore[attr-defined]
    memories.most, x = 2**22, run.fed.problem.start[0]
    for client in range(clients):
        memories[client] = {"sum": x}
    return run


def peak_memory(clients: int) -> float:
    """Megabytes a process needs at most for 20 rounds."""
    one = iteration(small(clients))
    for _ in range(20):
        one()
    return peak_megabytes()


def large(cohort: int = 10, tau: int = 5, hidden: int = 200, batch: int = 64) -> Callable[[], None]:
    """An MLP whose arithmetic is most of a round; everyone takes part."""
    data = LazyClients(cohort, samples=4 * batch, features=784)
    clients = [data[i] for i in range(cohort)]
    environment = fb.Environment(local_steps=tau, batch_size=batch)
    fed = fb.simulated_federation(problem(fb.nets.mlp(784, hidden, 10)), clients, environment)
    return Run(SimFBO(), fed, {}).advance


def linear() -> list[Row]:
    once: dict[str, Any] = {"cohort": 10, "tau": 5, "hidden": 200}
    names = {"cohort": "clients", "tau": "local steps", "hidden": "hidden units, so parameters"}
    runs = {"1x": large(**once)} | {
        key: large(**{**once, key: 2 * value}) for key, value in once.items()
    }
    times = seconds(runs, repeats=12, warm_up=12)  # until every step is traced
    return [
        Row(
            f"a round with {2 * once[key]} {name} / with {once[key]}, over 2",
            times[key] / times["1x"] / 2,
            "at most 1.1",
            describe({f"{once[key]}": times["1x"], f"{2 * once[key]}": times[key]}),
        )
        for key, name in names.items()
    ]


def flat(title: str, made: Callable[[int], Run], few: int, many: int) -> Row:
    runs = {f"{few:,}": iteration(made(few)), f"{many:,}": iteration(made(many))}
    few_s, many_s = (times := seconds(runs, repeats=25, warm_up=5)).values()
    return Row(
        title.format(few=f"{few:,}", many=f"{many:,}"),
        many_s / few_s,
        "at most 1.2",
        describe(times),
    )


def rows() -> list[Row]:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {f"{count:,}": pool.apply(peak_memory, (count,)) for count in (FEW, MANY)}
    few, many = memory.values()
    with tempfile.TemporaryDirectory() as folder:
        return [
            flat(
                f"a round with {{many}} registered clients / with {{few}}, cohort {COHORT}",
                small,
                FEW,
                MANY,
            ),
            Row(
                f"peak memory with {MANY:,} registered clients / with {FEW:,}",
                many / few,
                "at most 1.2",
                ", ".join(f"{name} clients {value:.0f} MB" for name, value in memory.items()),
            ),
            flat(
                "a round when {many} clients have taken part / when {few} have",
                experienced,
                FEW,
                MANY,
            ),
            flat(
                "a round when {many} clients remember, all but 4 MB of it in a file / when {few} do",
                lambda count: remembering(count, folder),
                FEW,
                10 * FEW,
            ),
            *linear(),
        ]
