"""OAP: its steps by hand, and which weights its masks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad

from fedbilevel.algorithms import OAP, OAPStructured
from fedbilevel.core.tree import flatten
from tests.support.small_net import advance, small_net_run, weights_of


def test_oap_by_hand() -> None:
    """One client, two local steps on full batches: masked gradients at the masked weights."""
    method = OAP(lr_x=0.3, lr_y=0.3, server_lr=0.7)
    run = small_net_run(method, 0.5, clients=1, environment={"batch_size": None})
    data = run.fed.transport.executor.clients[0].train
    start_x, start_y = run.fed.problem.start
    (mask,) = method.masks(run.state, run.fed, [0])
    x = start_x
    y = start_y
    for _ in range(2):
        masked_x = x.map(torch.mul, mask["x"])
        masked_y = y.map(torch.mul, mask["y"])
        g_x, g_y = grad(run.fed.problem.lower, argnums=(0, 1))(masked_x, masked_y, data, ())
        x = x - 0.3 * g_x.map(torch.mul, mask["x"])
        y = y - 0.3 * g_y.map(torch.mul, mask["y"])
    advance(run, 1)
    expected_x = flatten(start_x + 0.7 * (x - start_x))
    expected_y = flatten(start_y + 0.7 * (y - start_y))
    torch.testing.assert_close(flatten(run.state.x), expected_x, rtol=0, atol=1e-12)
    torch.testing.assert_close(flatten(run.state.y), expected_y, rtol=0, atol=1e-12)


COVERING = [(OAP(core=0.03), 0.5), (OAPStructured(core=0.1), 0.3)]


@pytest.mark.parametrize(("method", "capacity"), COVERING, ids=["oap", "oap-structured"])
def test_everything_is_covered_when_the_budgets_allow(method: Any, capacity: float) -> None:
    run = small_net_run(method, capacity, clients=5)
    advance(run, 1)
    records = run.fed.records()
    assert records["min_coverage_x"] == 1.0
    assert records["covered_x"] == 1.0


def test_slices_turn_so_that_small_budgets_reach_most_weights_within_a_few_iterations() -> None:
    run = small_net_run(OAP(core=0.03), 0.5, clients=2)
    before = weights_of(run)
    advance(run, 1)
    covered = run.fed.records()["covered_x"]
    assert covered == pytest.approx(0.47, abs=0.03)  # 0.03 + 2 (0.5^2 - 0.03)
    advance(run, 4)
    assert (weights_of(run) != before).double().mean() > 0.9


def test_everyone_holds_the_largest_weights_and_as_many_as_its_budget() -> None:
    method = OAP(core=0.1)
    ratios = [0.7, 0.45, 0.2]
    run = small_net_run(method, ratios, clients=3)
    masks = method.masks(run.state, run.fed, [0, 1, 2])
    first, second, third = (torch.cat([flatten(m["x"]), flatten(m["y"])]) for m in masks)
    sizes = weights_of(run).abs()
    d = len(sizes)
    assert [int(mask.sum()) for mask in (first, second, third)] == [int(r**2 * d) for r in ratios]
    largest = sizes.argsort(descending=True)
    core = largest[: int(0.1 * d)]
    assert bool(first[core].all())
    assert bool(second[core].all())
    within_budget = largest[: int(0.04 * d)]
    assert bool(third[within_budget].all()), "a budget below the core takes the very largest"
    rest = largest[-(-d // 10) :]
    assert not (first & second)[rest].any(), "slices of the rest do not overlap"
