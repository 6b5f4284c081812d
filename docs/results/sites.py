"""Ten seeds of the task `sites`: who is bad, and what learnt weights win back.

    python docs/results/sites.py     # writes sites.csv beside this file, prints a summary

Two of six sites have 40% of their training labels flipped. `value` is `fb.value`; leave-one-out
solves the lower level again without each site. All losses are log losses on test people.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

import fedbilevel as fb

SEEDS = range(10)
TRUSTED = (0.15, 0.02)  # of the people: about 3,000 and 400 records
STEPS = {"lr_y": 2.0, "lr_z": 2.0, "server_lr_y": 2.0, "server_lr_z": 2.0}
METHOD = fb.algorithms.SimFBO(lr_x=0.3, server_lr_x=0.3, **STEPS)
ROUNDS = 200
ALL, ALONE, CLEAN = "FedAvg, all sites", "trusted people alone", "FedAvg, clean"


def row(seed: int, trusted: float) -> dict[str, Any]:
    """What one seed shows."""
    task = fb.tasks.load("sites", bad=2, noise=0.4, trusted=trusted, seed=seed)
    value = fb.value(
        task.problem, task.clients, weights="samples", groups="person", leave_one_out=True
    )
    sizes = [client.size("train") for client in task.clients]

    def test_loss(problem: fb.Problem, clients: Any, x: Any, weights: Any) -> float:
        y = fb.solve_lower(problem, clients, x, weights=weights)
        return float(task.evaluate(problem.start[0], y)["test_loss"])

    def without(site: int) -> list[float]:
        return [0.0 if other == site else size for other, size in enumerate(sizes)]

    x = task.problem.x
    everyone = test_loss(task.problem, task.clients, x, sizes)
    on_test = [
        test_loss(task.problem, task.clients, x, without(site)) - everyone for site in range(6)
    ]
    result = fb.solve(
        task.problem,
        task.clients,
        METHOD,
        rounds=ROUNDS,
        every=ROUNDS,
        weights="samples",
        evaluate=task.evaluate,
    )
    learnt = result.history[-1]["test_loss"]
    losses = {
        name: test_loss(task.plain, clients, task.plain.x, "samples")
        for name, clients in task.baselines.items()
    }
    lowest = sorted(range(6), key=value.values.__getitem__)[:2]
    return {
        "trusted": trusted,
        "seed": seed,
        "trusted_rows": sum(client.size("val") for client in task.clients),
        "bad": " ".join(str(site + 1) for site in task.bad),
        "bad_lowest": sorted(lowest) == list(task.bad),
        "bad_flagged": len(set(value.harmful) & set(task.bad)),
        "good_flagged": len(set(value.harmful) - set(task.bad)),
        "rank_correlation_trusted": round(
            float(spearmanr(value.values, value.leave_one_out)[0]), 3
        ),
        "rank_correlation_test": round(float(spearmanr(value.values, on_test)[0]), 3),
        "fedavg": round(losses[ALL], 5),
        "trusted_alone": round(losses[ALONE], 5),
        "learnt": round(learnt, 5),
        "clean": round(losses[CLEAN], 5),
        "gap_closed": round((losses[ALL] - learnt) / (losses[ALL] - losses[CLEAN]), 3),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """The counts over seeds."""
    wins = sum(r["learnt"] < min(r["fedavg"], r["trusted_alone"]) for r in rows)
    lines = [
        f"{rows[0]['trusted']:.0%} of the people trusted, about {rows[0]['trusted_rows']} records",
        f"  both bad sites lowest in {sum(r['bad_lowest'] for r in rows)} of {len(rows)} seeds",
        f"  a good site flagged in {sum(r['good_flagged'] > 0 for r in rows)}",
        f"  bad sites flagged: {sum(r['bad_flagged'] for r in rows)} of {2 * len(rows)}",
        f"  learnt weights better than both baselines in {wins}",
    ]
    for key in ("rank_correlation_trusted", "rank_correlation_test", "gap_closed"):
        lines.append(f"  median {key}: {statistics.median(r[key] for r in rows):.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run all seeds."""
    rows = []
    for trusted in TRUSTED:
        for seed in SEEDS:
            rows.append(row(seed, trusted))
            print(rows[-1], file=sys.stderr, flush=True)
        print(summary([r for r in rows if r["trusted"] == trusted]))
    with Path(__file__).with_name("sites.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
