"""Run folders with plausible curves, written without running anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedbilevel.runs.recorder import FINAL_COSTS

ALGORITHMS = ("fedbio", "fedbioacc", "fednest", "fedmbo", "simfbo", "shrofbo", "fedmsa", "mdbo")


def write_run(folder: Path, name: str, seed: int, evaluations: int = 60, **config: Any) -> Path:
    """A finished run, evaluated every ten rounds; algorithms differ in speed, cost and final accuracy."""
    folder.mkdir(parents=True)
    place = ALGORITHMS.index(name)
    rng = np.random.default_rng([seed, place])
    speed, top, round_bytes = 4 + 2.2 * place, 0.992 - 0.009 * place, 400_000 * (1 + place % 3)
    resolved = {
        "task": "hyper-representation",
        "seed": seed,
        "rounds": 10 * (evaluations - 1),
        "every": 10,
        "weights": "samples",
        "algorithm": {"name": name, "lr_x": 0.05 * (1 + place % 2), "lr_y": 0.1, "local_steps": 5},
        "environment": {"participation": 0.5, "compression": "none"},
        "data": {"name": "mnist", "partition": "dirichlet", "alpha": 0.3, "clients": 100},
        **config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(resolved))
    wall, lines = 0.0, []
    for k in range(evaluations):
        progress, t = 1 - np.exp(-speed * k / evaluations), 10 * k
        noise = rng.normal(0, 0.012 * (1.05 - progress))
        accuracy = float(np.clip(0.1 + (top - 0.1) * progress + noise, 0, 1))
        wall += 0.4 * rng.uniform(0.8, 1.3)
        lines.append(
            {
                "round": t,
                "iteration": 5 * t,
                "bytes_up": t * round_bytes,
                "bytes_down": t * round_bytes // 2,
                "samples": t * 3200,
                "gradients": t * 50,
                "flops": t * 4 * 10**9,
                "peak_bytes": 6_000_000 if t else 0,
                "virtual_s": 0.0,
                "wall_s": wall,
                "upper_loss": float(
                    2.3 * np.exp(-0.8 * speed * k / evaluations) + 0.09 + abs(noise)
                ),
                "lower_loss": float(1.9 * np.exp(-speed * k / evaluations) + 0.05),
                "train_accuracy": min(1.0, accuracy + 0.01),
                "test_accuracy": accuracy,
                "hypergradient_norm": float(
                    3 * np.exp(-0.7 * speed * k / evaluations + rng.normal(0, 0.1)) + 2e-3
                ),
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    last, half = (
        lines[-1],
        {key: lines[-1][key] // 2 for key in FINAL_COSTS[:5]} | {"peak_bytes": 6_000_000},
    )
    accuracies = [line["test_accuracy"] for line in lines]
    summary = {
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
        "clients": [
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
                "peak_bytes": 6_000_000.0,
            },
        ],
        "ledger": {
            "lower": {"rounds": last["round"], **half},
            "hypergradient": {"rounds": last["round"], **half},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_comparison(
    folder: Path, algorithms: int = 8, seeds: int = 5, evaluations: int = 60
) -> Path:
    """A folder as `compare` leaves it."""
    for algorithm in ALGORITHMS[:algorithms]:
        for seed in range(seeds):
            write_run(folder / algorithm / f"seed-{seed}", algorithm, seed, evaluations)
    return folder
