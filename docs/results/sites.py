"""Ten seeds of the task `sites`: who is bad, and what learnt weights win back.

Values alone, from 3,000 trusted samples, on thirty seeds more: six sites are few for a correlation.

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

import torch
from scipy.stats import spearmanr

import fedbilevel as fb

SEEDS = range(10)
MORE_SEEDS = range(10, 40)  # for values only
TRUSTED = (0.15, 0.02)  # of the people: about 3,000 and 400 records
STEPS = {"lr_y": 2.0, "lr_z": 2.0, "server_lr_y": 2.0, "server_lr_z": 2.0}
METHOD = fb.algorithms.SimFBO(lr_x=0.3, server_lr_x=0.3, **STEPS)
ROUNDS = 200
ALL, ALONE, CLEAN = "FedAvg, all sites", "trusted samples alone", "FedAvg, clean"


def row(seed: int, trusted: float, learn: bool) -> dict[str, Any]:
    """What one seed shows of values, and, on request, of learnt weights."""
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

    def agreement(values: Any, others: Any) -> float:
        return round(float(spearmanr(values, others)[0]), 3)

    x = task.problem.x
    everyone = test_loss(task.problem, task.clients, x, sizes)
    on_test = [
        test_loss(task.problem, task.clients, x, without(site)) - everyone for site in range(6)
    ]
    lowest = sorted(range(6), key=value.values.__getitem__)[:2]
    found = {
        "trusted": trusted,
        "seed": seed,
        "trusted_rows": sum(client.size("val") for client in task.clients),
        "bad": " ".join(str(site + 1) for site in task.bad),
        "bad_lowest": sorted(lowest) == list(task.bad),
        "bad_flagged": len(set(value.harmful) & set(task.bad)),
        "good_flagged": len(set(value.harmful) - set(task.bad)),
        "rank_correlation_trusted": agreement(value.values, value.leave_one_out),
        "rank_correlation_test": agreement(value.values, on_test),
        "leave_one_out_with_itself": agreement(value.leave_one_out, on_test),
    }
    if learn:
        found.update(learnt_losses(task, value))
    return found


def learnt_losses(task: Any, value: Any) -> dict[str, float]:
    """Losses on test people, of baselines, of learnt weights and of weights that know the truth."""
    result = fb.solve(
        task.problem, task.clients, METHOD, rounds=ROUNDS, every=ROUNDS, weights="samples"
    )

    def loss(y: fb.Tree) -> float:
        return float(task.evaluate(task.problem.start[0], y)["test_loss"])

    losses = {}
    for name, clients in task.baselines.items():
        y = fb.solve_lower(task.plain, clients, task.plain.x, weights="samples")
        losses[name] = loss(y)
    good = [float(site not in task.bad) for site in range(6)]

    def weighted(weights: list[float]) -> float:
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return loss(task.refit(fb.Tree({**task.problem.x, "client_weights": shares})))

    learnt = loss(task.refit(result.x))
    by_chance = weighted(value.chances)
    left_out = weighted(good)
    gap = losses[ALL] - losses[CLEAN]
    return {
        "fedavg": round(losses[ALL], 5),
        "trusted_alone": round(losses[ALONE], 5),
        "learnt": round(learnt, 5),
        "weighted_by_chances": round(by_chance, 5),
        "bad_left_out": round(left_out, 5),
        "clean": round(losses[CLEAN], 5),
        "gap_closed": round((losses[ALL] - learnt) / gap, 3),
        "gap_closed_by_chances": round((losses[ALL] - by_chance) / gap, 3),
        "gap_closed_by_leaving_out": round((losses[ALL] - left_out) / gap, 3),
    }


def medians(rows: list[dict[str, Any]]) -> list[str]:
    """A line per correlation and per part of the gap."""
    keys = [key for key in rows[0] if key.startswith(("rank", "leave", "gap"))]
    return [f"  median {key}: {statistics.median(r[key] for r in rows):.3f}" for key in keys]


def summary(rows: list[dict[str, Any]]) -> str:
    """The counts over seeds."""
    first = rows[0]
    lines = [
        f"{first['trusted']:.0%} of the people trusted, about {first['trusted_rows']} samples",
        f"  both bad sites lowest in {sum(r['bad_lowest'] for r in rows)} of {len(rows)} seeds",
        f"  a good site flagged in {sum(r['good_flagged'] > 0 for r in rows)}",
        f"  bad sites flagged: {sum(r['bad_flagged'] for r in rows)} of {2 * len(rows)}",
    ]
    if "learnt" in first:
        wins = sum(r["learnt"] < min(r["fedavg"], r["trusted_alone"]) for r in rows)
        lines.append(f"  learnt weights better than both baselines in {wins}")
        wins = sum(r["weighted_by_chances"] < min(r["fedavg"], r["trusted_alone"]) for r in rows)
        lines.append(f"  weights by chances better than both baselines in {wins}")
    return "\n".join([*lines, *medians(rows)])


def main() -> None:
    """Run all seeds."""
    rows = []
    batches = [(trusted, SEEDS, True) for trusted in TRUSTED]
    for trusted, seeds, learn in [*batches, (TRUSTED[0], MORE_SEEDS, False)]:
        new = []
        for seed in seeds:
            new.append(row(seed, trusted, learn))
            print(new[-1], file=sys.stderr, flush=True)
        print(summary(new), flush=True)
        rows += new
    with Path(__file__).with_name("sites.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
