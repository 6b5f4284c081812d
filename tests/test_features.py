"""Where x stays, samples are embedded once: the same numbers, the same counts, less arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation import ClientError
from fedbilevel.runs.run import Run

EPOCHS: dict[str, Any] = {"lower_steps": "2 epochs", "inner_rounds": 2}


def both(dropout: float) -> tuple[fb.Problem, fb.Problem, Any]:
    """A task in float64, and the same with the whole network in its losses."""
    task = fb.tasks.load(
        "hyper-representation", data="digits", clients=6, hidden=12, dropout=dropout, samples=240
    )
    calls: list[int] = []

    def embed(x: fb.Tree, data: tuple[Tensor, Tensor]) -> Any:
        calls.append(len(data[0]))
        return task.problem.embed(x, (data[0].double(), data[1]), ())  # type: ignore[misc]

    def whole(loss: Any) -> Any:
        return lambda x, y, data, rng: loss(x, y, embed(x, data), rng)

    start = {
        name: {key: t.double() for key, t in getattr(task.problem, name).items()}
        for name in ("x", "y")
    }
    problem = dataclasses.replace(task.problem, **start, embed=embed)
    plain = dataclasses.replace(
        problem, embed=None, upper=whole(problem.upper), lower=whole(problem.lower)
    )
    return problem, plain, (task.clients, calls)


@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fednest", {"compat": "reference", **EPOCHS}),
        ("fednest", EPOCHS),
        ("aggitd", EPOCHS),
        ("simfbo", {}),
    ],
    ids=["reference", "fednest", "aggitd", "simfbo"],
)
def test_embedding_changes_costs_not_numbers(
    name: str, settings: Any, dropout: float, mode: Any
) -> None:
    problem, plain, (clients, calls) = both(dropout)
    environment = fb.Environment(participation=3, batch_size=12, local_steps=2)
    runs, samples = [], []
    for each in (problem, plain):
        method = fb.algorithms.get(name)(**settings)
        run = Run(method, fb.simulated_federation(each, clients, environment, mode=mode), {})
        calls.clear()
        for _ in range(2):
            run.advance()
        runs.append(run)
        samples.append(sum(calls))
    for ours, theirs in zip(*(r.state for r in runs), strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-13)
    here, there = (r.fed.ledger.totals() for r in runs)
    assert [here[unit] for unit in ("rounds", "samples", "gradients")] == [
        there[unit] for unit in ("rounds", "samples", "gradients")
    ]
    if name != "simfbo":
        assert here["flops"] < there["flops"]
        assert (
            samples[0] < samples[1] or mode == "stack"
        )  # whose calls are for many clients at once


def test_features_are_kept_for_the_next_task_at_the_same_x_and_no_longer() -> None:
    problem, _, (clients, calls) = both(0.0)
    fed = fb.simulated_federation(problem, clients)
    x, y = problem.start
    calls.clear()

    def ask(x: fb.Tree, cohort: list[int]) -> tuple[int, Tensor]:
        before = len(calls)
        q = fed.ask(LowerGradient(full=True), cohort, x=x, y=y).mean("q")["head.weight"]
        return len(calls) - before, q

    other = x * 0.5
    asked = [ask(x, [0, 1]), ask(x, [0, 1]), ask(other, [0, 1]), ask(other, [1, 2]), ask(x, [1, 2])]
    measured = 1  # what a client spends on it is found out once, by running it
    assert [count for count, _ in asked] == [2 + measured, 0, 2, 2, 2]
    assert torch.equal(asked[0][1], asked[1][1])
    assert not torch.allclose(asked[3][1], asked[4][1])
    flops = fed.ledger.phases["gradient"].flops
    ask(x, [1, 2])
    assert fed.ledger.phases["gradient"].flops == flops * 6 // 5, (
        "a client pays for its features in every task"
    )


class Wrong(LowerGradient):
    def step(self, m: Any, oracle: Oracle, batch: Any) -> Any:
        oracle.lower_gradients(m["x"], m["y"], batch)
        return super().step(m, oracle, batch)


def test_derivatives_in_x_of_features_are_refused() -> None:
    problem, _, (clients, _) = both(0.0)

    fed = fb.simulated_federation(problem, clients)
    x, y = problem.start
    with pytest.raises((ClientError, TypeError), match="its fixed_x must be False"):
        fed.ask(Wrong(full=True), [0, 1], x=x, y=y)


def test_both_batches_go_through_the_backbone_together_where_it_pays() -> None:
    problem, plain, (clients, calls) = both(0.0)
    x, y = problem.start
    z = y.map(torch.ones_like)
    for count, passes in ((5, [10]), (60, [30, 10])):  # 10 samples are smaller than x, 40 larger
        sides = [tuple(t[:count] for t in side) for side in (clients[0].train, clients[0].val)]
        batch = fb.Batch(*sides, rng=fb.rng.root(0, "test"))
        calls.clear()
        ours = Oracle(problem).directions(x, y, z, batch)
        assert calls == passes
        theirs = Oracle(plain).directions(x, y, z, batch)
        for a, b in zip(
            torch.utils._pytree.tree_leaves(ours),
            torch.utils._pytree.tree_leaves(theirs),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
