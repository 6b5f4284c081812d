"""Measures what AggITD's estimate contributes to its steps at the settings of Table 2.

It writes the rows of the table "aggitd-indirect" of docs/results/README.md:

    python docs/results/aggitd-indirect.py [--out docs/results/curves/aggitd-indirect.csv]

The run is aggitd on iid MNIST with tau = 1, seed 0. At some of its points (x, y) both terms of the
hypergradient grad_x F - d2xy G p are computed on the data of all clients: with the expectation of
the estimate, p = lambda sum_{k <= N} (I - lambda H)^k grad_y F, and with the solution of
H p = grad_y F by conjugate gradients.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

import fedbilevel as fb
from fedbilevel.core.linear import CG, neumann_sum
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.tree import Tree, dot, norm
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import build_federation, build_run, load_task
from fedbilevel.runs.run import Run

ITERATIONS = (0, 10, 50, 100, 200)
SETTINGS = {"data.partition": "iid", "environment.local_steps": 1, "seed": 0}


def pooled(sides: list[Any]) -> tuple[torch.Tensor, ...]:
    """Return one side of the data of all clients; iid clients have equally many samples."""
    return tuple(torch.cat(columns) for columns in zip(*sides, strict=True))


def measure(task: Any, run: Run) -> dict[str, float]:
    """Return both terms of the hypergradient at the run's point, and its accuracy."""
    x = run.state.x
    y = run.state.y
    oracle = Oracle(task.problem)
    train = pooled([client.train for client in task.clients])
    val = pooled([client.val for client in task.clients])
    batch = oracle.embed(x, fb.Batch(train, val))
    direct, slope = oracle.upper_gradients(x, y, batch)

    def product(v: Tree) -> Tree:
        return oracle.hessian_product(x, y, v, batch)

    method: Any = run.algorithm
    estimate = neumann_sum(product, slope, method.inner_rounds + 1, method.neumann_lr)
    solution = CG(tolerance=1e-5, steps=2000)(product, slope)
    estimated = oracle.cross_product(x, y, estimate, batch)
    true = oracle.cross_product(x, y, solution.value, batch)
    hypergradient = direct - true

    def cosine(step: Tree) -> float:
        return float(dot(step, hypergradient) / (norm(step) * norm(hypergradient)))

    return {
        "test_accuracy": task.evaluate(x, y)["test_accuracy"],
        "estimated_by_direct": float(norm(estimated) / norm(direct)),
        "true_by_direct": float(norm(true) / norm(direct)),
        "estimated_by_true": float(norm(estimated) / norm(true)),
        "cosine_step": cosine(direct - estimated),
        "cosine_direct": cosine(direct),
        "residual": solution.residual,
    }


def main() -> None:
    """Run the method, measure its estimate on the way, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/curves/aggitd-indirect.csv"))
    out = parser.parse_args().out
    config = configs.resolve(
        *configs.read("aggitd-table2"), algorithm="aggitd", overrides=dict(SETTINGS)
    )
    task = load_task(config)
    run = build_run(config, task, build_federation(config, task))
    rows = []
    for iteration in range(max(ITERATIONS) + 1):
        if iteration in ITERATIONS:
            values = measure(task, run)
            row = {"label": f"iteration {iteration}", "seed": 0, "round": run.fed.ledger.rounds}
            row |= {name: f"{value:.6g}" for name, value in values.items()}
            rows.append(row | {"status": run.status})
            print(rows[-1], flush=True)
        run.advance()
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
