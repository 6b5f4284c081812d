"""What a round costs as things grow.

It should cost what its cohort costs, whatever the number of clients; and it should be linear in the
cohort, the local steps and the parameters.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

import fedbilevel as fb
from benchmarks.fused import network_problem
from benchmarks.measure import Row, describe, peak_megabytes, seconds
from fedbilevel.algorithms.simfbo import Descend, SimFBO
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import zeros_like
from fedbilevel.execution.client_memory import OWN, Memory
from fedbilevel.federation.ledger import MessagesSent
from fedbilevel.federation.phase import Message
from fedbilevel.runs.run import Run

FEW_CLIENTS = 1_000
MANY_CLIENTS = 1_000_000
COHORT = 100


class LazyClients(Sequence[fb.ClientData]):
    """Clients whose data are created whenever they are read."""

    def __init__(self, count: int, samples: int, features: int) -> None:
        self.count = count
        self.samples = samples
        self.features = features

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, client: Any) -> Any:
        key = fold_in(root(0, "lazy"), client)
        inputs = normal(key, (self.samples, self.features))
        side = (inputs, torch.arange(self.samples) % 10)
        return fb.ClientData(train=side, val=side)


class RememberingDescend(Descend):
    """SimFBO's phase with a client memory of the size of x, to which each task adds."""

    remembers = True

    def start(self, m: Message) -> Any:
        return super().start(m), m.memory.get("sum", m.x)

    def step(self, c: Any, *rest: Any) -> Any:
        return super().step(c[0], *rest), c[1]

    def finish(self, c: Any) -> dict[str, Any]:
        reply = super().finish(c[0])
        return {**reply, "memory": {"sum": c[1] + reply["qx"]}}


class RememberingSimFBO(SimFBO):
    """SimFBO whose clients remember."""

    local_phase: ClassVar[type[Descend]] = RememberingDescend


def small_run(clients: int, method: type[SimFBO] = SimFBO, own_heads: bool = False) -> Run:
    """A small network: any cost that grows with the number of clients would show."""
    environment = fb.Environment(participation=COHORT, batch_size=16)
    problem = network_problem(fb.nets.mlp(64, 32, 10))
    if own_heads:
        problem = replace(problem, owner=dict.fromkeys(problem.y, "client"))
    data = LazyClients(clients, samples=32, features=64)
    return Run(method(), fb.simulated_federation(problem, data, environment), {})


def experienced_run(clients: int) -> Run:
    """A run in which every client has taken part before."""
    run = small_run(clients)
    run.fed.ledger.book(MessagesSent("descend", range(clients), [0] * clients))
    return run


def remembering_run(clients: int, folder: Path) -> Run:
    """A run in which every client remembers something, of which 4 MB are cached."""
    run = small_run(clients, RememberingSimFBO)
    x, _ = run.fed.problem.start
    fill_memories(run, folder, {"sum": x})
    return run


def owning_run(clients: int, folder: Path) -> Run:
    """A run in which every client owns a head, of which 4 MB are cached."""
    run = small_run(clients, own_heads=True)
    head = run.fed.problem.client_part(run.fed.problem.y)
    fill_memories(run, folder, {OWN: {"y": head, "z": zeros_like(head)}})
    return run


def fill_memories(run: Run, folder: Path, memory: Memory) -> None:
    """Let every client remember the same."""
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    run.fed.transport.store_in(run_folder)
    memories = run.fed.transport.executor.memories  # type: ignore[attr-defined]
    memories.cache_bytes = 2**22
    for client in range(len(run.fed)):
        memories[client] = memory


def iteration(run: Run, checkpoint_every: int = 10) -> Callable[[], None]:
    """One iteration as a run does it: with a mark before, and a checkpoint from time to time."""

    def advance() -> None:
        run.fed.mark()
        run.advance()
        if run.fed.iteration % checkpoint_every == 0:
            run.fed.snapshot()

    return advance


