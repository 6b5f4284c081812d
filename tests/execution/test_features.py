"""Embedding samples once before the steps changes costs, and neither numbers nor counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation import ClientError
from fedbilevel.runs.run import Run
from tests.support.embedding import digits

EPOCHS: dict[str, Any] = {"lower_steps": "2 epochs", "inner_rounds": 2}


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
    name: str, settings: dict[str, Any], dropout: float, mode: Any
) -> None:
    problems = digits(dropout)
    environment = fb.Environment(participation=3, batch_size=12, local_steps=2)
    runs = []
    embedded_samples = []
    for problem in (problems.embedding, problems.plain):
        federation = fb.simulated_federation(problem, problems.clients, environment, mode=mode)
        run = Run(fb.algorithms.get(name)(**settings), federation, {})
        problems.calls.clear()
        for _ in range(2):
            run.advance()
        runs.append(run)
        embedded_samples.append(sum(problems.calls))
    for with_features, without in zip(*(run.state for run in runs), strict=True):
        for key, value in without.items():
            torch.testing.assert_close(with_features[key], value, rtol=0, atol=1e-13)
    costs, plain_costs = (run.fed.ledger.totals() for run in runs)
    for unit in ("rounds", "samples", "gradients"):
        assert costs[unit] == plain_costs[unit]
    if name != "simfbo":
        assert costs["flops"] < plain_costs["flops"]
        # In a stack, one call of the backbone serves many clients.
        assert mode == "stack" or embedded_samples[0] < embedded_samples[1]


def test_features_serve_the_next_task_at_the_same_x_and_no_other() -> None:
    problem, _, clients, calls = digits(0.0)
    federation = fb.simulated_federation(problem, clients)
    x, y = problem.start
    other = x * 0.5
    calls.clear()

    def ask(x: fb.Tree, cohort: list[int]) -> tuple[int, Tensor]:
        """Return the calls of the backbone, and the mean reply."""
        before = len(calls)
        replies = federation.ask(LowerGradient(full=True), cohort, x=x, y=y)
        return len(calls) - before, replies.mean("q")["head.weight"]

    asked = [ask(x, [0, 1]), ask(x, [0, 1]), ask(other, [0, 1]), ask(other, [1, 2]), ask(x, [1, 2])]
    measurement = 1  # the cost of embedding is measured once, by running it
    footprint = 2 + measurement  # what a client takes in a stack is measured with fresh caches
    assert [count for count, _ in asked] == [footprint + 2 + measurement, 0, 2, 2, 2]
    assert torch.equal(asked[0][1], asked[1][1])
    assert not torch.allclose(asked[3][1], asked[4][1])
    flops = federation.ledger.phases["gradient"].flops
    ask(x, [1, 2])
    assert federation.ledger.phases["gradient"].flops == flops * 6 // 5, (
        "a client pays for its features in every task"
    )


class DerivativeInX(LowerGradient):
    """Takes a derivative in x, though its `fixed_x` promises that it takes none."""

    def step(self, m: Any, oracle: Oracle, batch: Any) -> Any:
        oracle.lower_gradients(m["x"], m["y"], batch)
        return super().step(m, oracle, batch)


def test_derivatives_in_x_of_features_are_refused() -> None:
    problems = digits(0.0)
    federation = fb.simulated_federation(problems.embedding, problems.clients)
    x, y = problems.embedding.start
    with pytest.raises((ClientError, TypeError), match="its fixed_x must be False"):
        federation.ask(DerivativeInX(full=True), [0, 1], x=x, y=y)
