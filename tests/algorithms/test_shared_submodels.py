"""What all methods on submodels and masked models have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.algorithms import FIARSE, OAP, FedAvg
from fedbilevel.algorithms.shared_submodels import maskable, weight_budget
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.runs.run import Run
from tests.support.small_net import advance, small_net_run, weights_of

STRUCTURED = ["static", "fedrolex", "oap-structured", "fiarse-structured"]
MASKED = ["oap", "fiarse"]


def build(name: str) -> Any:
    return fb.algorithms.get(name)(lr_x=0.3, lr_y=0.3)


@pytest.mark.parametrize("level", ["shared", "private"])
@pytest.mark.parametrize("name", [*STRUCTURED, *MASKED])
def test_clients_that_hold_everything_do_what_fedavg_does(name: str, level: str) -> None:
    clients = 3
    if name == "fiarse":
        clients = 1  # its mean leaves out clients whose displacement is 0, as of dead units
    ours = small_net_run(build(name), 1.0, "conv4", clients, level)
    theirs = small_net_run(build("fedavg"), 1.0, "conv4", clients, level)
    start = weights_of(ours)
    advance(ours, 3)
    advance(theirs, 3)
    assert (weights_of(ours) - start).norm() > 0.1
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-12)


def moved_in_one_iteration(run: Run) -> Tensor:
    before = weights_of(run)
    advance(run, 1)
    return weights_of(run) != before


@pytest.mark.parametrize("name", STRUCTURED)
def test_units_that_nobody_holds_stay(name: str) -> None:
    run = small_net_run(build(name), 0.25, clients=1)
    moved = moved_in_one_iteration(run)
    x = run.state.x
    y = run.state.y
    start = run.fed.problem
    share = moved[: len(flatten(x))].double().mean()
    assert share == pytest.approx(0.25, abs=0.12)  # 2 of 8 hidden units
    units = x["backbone.1.bias"] != start.x["backbone.1.bias"]
    assert int(units.sum()) <= 2
    rows = x["backbone.1.weight"] != start.x["backbone.1.weight"]
    assert not rows[~units].any()
    columns = y["head.weight"] != start.y["head.weight"]
    assert not columns[:, ~units].any()


@pytest.mark.parametrize("name", MASKED)
def test_weights_that_nobody_holds_stay(name: str) -> None:
    run = small_net_run(build(name), 0.5, clients=1)
    method = run.algorithm
    if isinstance(method, OAP):
        (mask,) = method.masks(run.state, run.fed, [0])
        held = torch.cat([flatten(mask["x"]), flatten(mask["y"])])
    else:
        assert isinstance(method, FIARSE)
        (thresholds,) = method.thresholds(run.state, run.fed, [0])
        held = weights_of(run).abs() >= thresholds["y"]["head.bias"]
    moved = moved_in_one_iteration(run)
    share = moved[: len(flatten(run.state.x))].double().mean()
    assert share == pytest.approx(0.25, abs=0.12)
    assert int(held.sum()) == len(held) // 4
    assert not (moved & ~held).any()


@pytest.mark.parametrize("level", ["shared", "private"])
@pytest.mark.parametrize("name", [*STRUCTURED, *MASKED])
def test_mixed_capacities_in_a_stack_and_one_by_one(name: str, level: str) -> None:
    options: Any = {
        "lower_level": level,
        "weights": "samples",
        "environment": {"local_steps": (1, 3)},
    }
    stack = small_net_run(build(name), [1.0, 0.5, 0.25], mode="stack", **options)
    loop = small_net_run(build(name), [1.0, 0.5, 0.25], mode="loop", **options)
    start = weights_of(stack)
    advance(stack, 3)
    advance(loop, 3)
    assert (weights_of(stack) - start).norm() > 0.1
    torch.testing.assert_close(weights_of(stack), weights_of(loop), rtol=0, atol=1e-11)
    assert stack.fed.ledger.phases == loop.fed.ledger.phases


@pytest.mark.parametrize("method", [OAP(), FIARSE()], ids=["oap", "fiarse"])
def test_norm_layers_and_tensors_that_start_at_zero_are_never_masked(method: FedAvg) -> None:
    run = small_net_run(method, 0.25, "conv4")
    problem = run.fed.problem
    norms = {name for name in problem.x if int(name.split(".")[1]) in (1, 5, 9, 13)}
    w = maskable(problem, *problem.start)
    assert set(problem.x) - set(w) == norms
    assert weight_budget(w, run.state.x, (0.25, 0.25)) == w.numel // 16
    head = Tree(problem.y).map(torch.zeros_like)
    zero = fb.Problem(problem.upper, problem.lower, problem.x, head, axes=problem.axes)
    assert not set(zero.y) & set(maskable(zero, *zero.start))


def test_budgets_count_exactly() -> None:
    w = Tree(a=torch.rand(100), b=torch.rand(100))
    x = Tree(a=w["a"])
    assert weight_budget(w, x, (0.7, 0.7)) == 98
    assert weight_budget(w, x, (0.3, 0.3)) == 18
    assert weight_budget(w, x, (1.0, 1.0)) == 200
    assert weight_budget(w, x, (0.01, 0.01)) == 1
    assert weight_budget(w, x, (0.5, 0.2)) == 25 + 4


WHOLE = 8 * sum(p.numel() for p in nets.mlp(64, 8, 3).parameters())
HALF = 8 * (4 * 64 + 4 + 3 * 4 + 3)
BYTES = [("static", HALF, HALF), ("fiarse", WHOLE, WHOLE), ("oap", WHOLE * 9 // 8, WHOLE)]


@pytest.mark.parametrize(("name", "down", "up"), BYTES)
def test_submodels_send_less_and_masked_models_send_all(name: str, down: int, up: int) -> None:
    """OAP sends its masks besides, a byte per weight."""
    run = small_net_run(build(name), 0.5, clients=1)
    advance(run, 1)
    totals = run.fed.ledger.totals()
    assert (totals["bytes_down"], totals["bytes_up"]) == (down, up)
