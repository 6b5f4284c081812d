"""Personal heads on label shards of MNIST: `python docs/results/personal-heads.py FOLDER`.

With names of methods after the folder, only those are measured.

Every method is tuned in the same way: one step size for everything that clients and server step
along, from the same grid, chosen on seed 0 by the accuracy of the worst tenth of the clients on
their held-out samples; then three seeds. All methods have the same split, network, start, cohorts,
batches and local steps, and 150 rounds. Methods with several rounds in an iteration are measured
after 150 rounds and after 150 iterations, by which the step size is chosen. Results are appended to
personal-heads.csv, so that the script can be interrupted.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import fedbilevel as fb
from fedbilevel import algorithms

ROUNDS = 150
GRID = (0.03, 0.1, 0.3)
SEEDS = (0, 1, 2)
ENVIRONMENT = fb.Environment(participation=10, local_steps=5, batch_size=64)
SUFFIXES = {"mean": "", "median": "_median", "p10": "_p10", "worst": "_worst"}
COLUMNS = ["method", "owner", "lr", "seed", "rounds", *SUFFIXES, "bytes_up"]


class Method(NamedTuple):
    """A method, as a function of its step size.

    Attributes:
        owner: Who has the heads.
        build: From the step size to the method.
        rounds: The rounds of an iteration.
    """

    owner: str
    build: Callable[[float], Any]
    rounds: float = 1


def local_steps(lr: float) -> dict[str, float]:
    """The step sizes of x, y and z."""
    return {"lr_x": lr, "lr_y": lr, "lr_z": lr}


def server_steps(lr: float) -> dict[str, float]:
    """Those of the server, which moves by the mean of the local displacements."""
    return {f"server_{name}": value for name, value in local_steps(lr).items()}


def bounds(lr: float) -> dict[str, tuple[float, float]]:
    """The bounds of ASFBO's adaptive steps, as far from the step as those of the paper."""
    return {f"server_lr_{name}_bounds": (lr / 3, 3 * lr) for name in "xyz"}


def nested(lr: float) -> dict[str, Any]:
    """The step sizes of methods with inner loops, whose lower rounds take the same local steps.

    The factors of a Neumann sum grow where its step is above 2 / ||H_i||, while steps on y recover.
    So it has a step of its own. With the 0.01 that FedNest and AggITD are published with, FedNest
    diverged at two of the three step sizes: the features grew until ||H_i|| was above 200.
    """
    return {"lr_x": lr, "lr_y": lr, "neumann_lr": 0.001, "lower_steps": None}


SHARED = "simfbo, shared head"
METHODS: dict[str, Method] = {
    SHARED: Method("server", lambda lr: algorithms.SimFBO(**local_steps(lr), **server_steps(lr))),
    "fedavg": Method("server", lambda lr: algorithms.FedAvg(lr_x=lr, lr_y=lr)),
    "simfbo": Method("client", lambda lr: algorithms.SimFBO(**local_steps(lr), **server_steps(lr))),
    "shrofbo": Method(
        "client", lambda lr: algorithms.ShroFBO(**local_steps(lr), **server_steps(lr))
    ),
    "asfbo": Method(
        "client",
        lambda lr: algorithms.ASFBO(**local_steps(lr), **server_steps(lr), **bounds(lr)),
    ),
    "unifbo": Method("client", lambda lr: algorithms.UniFBO(**local_steps(lr))),
    "afbo": Method("client", lambda lr: algorithms.AFBO(**local_steps(lr), **server_steps(lr))),
    "fedbio": Method("client", lambda lr: algorithms.FedBiO(**local_steps(lr))),
    "rabo": Method("client", lambda lr: algorithms.RABO(**nested(lr)), rounds=2),
    "fednest": Method("client", lambda lr: algorithms.FedNest(**nested(lr)), rounds=3),
    "aggitd": Method("client", lambda lr: algorithms.AggITD(**nested(lr)), rounds=4.5),
    "fedper": Method("client", lambda lr: algorithms.FedPer(lr_x=lr, lr_y=lr)),
    "fedrep": Method(
        "client", lambda lr: algorithms.FedRep(lr_x=lr, lr_y=lr, head_steps=4, body_steps=1)
    ),
    "ditto": Method("server", lambda lr: algorithms.Ditto(lr_x=lr, lr_y=lr)),
}


