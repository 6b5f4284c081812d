"""Runs with plausible curves, made without running anything: in memory, or as folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.recorder import FINAL_COSTS

ALGORITHMS = ("fedbio", "fedbioacc", "fednest", "fedmbo", "simfbo", "shrofbo", "fedmsa", "mdbo")
PEAK_BYTES = 6_000_000
CLIENTS = [
    {
        "clients": 60,
        "bytes_up": 5e7,
        "bytes_down": 2e7,
        "flops": 1.5e11,
        "peak_bytes": 1_500_000.0,
    },
    {
        "clients": 40,
        "bytes_up": 2e8,
        "bytes_down": 1e8,
        "flops": 6e11,
        "peak_bytes": float(PEAK_BYTES),
    },
]


def run_with(
    seed: int,
    rounds: list[float],
    values: list[float | None],
    metric: str = "test_accuracy",
    name: str = "fedbio",
) -> RunFolder:
    """Return an unfinished run that sent one byte up and one down per round."""
    history = []
    for count, value in zip(rounds, values, strict=True):
        history.append({"round": count, "bytes_up": count, "bytes_down": count, metric: value})
    config = {"seed": seed, "algorithm": {"name": name}}
    return RunFolder(Path(f"/runs/{name}/seed-{seed}"), config, history, None)


def write_run(folder: Path, name: str, seed: int, evaluations: int = 60, **config: Any) -> Path:
    """Write a finished run, evaluated every ten rounds.

    Algorithms differ in speed, cost and final accuracy.
    """
    folder.mkdir(parents=True)
    index = ALGORITHMS.index(name)
    resolved = {
        "task": "hyper-representation",
        "seed": seed,
        "rounds": 10 * (evaluations - 1),
        "every": 10,
        "weights": "samples",
        "algorithm": {"name": name, "lr_x": 0.05 * (1 + index % 2), "lr_y": 0.1, "local_steps": 5},
        "environment": {"participation": 0.5, "compression": "none"},
        "data": {"name": "mnist", "partition": "dirichlet", "alpha": 0.3, "clients": 100},
        **config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(resolved))
    history = _history(index, seed, evaluations)
    lines = [json.dumps(evaluation) + "\n" for evaluation in history]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(json.dumps(_summary(name, seed, history)))
    return folder


def _history(index: int, seed: int, evaluations: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, index])
    speed = 4 + 2.2 * index
    top_accuracy = 0.992 - 0.009 * index
    bytes_per_round = 400_000 * (1 + index % 3)
    wall_s = 0.0
    history = []
    for k in range(evaluations):
        rounds = 10 * k
        exponent = speed * k / evaluations
        progress = 1 - np.exp(-exponent)
        noise = rng.normal(0, 0.012 * (1.05 - progress))
        accuracy = float(np.clip(0.1 + (top_accuracy - 0.1) * progress + noise, 0, 1))
        wall_s += 0.4 * rng.uniform(0.8, 1.3)
        peak_bytes = 0
        if rounds:
            peak_bytes = PEAK_BYTES
        norm = 3 * np.exp(-0.7 * exponent + rng.normal(0, 0.1)) + 2e-3
        evaluation = {
            "round": rounds,
            "iteration": 5 * rounds,
            "bytes_up": rounds * bytes_per_round,
            "bytes_down": rounds * bytes_per_round // 2,
            "samples": rounds * 3200,
            "gradients": rounds * 50,
            "flops": rounds * 4 * 10**9,
            "peak_bytes": peak_bytes,
            "virtual_s": 0.0,
            "wall_s": wall_s,
            "upper_loss": float(2.3 * np.exp(-0.8 * exponent) + 0.09 + abs(noise)),
            "lower_loss": float(1.9 * np.exp(-exponent) + 0.05),
            "train_accuracy": min(1.0, accuracy + 0.01),
            "test_accuracy": accuracy,
            "hypergradient_norm": float(norm),
        }
        history.append(evaluation)
    return history


def _summary(name: str, seed: int, history: list[dict[str, Any]]) -> dict[str, Any]:
    last = history[-1]
    half = {key: last[key] // 2 for key in FINAL_COSTS[:5]}
    phase = {"rounds": last["round"], **half, "peak_bytes": PEAK_BYTES}
    accuracies = [evaluation["test_accuracy"] for evaluation in history]
    return {
        "algorithm": name,
        "task": "hyper-representation",
        "data": "mnist",
        "seed": seed,
        "status": "completed",
        "reason": "",
        "rounds": last["round"],
        "final_test_accuracy": accuracies[-1],
        "best_test_accuracy": max(accuracies),
        "rounds_to": {},
        **{key: last[key] for key in FINAL_COSTS},
        "refused_replies": 0,
        "clients": CLIENTS,
        "ledger": {"lower": phase, "hypergradient": phase},
    }


def write_comparison(
    folder: Path, algorithms: int = 8, seeds: int = 5, evaluations: int = 60
) -> Path:
    """Write runs into a folder as `compare` leaves it."""
    for algorithm in ALGORITHMS[:algorithms]:
        for seed in range(seeds):
            write_run(folder / algorithm / f"seed-{seed}", algorithm, seed, evaluations)
    return folder