def against_few(name: str, make_run: Callable[[int], Run], few: int, many: int) -> Row:
    """Compare a round with many clients with a round with few."""
    functions = {
        f"{few:,}": iteration(make_run(few)),
        f"{many:,}": iteration(make_run(many)),
    }
    times = seconds(functions, repeats=25, warm_up=5)
    ratio = times[f"{many:,}"] / times[f"{few:,}"]
    return Row(name, ratio, "at most 1.2", describe(times))


def peak_of_20_rounds(clients: int) -> float:
    """Return the peak megabytes of this process after 20 rounds."""
    advance = iteration(small_run(clients))
    for _ in range(20):
        advance()
    return peak_megabytes()


def memory_against_few() -> Row:
    """Compare the peak memory with many clients with that with few, each in a new process."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        few = pool.apply(peak_of_20_rounds, (FEW_CLIENTS,))
        many = pool.apply(peak_of_20_rounds, (MANY_CLIENTS,))
    return Row(
        f"peak memory with {MANY_CLIENTS:,} registered clients / with {FEW_CLIENTS:,}",
        many / few,
        "at most 1.2",
        f"{FEW_CLIENTS:,} clients {few:.0f} MB, {MANY_CLIENTS:,} clients {many:.0f} MB",
    )


def large_round(cohort: int, local_steps: int, hidden: int) -> Callable[[], None]:
    """A round of an MLP whose arithmetic takes most of it; everyone takes part."""
    batch = 64
    data = LazyClients(cohort, samples=4 * batch, features=784)
    clients = [data[i] for i in range(cohort)]
    environment = fb.Environment(local_steps=local_steps, batch_size=batch)
    problem = network_problem(fb.nets.mlp(784, hidden, 10))
    fed = fb.simulated_federation(problem, clients, environment)
    return Run(SimFBO(), fed, {}).advance


def linear() -> list[Row]:
    """Compare a round with rounds that are twice as large in one respect."""
    single = {"cohort": 10, "local_steps": 5, "hidden": 200}
    words = {
        "cohort": "clients",
        "local_steps": "local steps",
        "hidden": "hidden units, so parameters",
    }
    functions = {"single": large_round(**single)}
    for name, value in single.items():
        functions[name] = large_round(**{**single, name: 2 * value})
    times = seconds(functions, repeats=12, warm_up=12)  # until every step is traced
    rows = []
    for name, value in single.items():
        title = f"a round with {2 * value} {words[name]} / with {value}, over 2"
        ratio = times[name] / times["single"] / 2
        detail = describe({f"{value}": times["single"], f"{2 * value}": times[name]})
        rows.append(Row(title, ratio, "at most 1.1", detail))
    return rows


def rows() -> list[Row]:
    """Compare rounds with many clients, and with larger cohorts, steps and networks."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            against_few(
                f"a round with {MANY_CLIENTS:,} registered clients / with {FEW_CLIENTS:,}, "
                f"cohort {COHORT}",
                small_run,
                FEW_CLIENTS,
                MANY_CLIENTS,
            ),
            memory_against_few(),
            against_few(
                f"a round when {MANY_CLIENTS:,} clients have taken part / "
                f"when {FEW_CLIENTS:,} have",
                experienced_run,
                FEW_CLIENTS,
                MANY_CLIENTS,
            ),
            against_few(
                f"a round when {10 * FEW_CLIENTS:,} clients remember, all but 4 MB in a file / "
                f"when {FEW_CLIENTS:,} do",
                lambda clients: remembering_run(clients, Path(folder)),
                FEW_CLIENTS,
                10 * FEW_CLIENTS,
            ),
            against_few(
                f"a round when {100 * FEW_CLIENTS:,} clients own a head each, all but 4 MB in a "
                f"file / when {FEW_CLIENTS:,} do",
                lambda clients: owning_run(clients, Path(folder)),
                FEW_CLIENTS,
                100 * FEW_CLIENTS,
            ),
            *linear(),
        ]
