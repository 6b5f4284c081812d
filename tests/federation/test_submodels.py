"""Clients that hold submodels: capacities, what is sent, coverage, and means over the holders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm, Message, Phase
from fedbilevel.algorithms.rabo import RABO
from fedbilevel.core.submodels import Submodel, choose_submodels, rolling, static
from fedbilevel.core.tree import Tree, flatten, norm, zeros_like
from fedbilevel.federation import Replies, Reply
from fedbilevel.runs.run import Run
from tests.support.small_net import CAPACITY, cut_federation, small_net

METHOD = RABO(lr_x=0.1, lr_y=0.3, lower_steps=2, neumann_lr=0.1, neumann_steps=3)
HYPERGRADIENT = METHOD.local_phase(**METHOD.estimates())


def held_by(submodel: Submodel | None, like: Tree) -> Tree:
    """1 for every entry that the submodel holds, 0 elsewhere."""
    ones = like.map(torch.ones_like)
    if submodel is None:
        return ones
    return submodel.spread(submodel.cut(ones), like)


# Capacities


def test_a_list_of_capacities_is_assigned_to_the_clients_in_turn() -> None:
    environment = fb.Environment(capacity=[1.0, 0.5], capacity_y=0.25)
    expected = [(1.0, 0.25), (0.5, 0.25), (1.0, 0.25), (0.5, 0.25)]
    assert environment.capacities([0, 1, 2, 5]) == expected
    assert fb.Environment(capacity=0.5).capacities([3]) == [(0.5, 0.5)]


def test_a_capacity_that_is_not_a_number_is_refused() -> None:
    for value in (np.float32(0.5), np.array([0.5, 1.0]), (0.5, 1.0), "0.5"):
        with pytest.raises(TypeError, match=r"capacity is .*; it must be a number"):
            fb.Environment(capacity=value)  # type: ignore[arg-type]


REFUSED = {
    "zero": ({"capacity": 0.0}, "capacity is 0.0"),
    "more than the whole": ({"capacity": [1.0, 1.5]}, "capacity is 1.5"),
    "empty": ({"capacity": []}, r"capacity is an empty list; it must hold ratios in \(0, 1\]"),
    "of y": ({"capacity_y": -1.0}, "capacity_y is -1.0"),
}


@pytest.mark.parametrize(("conditions", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_capacity_is_refused(conditions: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fb.Environment(**conditions)


# What is sent


def model_bytes(submodel: Submodel | None, problem: fb.Problem) -> int:
    """The bytes of x and y in float64, cut to a submodel."""
    total = 0
    for variable in (problem.x, problem.y):
        shapes = {name: tuple(tensor.shape) for name, tensor in variable.items()}
        if submodel is not None:
            shapes = submodel.shapes(variable)
        total += sum(8 * torch.Size(shape).numel() for shape in shapes.values())
    return total


def test_stack_and_loop_agree_and_bytes_are_those_of_the_submodels() -> None:
    runs = [Run(METHOD, cut_federation(mode=mode), {}) for mode in ("stack", "loop")]
    for run in runs:
        run.advance()
    stacked, looped = (flatten(run.state.x) for run in runs)
    torch.testing.assert_close(stacked, looped, rtol=0, atol=1e-12)
    problem = runs[0].fed.problem
    ratios = [(ratio, ratio) for ratio in CAPACITY]
    submodels = choose_submodels(problem.axes, *problem.start, static, ratios)
    sizes = [model_bytes(submodel, problem) for submodel in submodels]
    totals = runs[0].fed.ledger.totals()
    assert totals["bytes_down"] == 2 * sum(sizes), "x and y, twice"
    assert totals["bytes_up"] == sum(sizes), "y once and x once"
    assert sizes[-1] < 0.1 * sizes[0]


# Coverage


def test_coverage_is_recorded() -> None:
    fed = cut_federation()
    x, y = fed.problem.start
    submodels = choose_submodels(fed.problem.axes, x, y, static, [(0.5, 0.5)] * 5)
    fed.ask(HYPERGRADIENT, range(5), submodels=[None, *submodels[1:]], x=x, y=y)
    assert fed.records() == {"min_coverage_x": 1.0, "covered_x": 1.0}
    replies = fed.ask(HYPERGRADIENT, range(5), submodels=submodels, x=x, y=y)
    records = fed.records()
    assert records["min_coverage_x"] == 5.0, "over the coordinates that somebody holds"
    held = held_by(submodels[0], x)
    assert records["covered_x"] == float(flatten(held).mean()) < 0.5
    untouched = replies.coverage_mean("h").map(lambda t, h: t * (1 - h), held)
    assert float(flatten(untouched).abs().max()) == 0.0
    message = "'h' comes from submodels; it has a coverage_mean, no mean"
    with pytest.raises(RuntimeError, match=message):
        replies.mean("h")


def test_the_coverage_mean_is_weighted_over_the_clients_that_hold_a_coordinate() -> None:
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    fed = cut_federation(weights=weights)
    x, y = fed.problem.start
    ratios = fed.environment.capacities(range(5))
    submodels = choose_submodels(fed.problem.axes, x, y, static, ratios)
    replies = fed.ask(HYPERGRADIENT, range(5), submodels=submodels, x=x, y=y)
    total = zeros_like(x)
    weight = zeros_like(x)
    for i, submodel in enumerate(submodels):
        alone = fed.ask(HYPERGRADIENT, [i], submodels=[submodel], x=x, y=y).coverage_mean("h")
        held = held_by(submodel, x)
        total = total + weights[i] * alone.map(torch.mul, held)
        weight = weight + weights[i] * held
    mean = flatten(replies.coverage_mean("h"))
    expected = flatten(total.map(torch.div, weight))
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_coverage_mean_of_a_cohort_without_weight_is_zero(ratio: float) -> None:
    fed = cut_federation(weights=[0.0, 1.0, 1.0, 1.0, 1.0])
    x, y = fed.problem.start
    submodels = choose_submodels(fed.problem.axes, x, y, static, [(ratio, ratio)])
    replies = fed.ask(HYPERGRADIENT, [0], submodels=submodels, x=x, y=y)
    assert float(norm(replies.coverage_mean("h"))) == 0.0


def test_coverage_is_listed_in_the_order_of_the_reply() -> None:
    """The order of a set would differ between processes, and so would metrics of a resumed run."""
    problem, _, _ = small_net()
    (submodel,) = choose_submodels(problem.axes, *problem.start, static, [(0.5, 0.5)])
    assert submodel is not None
    for kinds in ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}):
        phase: Any = SimpleNamespace(reply=kinds, summed=True)
        replies = Replies("a test", phase, problem)
        stack = {}
        for name, kind in kinds.items():
            stack[name] = submodel.cut(Tree(getattr(problem, kind))).map(lambda t: t[None])
        replies.add_stack([Reply(0, 0, 1, 1.0, 0, {})], stack, submodel)
        assert [name[-1] for name in list(replies.coverage())[::2]] == list(kinds.values())


def test_records_named_min_and_max_keep_the_extreme() -> None:
    fed = cut_federation()
    for value in (3.0, 1.0, 2.0):
        fed.record(min_a=value, max_a=value, a=value)
    assert fed.records() == {"min_a": 1.0, "max_a": 3.0, "a": 2.0}


# Without a barrier


class State(NamedTuple):
    x: Tree
    y: Tree


class LowerGradient(Phase):
    name = "lower_gradient"
    reply: ClassVar = {"g": "y"}
    batch = "train"

    def start(self, message: Message) -> Any:
        return message.x, message.y

    def step(self, carry: Any, oracle: Any, batch: Any) -> Any:
        return oracle.lower_gradient_y(*carry, batch)

    def finish(self, carry: Tensor) -> dict[str, Any]:
        return {"g": carry}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Posting(Algorithm):
    """Posts submodels without a barrier; a client that has replied is sent the next one."""

    name: ClassVar = "posting"
    submodels: ClassVar = True

    def init(self, problem: fb.Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Any) -> State:
        idle = fed.idle
        if fed.ledger.rounds == 0:
            idle = range(len(fed))
        ratios = fed.environment.capacities(idle)
        submodels = choose_submodels(fed.problem.axes, s.x, s.y, rolling(fed.iteration), ratios)
        fed.post(LowerGradient(), idle, submodels=submodels, x=s.x, y=s.y)
        replies = fed.collect()
        fed.idle = list(replies.idle)
        return State(s.x, s.y - 0.1 * replies.coverage_mean("g"))


def posting_run() -> Run:
    conditions = {"delay": fb.delays.LogNormal(1.0, 1.0), "participation": 2}
    fed = cut_federation(environment=conditions)
    fed.idle = []  # type: ignore[attr-defined]
    return Run(Posting(), fed, {})


def test_posted_submodels_arrive_and_survive_a_restart(tmp_path: Path) -> None:
    whole = posting_run()
    for _ in range(6):
        whole.advance()
    first = posting_run()
    for _ in range(3):
        first.advance()
    torch.save(first.fed.snapshot(), tmp_path / "fed.pt")
    second = posting_run()
    second.fed.restore(torch.load(tmp_path / "fed.pt", weights_only=False))
    second.state = first.state
    second.fed.idle = first.fed.idle  # type: ignore[attr-defined]
    for _ in range(3):
        second.advance()
    assert float((flatten(whole.state.y) - flatten(whole.fed.problem.start[1])).norm()) > 1e-3
    assert torch.equal(flatten(second.state.y), flatten(whole.state.y))
