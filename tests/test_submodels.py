"""Submodels: cutting and putting back, who holds what, and means over those who hold a coordinate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.algorithms import Algorithm, Message, Phase
from fedbilevel.algorithms.rabo import RABO
from fedbilevel.core.submodels import Submodel, choose, importance, rolling, segments, static, units
from fedbilevel.core.tree import Tree, dot, flatten, norm, zeros_like
from fedbilevel.federation import Federation, Replies, Reply
from fedbilevel.runs.run import Run

AXES = {"a": ("u", None), "b": ("u",), "c": (None, "u"), "d": ("v", "u")}
TENSORS = Tree(
    a=torch.rand(4, 3), b=torch.rand(8), c=torch.rand(2, 12), d=torch.rand(3, 4), e=torch.rand(5)
)


def test_an_axis_has_as_many_units_as_its_smallest_dimension() -> None:
    assert units(AXES, TENSORS) == {"u": 4, "v": 3}


@given(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 2), min_size=1))
@settings(max_examples=40, deadline=None)
def test_cut_and_spread(u: set[int], v: set[int]) -> None:
    part = Submodel(
        AXES, units(AXES, TENSORS), {"u": torch.tensor(sorted(u)), "v": torch.tensor(sorted(v))}
    )
    small = part.cut(TENSORS)
    assert {name: tuple(t.shape) for name, t in small.items()} == part.shapes(TENSORS)
    assert tuple(small["c"].shape) == (2, 3 * len(u))
    assert tuple(small["e"].shape) == (5,)
    whole = part.spread(small, TENSORS)
    assert torch.equal(flatten(part.cut(whole)), flatten(small))
    for name, value in TENSORS.items():
        mask = torch.ones_like(value)
        for dim, axis in enumerate(AXES.get(name, ())):
            kept, total = {"u": (u, 4), "v": (v, 3)}.get(axis, (set(range(9)), 1))  # type: ignore[arg-type]
            if axis:
                rows = [
                    int(i // (value.shape[dim] / total)) in kept for i in range(value.shape[dim])
                ]
                mask = mask * torch.tensor(rows).reshape(
                    [-1 if d == dim else 1 for d in range(value.ndim)]
                )
        assert torch.equal(whole[name], value * mask)


WRONG = {
    "unknown tensor": (
        {"q": ("u",)},
        "axes names 'q', which is neither in x nor in y; there are x, y",
    ),
    "nothing": (None, "axes is None; it must be a dict that names the dimensions of tensors"),
    "a number": (
        {"x": 1},
        r"axes\['x'\] is 1; it must be a tuple, a name or None for each dimension",
    ),
    "dimensions": (
        {"x": ("u", None)},
        r"axes\['x'\] is \('u', None\); it must have an entry for each dimension of",
    ),
    "multiples": (
        {"x": ("u",), "y": ("u",)},
        r"axis 'u' names dimensions of \[4, 6\] entries; each must be",
    ),
}


@pytest.mark.parametrize(("axes", "sentence"), WRONG.values(), ids=WRONG)
def test_axes_that_do_not_fit_are_refused(axes: Any, sentence: str) -> None:
    def loss(x: Tree, y: Tree, batch: Any) -> Tensor:
        return dot(x, x)

    with pytest.raises((ValueError, TypeError), match=sentence):
        fb.Problem(
            upper=loss, lower=loss, x={"x": torch.zeros(6)}, y={"y": torch.zeros(4)}, axes=axes
        )


def test_policies() -> None:
    assert static("u", 10, 3, 0).tolist() == [0, 1, 2]
    assert rolling(8)("u", 10, 3, 0).tolist() == [8, 9, 0]
    assert [segments("u", 10, 3, group).tolist() for group in (0, 1, 3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [9, 0, 1],
    ]
    x, y = (
        Tree(w=torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 0.0]])),
        Tree(v=torch.tensor([0.0, 0.0, 9.0])),
    )
    pick = importance({"w": ("u", None), "v": ("u",)}, {**x, **y})
    assert pick("u", 3, 3, 0).tolist() == [2, 0, 1]  # squares 81, 9, 2


def test_ratios_of_x_and_of_what_is_in_y_alone() -> None:
    axes = {"w": ("u", None), "v": ("h", "u"), "b": ("h",)}
    x, y = Tree(w=torch.rand(10, 3)), Tree(v=torch.rand(7, 10), b=torch.rand(7))
    full, half, quarter = choose(axes, x, y, static, [(1.0, 1.0), (0.5, 0.25), (0.25, 1.0)])
    assert full is None
    assert isinstance(half, Submodel)
    assert half.shapes(y) == {"v": (2, 5), "b": (2,)}
    assert isinstance(quarter, Submodel)
    assert quarter.shapes(y) == {"v": (7, 3), "b": (7,)}  # ceil(2.5)
    (exact,) = choose({"w": ("u",)}, Tree(w=torch.rand(25)), y, static, [(0.28, 0.28)])
    assert isinstance(exact, Submodel)
    assert exact.shapes({"w": torch.rand(25)}) == {
        "w": (7,)
    }  # 0.28 * 25 is a little more than 7 in floating point
    again = choose(axes, x, y, static, [(0.5, 0.25), (1.0, 1.0), (0.5, 0.25)])
    assert again[0] is again[2], "clients that hold the same share one object"


def small_net(
    net: nn.Module | None = None, clients: int = 5, ridge: float = 0.1, **options: Any
) -> tuple[fb.Problem, list[fb.ClientData], nn.Module]:
    """A network in float64 (a Conv-4), whose backbone is x and whose head is y, on random images of 8 x 8."""
    net = (net or nets.conv4(1, 8, 3, seed=1, hidden=16)).double()
    apply, x, y = fb.split_module(net, lower="head.")

    def upper(x: Tree, y: Tree, batch: Any) -> Tensor:
        return F.cross_entropy(apply(x, y, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: Any) -> Tensor:
        return upper(x, y, batch) + 0.5 * ridge * dot(y, y)

    draw = torch.Generator().manual_seed(0)

    def data() -> tuple[Tensor, Tensor]:
        return torch.randn(6, 1, 8, 8, generator=draw, dtype=torch.float64), torch.randint(
            3, (6,), generator=draw
        )

    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y, axes=nets.axes(net), **options)
    return problem, [fb.ClientData(train=data(), val=data()) for _ in range(clients)], net


CAPACITY = [1.0, 0.5, 0.25, 0.125, 0.0625]
METHOD = RABO(lr_x=0.1, lr_y=0.3, lower_steps=2, neumann_lr=0.1, neumann_steps=3)
HYPERGRADIENT = METHOD.on_clients(**METHOD.estimates())


def federation(**options: Any) -> Federation:
    problem, clients, _ = small_net()
    environment = fb.Environment(capacity=CAPACITY, **options.pop("environment", {}))
    return fb.simulated_federation(problem, clients, environment, **options)


class Masked:
    """A client of RABO as printed: the whole network, with a mask on what the client holds; full batches."""

    def __init__(self, net: nn.Module, client: fb.ClientData, mask: dict[str, Tree]) -> None:
        self.net, self.client, self.mask = net, client, mask

    def loss(self, x: Tree, y: Tree, data: Any, ridge: float = 0.0) -> Tensor:
        x, y = x.map(torch.mul, self.mask["x"]), y.map(torch.mul, self.mask["y"])
        return F.cross_entropy(
            functional_call(self.net, {**x, **y}, (data[0],)), data[1]
        ) + ridge * dot(y, y)

    def lower_slope(self, x: Tree, y: Tree) -> Tree:
        return grad(self.loss, argnums=1)(x, y, self.client.train, 0.05)  # type: ignore[no-any-return]

    def move(self, x: Tree, y: Tree) -> Tree:
        here = y
        for _ in range(2):
            here = here - 0.3 * self.lower_slope(x, here)
        return here - y

    def hypergradient(self, x: Tree, y: Tree) -> Tree:
        def slope(x: Tree, y: Tree, v: Tree) -> Tensor:
            return dot(self.lower_slope(x, y), v)

        total = term = grad(self.loss, argnums=1)(x, y, self.client.val)
        for _ in range(2):
            term = term - 0.1 * grad(slope, argnums=1)(x, y, term)
            total = total + term
        return grad(self.loss)(x, y, self.client.val) - grad(slope)(x, y, 0.1 * total)  # type: ignore[no-any-return]


def masked_rabo(
    problem: fb.Problem, clients: Any, net: nn.Module, policy: Any, iterations: int
) -> tuple[Tree, Tree]:
    x, y = problem.start
    ones = {"x": x.map(torch.ones_like), "y": y.map(torch.ones_like)}
    for t in range(iterations):
        parts = choose(problem.axes, x, y, policy(t, x, y), [(r, r) for r in CAPACITY])
        masks = [
            {kind: part.spread(part.cut(one), one) if part else one for kind, one in ones.items()}
            for part in parts
        ]
        everyone = [Masked(net, client, mask) for client, mask in zip(clients, masks, strict=True)]
        y = y + covered([client.move(x, y) for client in everyone], [mask["y"] for mask in masks])
        slopes = [client.hypergradient(x, y) for client in everyone]
        x = x - 0.1 * covered(slopes, [mask["x"] for mask in masks])
    return x, y


def covered(values: list[Tree], masks: list[Tree]) -> Tree:
    total, held = zeros_like(values[0]), zeros_like(values[0])
    for value, mask in zip(values, masks, strict=True):
        total, held = total + value.map(torch.mul, mask), held + mask
    return total.map(lambda t, h: torch.where(h > 0, t / h.clamp(min=1), 0.0), held)


def importance_at(t: int, x: Tree, y: Tree) -> Any:
    return importance(small_net()[0].axes, {**x, **y})


POLICY = {
    "static": lambda t, x, y: static,
    "rolling": lambda t, x, y: rolling(t),
    "importance": importance_at,
}


@pytest.mark.parametrize("policy", POLICY)
def test_extract_train_and_merge_is_masking_the_full_model(policy: Any) -> None:
    problem, clients, net = small_net()
    run = Run(dataclasses.replace(METHOD, policy=policy), federation(), {})
    for _ in range(3):
        run.advance()
    x, y = masked_rabo(problem, clients, net, POLICY[policy], 3)
    assert float((flatten(x) - flatten(problem.start[0])).norm()) > 1e-2
    torch.testing.assert_close(flatten(run.state.x), flatten(x), rtol=0, atol=1e-10)
    torch.testing.assert_close(flatten(run.state.y), flatten(y), rtol=0, atol=1e-10)


def test_stack_and_loop_agree_and_bytes_are_those_of_the_submodels() -> None:
    runs = [Run(METHOD, federation(mode=mode), {}) for mode in ("stack", "loop")]
    for run in runs:
        run.advance()
    torch.testing.assert_close(
        flatten(runs[0].state.x), flatten(runs[1].state.x), rtol=0, atol=1e-12
    )
    problem = runs[0].fed.problem
    parts = choose(problem.axes, *problem.start, static, [(r, r) for r in CAPACITY])
    sizes = [
        sum(
            8 * torch.Size(shape).numel()
            for kind in (problem.x, problem.y)
            for shape in (part.shapes(kind).values() if part else [t.shape for t in kind.values()])
        )
        for part in parts
    ]
    totals = runs[0].fed.ledger.totals()
    assert totals["bytes_down"] == 2 * sum(sizes), "x and y, twice"
    assert totals["bytes_up"] == sum(sizes), "y once and x once"
    assert sizes[-1] < 0.1 * sizes[0]


def test_coverage_is_recorded() -> None:
    fed = federation()
    parts = choose(fed.problem.axes, *fed.problem.start, static, [(0.5, 0.5)] * 5)
    fed.ask(
        HYPERGRADIENT,
        range(5),
        submodels=[None, *parts[1:]],
        x=fed.problem.start[0],
        y=fed.problem.start[1],
    )
    assert fed.records() == {"min_coverage_x": 1.0, "covered_x": 1.0}
    r = fed.ask(
        HYPERGRADIENT, range(5), submodels=parts, x=fed.problem.start[0], y=fed.problem.start[1]
    )
    part, like = parts[0], fed.problem.start[0]
    assert part is not None
    found = fed.records()
    assert found["min_coverage_x"] == 5.0, "C* is over the coordinates that somebody holds"
    held = part.spread(part.cut(like.map(torch.ones_like)), like)
    assert found["covered_x"] == float(flatten(held).mean()) < 0.5
    untouched = r.coverage_mean("h").map(lambda t, h: t * (1 - h), held)
    assert float(flatten(untouched).abs().max()) == 0.0
    with pytest.raises(
        RuntimeError, match="'h' comes from submodels; it has a coverage_mean, no mean"
    ):
        r.mean("h")


def test_coverage_mean_weighs_the_clients_that_hold_a_coordinate() -> None:
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    fed = federation(weights=weights)
    x, y = fed.problem.start
    parts = choose(fed.problem.axes, x, y, static, fed.environment.capacities(range(5)))
    r = fed.ask(HYPERGRADIENT, range(5), submodels=parts, x=x, y=y)
    total, held = zeros_like(x), zeros_like(x)
    for i, part in enumerate(parts):
        one = fed.ask(HYPERGRADIENT, [i], submodels=[part], x=x, y=y).coverage_mean("h")
        mask = x.map(torch.ones_like)
        mask = part.spread(part.cut(mask), x) if part else mask
        total, held = total + weights[i] * one.map(torch.mul, mask), held + weights[i] * mask
    torch.testing.assert_close(
        flatten(r.coverage_mean("h")), flatten(total.map(torch.div, held)), rtol=0, atol=1e-12
    )


def test_of_what_is_recorded_as_least_or_most_the_extremes_are_kept() -> None:
    fed = federation()
    for value in (3.0, 1.0, 2.0):
        fed.record(min_a=value, max_a=value, a=value)
    assert fed.records() == {"min_a": 1.0, "max_a": 3.0, "a": 2.0}


def test_coverage_comes_in_the_order_of_the_reply() -> None:
    """Not in that of a set, which differs from process to process: a resumed run writes the same lines."""
    problem, _, _ = small_net()
    (part,) = choose(problem.axes, *problem.start, static, [(0.5, 0.5)])
    assert part is not None
    for declared in ({"a": "x", "b": "y"}, {"a": "y", "b": "x"}):
        phase: Any = SimpleNamespace(reply=declared, summed=True)
        replies = Replies("a test", phase, problem)
        stack = {
            name: part.cut(Tree(getattr(problem, kind))).map(lambda t: t[None])
            for name, kind in declared.items()
        }
        replies.add([Reply(0, 0, 1, 1.0, 0, {})], stack, part)
        assert [name[-1] for name in list(replies.coverage())[::2]] == list(declared.values())


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_cohort_without_weight_moves_nothing(ratio: float) -> None:
    fed = federation(weights=[0.0, 1.0, 1.0, 1.0, 1.0])
    x, y = fed.problem.start
    parts = choose(fed.problem.axes, x, y, static, [(ratio, ratio)])
    r = fed.ask(HYPERGRADIENT, [0], submodels=parts, x=x, y=y)
    assert float(norm(r.coverage_mean("h"))) == 0.0


class State(NamedTuple):
    x: Tree
    y: Tree


class Slope(Phase):
    name = "slope"
    reply: ClassVar = {"g": "y"}
    batch = "train"

    def start(self, m: Message) -> Any:
        return m.x, m.y

    def step(self, c: Any, oracle: Any, batch: Any) -> Any:
        return oracle.lower_gradient_y(*c, batch)

    def finish(self, g: Any) -> dict[str, Any]:
        return {"g": g}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Posting(Algorithm):
    """Posts submodels and takes what arrives: who replied is sent the next one."""

    name: ClassVar = "posting"
    submodels: ClassVar = True

    def init(self, problem: fb.Problem) -> State:
        return State(*problem.start)

    def iterate(self, s: State, fed: Any) -> State:
        idle = range(len(fed)) if fed.ledger.rounds == 0 else fed.idle
        parts = choose(
            fed.problem.axes, s.x, s.y, rolling(fed.iteration), fed.environment.capacities(idle)
        )
        fed.post(Slope(), idle, submodels=parts, x=s.x, y=s.y)
        r = fed.collect()
        fed.idle = list(r.idle)
        return State(s.x, s.y - 0.1 * r.coverage_mean("g"))


def test_posted_submodels_arrive_and_survive_a_restart(tmp_path: Path) -> None:
    def run() -> Run:
        conditions = {"delay": fb.delays.LogNormal(1.0, 1.0), "participation": 2}
        return Run(Posting(), federation(environment=conditions), {})

    whole = run()
    for _ in range(6):
        whole.advance()
    first, second = run(), run()
    for _ in range(3):
        first.advance()
    torch.save(first.fed.snapshot(), tmp_path / "fed.pt")
    second.fed.restore(torch.load(tmp_path / "fed.pt", weights_only=False))
    second.state, second.fed.idle = first.state, first.fed.idle  # type: ignore[attr-defined]
    for _ in range(3):
        second.advance()
    assert float((flatten(whole.state.y) - flatten(whole.fed.problem.start[1])).norm()) > 1e-3
    assert torch.equal(flatten(second.state.y), flatten(whole.state.y))


def test_capacities_are_dealt_in_turn() -> None:
    environment = fb.Environment(capacity=[1.0, 0.5], capacity_y=0.25)
    assert environment.capacities([0, 1, 2, 5]) == [
        (1.0, 0.25),
        (0.5, 0.25),
        (1.0, 0.25),
        (0.5, 0.25),
    ]
    assert fb.Environment(capacity=0.5).capacities([3]) == [(0.5, 0.5)]


REFUSED = {
    "zero": ({"capacity": 0.0}, "capacity is 0.0"),
    "more than the whole": ({"capacity": [1.0, 1.5]}, "capacity is 1.5"),
    "empty": ({"capacity": []}, r"capacity is an empty list; it must hold ratios in \(0, 1\]"),
    "of y": ({"capacity_y": -1.0}, "capacity_y is -1.0"),
}


def test_a_capacity_that_is_no_number_is_refused() -> None:
    for value in (np.float32(0.5), np.array([0.5, 1.0]), (0.5, 1.0), "0.5"):
        with pytest.raises(TypeError, match=r"capacity is .*; it must be a number"):
            fb.Environment(capacity=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("conditions", "sentence"), REFUSED.values(), ids=REFUSED)
def test_wrong_capacities_are_refused(conditions: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fb.Environment(**conditions)


def test_who_cannot_cut_says_so() -> None:
    problem, clients, _ = small_net()
    with pytest.raises(
        ValueError, match=r"capacity is 0.5, but simfbo trains whole models; it must be 1"
    ):
        fb.solve(problem, clients, "simfbo", rounds=1, environment=fb.Environment(capacity=0.5))
    task = fb.tasks.load("quadratic")
    with pytest.raises(
        ValueError, match=r"capacity is 0.5, but this problem names no axes to cut; it must be 1"
    ):
        fb.solve(
            task.problem, task.clients, "rabo", rounds=1, environment=fb.Environment(capacity=0.5)
        )
    with pytest.raises(TypeError, match="segments is 3; it must be a tuple of whole numbers"):
        RABO(segments=3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"policy is 'segments' and segments is \(\); it takes both or neither"
    ):
        RABO(policy="segments")
