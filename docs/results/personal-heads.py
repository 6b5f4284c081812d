"""Personal heads on label shards of MNIST: `python docs/results/personal-heads.py FOLDER`.

Every method is tuned in the same way: one step size for everything that clients and server step
along, from the same grid, chosen on seed 0 by the accuracy of the worst tenth of the clients on
their held-out samples; then three seeds. All methods have the same split, network, start, cohorts,
batches and numbers of rounds and local steps. Results are appended to personal-heads.csv, so that
the script can be interrupted.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch

import fedbilevel as fb

ROUNDS = 150
GRID = (0.03, 0.1, 0.3)
SEEDS = (0, 1, 2)
ENVIRONMENT = fb.Environment(participation=10, local_steps=5, batch_size=64)
COLUMNS = ["method", "owner", "lr", "seed", "mean", "median", "p10", "worst", "bytes_up"]


def single_loop(method: type[Any], lr: float) -> Any:
    """A single-loop method: the server moves by the mean of the local displacements."""
    local = {"lr_x": lr, "lr_y": lr, "lr_z": lr}
    return method(**local, **{f"server_{name}": value for name, value in local.items()})


METHODS: dict[str, tuple[str, Any]] = {
    "simfbo, shared head": ("server", lambda lr: single_loop(fb.algorithms.SimFBO, lr)),
    "fedavg": ("server", lambda lr: fb.algorithms.FedAvg(lr_x=lr, lr_y=lr)),
    "simfbo": ("client", lambda lr: single_loop(fb.algorithms.SimFBO, lr)),
    "afbo": ("client", lambda lr: single_loop(fb.algorithms.AFBO, lr)),
    "fedbio": ("client", lambda lr: fb.algorithms.FedBiO(lr_x=lr, lr_y=lr, lr_z=lr)),
    "fedper": ("client", lambda lr: fb.algorithms.FedPer(lr_x=lr, lr_y=lr)),
    "fedrep": (
        "client",
        lambda lr: fb.algorithms.FedRep(lr_x=lr, lr_y=lr, head_steps=4, body_steps=1),
    ),
    "ditto": ("server", lambda lr: fb.algorithms.Ditto(lr_x=lr, lr_y=lr)),
}


def measure(name: str, lr: float, seed: int) -> dict[str, Any]:
    """One run, and how the accuracies of its clients are distributed at the end."""
    owner, build = METHODS[name]
    task = fb.tasks.load(
        "hyper-representation",
        data="mnist",
        partition="shards",
        clients=100,
        owner=owner,
        held_out=0.2,
        seed=seed,
    )
    result = fb.solve(
        task.problem,
        task.clients,
        build(lr),
        rounds=ROUNDS,
        environment=ENVIRONMENT,
        seed=seed,
        every=ROUNDS,
        evaluate_client=task.evaluate_client,
    )
    last = result.history[-1]
    row = {"method": name, "owner": owner, "lr": lr, "seed": seed, "bytes_up": last["bytes_up"]}
    if result.status != "completed":
        return {**row, "mean": 0.0, "median": 0.0, "p10": 0.0, "worst": 0.0}
    for column, suffix in (("mean", ""), ("median", "_median"), ("p10", "_p10")):
        row[column] = round(last[f"test_accuracy{suffix}"], 4)
    return {**row, "worst": round(last["test_accuracy_worst"], 4)}


def main(folder: Path) -> None:
    """Measure what the file does not have yet."""
    torch.set_num_threads(1)
    file = folder / "personal-heads.csv"
    rows: dict[tuple[str, float, int], dict[str, Any]] = {}
    if file.exists():
        with file.open() as lines:
            for row in csv.DictReader(lines):
                rows[row["method"], float(row["lr"]), int(row["seed"])] = row

    def row_of(name: str, lr: float, seed: int) -> dict[str, Any]:
        if (name, lr, seed) not in rows:
            row = measure(name, lr, seed)
            rows[name, lr, seed] = row
            is_new = not file.exists()
            with file.open("a", newline="") as lines:
                writer = csv.DictWriter(lines, COLUMNS)
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
        return rows[name, lr, seed]

    for name in METHODS:
        best = max(GRID, key=lambda lr: float(row_of(name, lr, 0)["p10"]))
        for seed in SEEDS:
            print(row_of(name, best, seed), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
