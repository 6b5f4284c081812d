"""Weights of samples with their owners, or on the server: `python docs/results/own-weights.py`.

First the AUC of the learnt weights as predictors of wrong labels, over all samples, for both forms
of `hyper-cleaning`, with 18 clients, 40% of the labels wrong, and 3 seeds. Steps are equally
long in both: the server counts a client by 1/18, and AFBO's server moves three times along the same
reply, because 6 of 18 clients reply in an iteration. Then the bytes of a round for 10,000 to
1,000,000 synthetic samples.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.data import DataSet

CLIENTS = 18
SEEDS = (0, 1, 2)
DIGITS: dict[str, Any] = {
    "rounds": 100,
    "batch_size": None,
    "own_lr": 300.0 / CLIENTS,
    "steps": {"lr_y": 0.5, "lr_z": 0.2, "server_lr_y": 0.5, "server_lr_z": 0.2},
}
MNIST: dict[str, Any] = {
    "rounds": 500,
    "batch_size": 64,
    "own_lr": 9000.0 / CLIENTS,
    "steps": {"lr_y": 0.05, "lr_z": 0.02, "server_lr_y": 0.05, "server_lr_z": 0.02},
}


def auc(data: str, owner: str, method: str, settings: dict[str, Any], seed: int) -> float:
    """The AUC of all weights after a run."""
    task = fb.tasks.load(
        "hyper-cleaning", data=data, clients=CLIENTS, noise=0.4, ridge=1e-4, owner=owner, seed=seed
    )
    environment = fb.Environment(batch_size=settings["batch_size"])
    participants = CLIENTS
    if method == "afbo":  # clients answer at any time
        participants = 6
        environment = dataclasses.replace(
            environment, participation=participants, delay=fb.delays.LogNormal()
        )
    lr = settings["own_lr"]
    steps = {**settings["steps"], "lr_x": lr, "server_lr_x": participants * lr}
    result = fb.solve(
        task.problem,
        task.clients,
        fb.algorithms.get(method)(**steps),
        rounds=settings["rounds"],
        environment=environment,
        seed=seed,
        every=settings["rounds"],
    )
    weights = result.x.get("weights")
    if weights is None:
        own = [result.personal(i)[0]["weights"][:size] for i, size in enumerate(task.sizes)]
        weights = torch.cat(own)
    return float(roc_auc_score(task.corrupted, -weights))


def synthetic(samples: int) -> DataSet:
    """Samples of 20 numbers, in two classes."""
    inputs = normal(root(0, "synthetic"), (samples, 20))
    labels = (inputs[:, 0] > 0).long()
    return DataSet("synthetic", (inputs, labels), (inputs[:100], labels[:100]), 2)


def bytes_of_a_round(samples: int, owner: str) -> tuple[int, int]:
    """The bytes that all clients receive and send in a round."""
    task = fb.tasks.load("hyper-cleaning", data=synthetic(samples), clients=CLIENTS, owner=owner)
    environment = fb.Environment(batch_size=64)
    result = fb.solve(
        task.problem, task.clients, "simfbo", rounds=2, environment=environment, every=1
    )
    last, before = result.history[-1], result.history[-2]
    return last["bytes_down"] - before["bytes_down"], last["bytes_up"] - before["bytes_up"]


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    for data, settings in (("digits", DIGITS), ("mnist", MNIST)):
        for method in ("simfbo", "afbo"):
            rows = {
                owner: [auc(data, owner, method, settings, seed) for seed in SEEDS]
                for owner in ("server", "client")
            }
            means = ", ".join(f"{owner} {statistics.fmean(rows[owner]):.4f}" for owner in rows)
            gaps = [abs(a - b) for a, b in zip(*rows.values(), strict=True)]
            print(f"{data}, {method}: AUC {means}; differ by at most {max(gaps):.4f}", flush=True)
    for samples in (10_000, 100_000, 1_000_000):
        for owner in ("server", "client"):
            down, up = bytes_of_a_round(samples, owner)
            print(f"{samples:,} samples, {owner}: {down:,} bytes down, {up:,} up", flush=True)


if __name__ == "__main__":
    main()