def measure(name: str, lr: float, seed: int) -> list[dict[str, Any]]:
    """One run: the accuracies of its clients after 150 rounds and at the end."""
    method = METHODS[name]
    task = fb.tasks.load(
        "hyper-representation",
        data="mnist",
        partition="shards",
        clients=100,
        owner=method.owner,
        held_out=0.2,
        seed=seed,
    )
    result = fb.solve(
        task.problem,
        task.clients,
        method.build(lr),
        rounds=int(ROUNDS * method.rounds),
        environment=ENVIRONMENT,
        seed=seed,
        every=ROUNDS,
        evaluate_client=task.evaluate_client,
    )
    common = {"method": name, "owner": method.owner, "lr": lr, "seed": seed}
    if result.status != "completed":
        lost = dict.fromkeys(SUFFIXES, 0.0)
        return [{**common, "rounds": int(ROUNDS * method.rounds), **lost, "bytes_up": ""}]
    first = next(row for row in result.history if row["round"] >= ROUNDS)
    rows = []
    for metrics in (first, result.history[-1]):
        row = {**common, "rounds": metrics["round"], "bytes_up": metrics["bytes_up"]}
        for column, suffix in SUFFIXES.items():
            row[column] = round(metrics[f"test_accuracy{suffix}"], 4)
        if row not in rows:
            rows.append(row)
    return rows


Runs = dict[tuple[str, float, int], list[dict[str, Any]]]
"""The rows of each run, by method, step size and seed."""


def read(file: Path) -> Runs:
    """Read what has been measured."""
    runs: Runs = {}
    if file.exists():
        with file.open() as lines:
            for row in csv.DictReader(lines):
                key = (row["method"], float(row["lr"]), int(row["seed"]))
                runs.setdefault(key, []).append(row)
    return runs


def best_step(runs: Runs, name: str) -> float:
    """The step size with the best worst tenth at the end of seed 0."""
    return max(GRID, key=lambda lr: float(runs[name, lr, 0][-1]["p10"]))


def complete(runs: Runs, name: str, lr: float, seed: int, file: Path) -> None:
    """Measure a run, unless that has been done, and append it to the file."""
    if (name, lr, seed) in runs:
        return
    runs[name, lr, seed] = measure(name, lr, seed)
    is_new = not file.exists()
    with file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerows(runs[name, lr, seed])


def gains(runs: Runs, name: str, position: int = -1) -> list[float]:
    """What the worst tenth gains over the shared head with each seed, in points.

    Args:
        runs: The runs.
        name: The method.
        position: Which of its evaluations; the last by default.
    """
    found = []
    for seed in SEEDS:
        shared = runs[SHARED, best_step(runs, SHARED), seed][-1]
        row = runs[name, best_step(runs, name), seed][position]
        found.append(100 * (float(row["p10"]) - float(shared["p10"])))
    return found


def table(runs: Runs) -> str:
    """The table of docs/personal.md: means over the seeds, and gains over the shared head."""
    lines = []
    for name, method in METHODS.items():
        ends = [runs[name, best_step(runs, name), seed] for seed in SEEDS]
        for position in (0, -1) if method.rounds > 1 else (-1,):
            rows = [of_run[position] for of_run in ends]
            means = [fmean(float(row[column]) for row in rows) for column in SUFFIXES]
            gained = gains(runs, name, position)
            rounds = round(fmean(int(row["rounds"]) for row in rows))
            cells = [name, f"{best_step(runs, name)}", f"{rounds}"]
            cells += [f"{100 * mean:.1f}%" for mean in means]
            cells += [f"{fmean(gained):+.1f}", f"{min(gained):+.1f} to {max(gained):+.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(folder: Path, names: list[str]) -> None:
    """Measure what the file does not have yet, and print the table."""
    torch.set_num_threads(1)
    file = folder / "personal-heads.csv"
    runs = read(file)
    for name in names or METHODS:
        for lr in GRID:
            complete(runs, name, lr, 0, file)
        for seed in SEEDS:
            complete(runs, name, best_step(runs, name), seed, file)
    if not names:
        print(table(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
