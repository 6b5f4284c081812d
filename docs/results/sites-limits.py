"""How much of the gap weights of sites can close from 400 trusted samples, and what limits them.

The model is a logistic regression: Newton's method solves the lower level, and projected gradients
find the best weights, to rounding. SimFBO's error is thereby told from that of 400 records.

    python docs/results/sites-limits.py     # writes sites-limits.csv beside this file

Of each seed, the part of the gap between FedAvg and clean labels that weights close on people of
the test, after the refit to the trusted samples. "best on test people" looks at those: a bound, not
a method.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import fedbilevel as fb
from fedbilevel.tasks.sites import SHRINKAGE, START_RIDGE

SEEDS = range(40)
TRUSTED = 0.02
SITES = 6

Array = NDArray[np.float64]


class Rows(NamedTuple):
    """Records, the last feature of which is 1, and the site of each; trusted ones have number 6."""

    features: Array
    label: Array
    site: NDArray[np.int64]


def rows_of(parts: list[Any], sites: list[int]) -> Rows:
    """Join sides of clients."""
    features = np.concatenate([part["features"].numpy() for part in parts])
    label = np.concatenate([part["label"].numpy() for part in parts])
    site = np.repeat(sites, [len(part["label"]) for part in parts])
    return Rows(np.column_stack([features, np.ones(len(label))]), label, site)


def log_loss(y: Array, rows: Rows) -> float:
    """The mean log loss."""
    logits = rows.features @ y
    return float((np.logaddexp(0, logits) - rows.label * logits).mean())


def fit(rows: Rows, weights: Array, y: Array) -> tuple[Array, Array, Array]:
    """y* by Newton's method, the Hessian there, and the residuals."""
    shares = weights / weights.sum()
    for _ in range(50):
        probability = 1 / (1 + np.exp(-rows.features @ y))
        residual = probability - rows.label
        slope = rows.features.T @ (shares * residual) + START_RIDGE * y
        curvature = (shares * probability * (1 - probability))[:, None]
        hessian = rows.features.T @ (curvature * rows.features) + START_RIDGE * np.eye(len(y))
        if np.abs(slope).max() < 1e-10:
            break
        y = y - np.linalg.solve(hessian, slope)
    return y, hessian, residual


def record_weights(w: Array, rows: Rows) -> Array:
    """The weight of each record: 6 w_i, and 1 for a trusted one."""
    return np.append(SITES * w, 1.0)[rows.site]


def hypergradient(w: Array, fitted: Rows, judges: Rows, shrinkage: float) -> tuple[float, Array]:
    """The upper loss of weights of sites, and its gradient."""
    weights = record_weights(w, fitted)
    y, hessian, residual = fit(fitted, weights, np.zeros(fitted.features.shape[1]))
    judged = 1 / (1 + np.exp(-judges.features @ y)) - judges.label
    z = np.linalg.solve(hessian, judges.features.T @ judged / len(judged))
    along = residual * (fitted.features @ z)
    mean = weights @ along / weights.sum()
    per_site = np.bincount(fitted.site, along - mean, SITES + 1)[:SITES] * SITES / weights.sum()
    away = w - 1 / SITES
    loss = log_loss(y, judges) + 0.5 * shrinkage * SITES * away @ away
    return loss, shrinkage * SITES * away - per_site


def project(w: Array) -> Array:
    """The closest point of the simplex."""
    ordered = np.sort(w)[::-1]
    thetas = (np.cumsum(ordered) - 1) / np.arange(1, SITES + 1)
    return np.maximum(w - thetas.max(), 0)


def best_weights(fitted: Rows, judges: Rows, shrinkage: float) -> Array:
    """Projected gradient descent from equal weights; a step that does not descend is halved."""
    w = np.full(SITES, 1 / SITES)
    loss, slope = hypergradient(w, fitted, judges, shrinkage)
    step = 10.0
    for _ in range(300):
        trial = project(w - step * slope)
        new_loss, new_slope = hypergradient(trial, fitted, judges, shrinkage)
        moved = trial - w
        if new_loss > loss + 0.5 * slope @ moved:
            step /= 2
            continue
        w, loss, slope = trial, new_loss, new_slope
        step *= 1.5
        if np.abs(moved).max() < 1e-5:
            break
    return w


def row(seed: int) -> dict[str, Any]:
    """What one seed shows."""
    task = fb.tasks.load("sites", bad=2, noise=0.4, trusted=TRUSTED, seed=seed)
    sites = list(range(SITES))
    train = rows_of([client.train for client in task.clients], sites)
    trusted = rows_of([client.val for client in task.clients], [SITES] * SITES)
    clean = rows_of([c.train for c in task.baselines["FedAvg, clean"]], sites)
    test = rows_of([task.test], [SITES])
    both = Rows(*(np.concatenate(pair) for pair in zip(train, trusted, strict=True)))
    start = np.zeros(train.features.shape[1])

    def refitted(w: Array) -> float:
        return log_loss(fit(both, record_weights(w, both), start)[0], test)

    equal = refitted(np.full(SITES, 1 / SITES))
    gap = equal - log_loss(fit(clean, np.ones(len(clean.label)), start)[0], test)
    good = np.isin(sites, task.bad, invert=True).astype(float)
    fours = [np.isin(sites, four) / 4 for four in itertools.combinations(sites, 4)]
    judged = [
        log_loss(fit(train, record_weights(four, train), start)[0], trusted) for four in fours
    ]
    shrinkage = SHRINKAGE / math.sqrt(len(trusted.label))
    weights = {
        "optimum": best_weights(train, trusted, shrinkage),
        "optimum, no shrinkage": best_weights(train, trusted, 0.0),
        "best four sites": fours[int(np.argmin(judged))],
        "bad sites left out": good / good.sum(),
        "best on test people": best_weights(both, test, 0.0),
    }
    closed = {name: round((equal - refitted(w)) / gap, 3) for name, w in weights.items()}
    return {"seed": seed, "gap": round(gap, 5), **closed}


def main() -> None:
    """Run all seeds."""
    rows = []
    for seed in SEEDS:
        rows.append(row(seed))
        print(rows[-1], file=sys.stderr, flush=True)
    for name in list(rows[0])[2:]:
        ten = statistics.median(r[name] for r in rows[:10])
        others = statistics.median(r[name] for r in rows[10:])
        print(f"{name:24} ten seeds {ten:.2f}, thirty others {others:.2f}")
    high = sum(r["optimum"] >= 0.85 for r in rows)
    ways = sum(math.comb(high, k) * math.comb(len(rows) - high, 5 - k) for k in (3, 4, 5))
    share = ways / math.comb(len(rows), 5)
    print(f"of all sets of five seeds, the median of the optimum is 0.85 or more in {share:.1%}")
    with Path(__file__).with_name("sites-limits.csv").open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
