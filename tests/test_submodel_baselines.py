"""HeteroFL, FedRolex, OAP and FIARSE on networks that are cut or masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.algorithms import FIARSE, OAP, OAPStructured
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.fiarse import slope
from fedbilevel.algorithms.shared_submodels import budget, maskable
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.runs.run import Run

from .test_submodels import small_net

STRUCTURED = ["static", "fedrolex", "oap-structured", "fiarse-structured"]
NAMES = [*STRUCTURED, "oap", "fiarse"]
MIXED = [1.0, 0.5, 0.25]


def federation(
    algorithm: Any, capacity: Any, kind: str = "mlp", clients: int = 5, **options: Any
) -> Run:
    """A small network in float64 on random images of 8 x 8; its head is y."""
    net = nets.mlp(64, 8, 3, seed=1) if kind == "mlp" else nets.conv4(1, 8, 3, seed=1, hidden=8)
    level = options.pop("lower_level", "shared")
    problem, held, _ = small_net(net, clients, ridge=0.02, lower_level=level)
    conditions = {
        "capacity": capacity,
        "batch_size": 4,
        "local_steps": 2,
        **options.pop("environment", {}),
    }
    return Run(
        algorithm,
        fb.simulated_federation(problem, held, fb.Environment(**conditions), **options),
        {},
    )


def build(name: str, **settings: Any) -> Any:
    return fb.algorithms.get(name)(lr_x=0.3, lr_y=0.3, **settings)


def advance(run: Run, iterations: int) -> None:
    for _ in range(iterations):
        run.advance()


def vector(run: Run) -> Tensor:
    return torch.cat([flatten(run.state.x), flatten(run.state.y)])


@pytest.mark.parametrize("level", ["shared", "private"])
@pytest.mark.parametrize("name", NAMES)
def test_clients_that_hold_everything_do_what_fedavg_does(name: str, level: str) -> None:
    clients = (
        1 if name == "fiarse" else 3
    )  # it leaves clients whose displacement is 0 out of the mean: dead units
    ours, theirs = (
        federation(build(n), 1.0, "conv4", clients, lower_level=level) for n in (name, "fedavg")
    )
    advance(ours, 3)
    advance(theirs, 3)
    start = torch.cat([flatten(tree) for tree in ours.fed.problem.start])
    assert (vector(ours) - start).norm() > 0.1
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_what_nobody_holds_stays(name: str) -> None:
    run = federation(build(name), 0.25 if name in STRUCTURED else 0.5, clients=1)
    before, method, held = vector(run), run.algorithm, None
    if isinstance(method, OAP):
        (masks,) = method.masks(run.state, run.fed, [0])
        held = torch.cat([flatten(masks["x"]), flatten(masks["y"])])
    if isinstance(method, FIARSE):
        (thresholds,) = method.thresholds(run.state, run.fed, [0])
        held = before.abs() >= thresholds["y"]["head.bias"]
    advance(run, 1)
    moved, weights = vector(run) != before, sum(t.numel() for t in run.fed.problem.x.values())
    assert moved[:weights].double().mean() == pytest.approx(0.25, abs=0.12)  # of 8 hidden units, 2
    if held is not None:
        assert int(held.sum()) == len(held) // 4
        assert not (moved & ~held).any()
    if name in STRUCTURED:
        units = run.state.x["backbone.1.bias"] != run.fed.problem.x["backbone.1.bias"]
        assert int(units.sum()) <= 2
        changed = run.state.x["backbone.1.weight"] != run.fed.problem.x["backbone.1.weight"]
        assert not changed[~units].any()
        assert not (run.state.y["head.weight"] != run.fed.problem.y["head.weight"])[:, ~units].any()


@pytest.mark.parametrize("level", ["shared", "private"])
@pytest.mark.parametrize("name", NAMES)
def test_mixed_capacities_in_a_stack_and_one_by_one(name: str, level: str) -> None:
    options: Any = {
        "lower_level": level,
        "weights": "samples",
        "environment": {"local_steps": (1, 3)},
    }
    stack, loop = (
        federation(build(name), MIXED, mode=mode, **options) for mode in ("stack", "loop")
    )
    start = vector(stack)
    advance(stack, 3)
    advance(loop, 3)
    assert (vector(stack) - start).norm() > 0.1
    torch.testing.assert_close(vector(stack), vector(loop), rtol=0, atol=1e-11)
    assert stack.fed.ledger.phases == loop.fed.ledger.phases


def test_a_rolling_window_gets_everywhere_and_a_static_one_does_not() -> None:
    share = {}
    for name in ("static", "fedrolex"):
        run = federation(build(name), 0.25)
        before = vector(run)
        advance(run, 8)  # as many as there are units
        share[name] = float((vector(run) != before).double().mean())
    assert share["fedrolex"] == 1.0
    assert share["static"] < 0.3


def test_windows_of_one_width_move_in_step() -> None:
    """Weights between units of two layers that are further apart than the window are never trained."""
    run = federation(build("fedrolex"), 0.5, "conv4", environment={"local_steps": 1})
    name = "backbone.4.weight"  # from 2 groups of 4 channels to 2 groups of 4
    before = run.state.x[name]
    advance(run, 6)
    changed = (run.state.x[name] != before).any(-1).any(-1)
    expected = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("thr", [0.0, 0.3])
def test_fiarse_multiplies_gradients(thr: float) -> None:
    w = torch.tensor([-0.9, -0.3, 0.29, 0.0, 0.6], dtype=torch.float64)
    # 1 + 2 * 0.3 * 0.9 / 1.2^2, 1 + 2 * 0.09 / 0.36, dropped, dropped, 1 + 2 * 0.18 / 0.81
    expected = [1.375, 1.5, 0.0, 0.0, 1 + 4 / 9] if thr else [1.0] * 5
    torch.testing.assert_close(
        slope(w, torch.tensor(thr, dtype=torch.float64)), torch.tensor(expected).double()
    )


def test_fiarse_by_hand() -> None:
    """One client, two local steps on full batches: the mask is taken anew, the threshold is not."""
    method = build("fiarse", server_lr=0.7)
    run = federation(method, 0.5, clients=1, environment={"batch_size": None})
    x, y = run.fed.problem.start
    start, sizes = Tree({**x, **y}), torch.cat([flatten(x), flatten(y)]).abs()
    thr = sizes.sort(descending=True).values[len(sizes) // 4 - 1]
    w = start
    for _ in range(2):
        kept = w.map(lambda t: t.abs() >= thr)
        masked = w.map(torch.mul, kept)
        halves = [Tree({name: masked[name] for name in part}) for part in (x, y)]
        g_x, g_y = grad(run.fed.problem.lower, argnums=(0, 1))(
            *halves, run.fed.transport.executor.clients[0].train, ()
        )
        factor = w.map(lambda t, k: k * (1 + 2 * thr * t.abs() / (t.abs() + thr) ** 2), kept)
        w = w - 0.3 * factor.map(torch.mul, {**g_x, **g_y})
    advance(run, 1)
    torch.testing.assert_close(vector(run), flatten(start + 0.7 * (w - start)), rtol=0, atol=1e-12)


def test_oap_by_hand() -> None:
    """One client, two local steps on full batches: gradients at the masked weights, and masked themselves."""
    run = federation(build("oap", server_lr=0.7), 0.5, clients=1, environment={"batch_size": None})
    x, y = start = run.fed.problem.start
    (mask,) = run.algorithm.masks(run.state, run.fed, [0])  # type: ignore[attr-defined]
    for _ in range(2):
        held = x.map(torch.mul, mask["x"]), y.map(torch.mul, mask["y"])
        g_x, g_y = grad(run.fed.problem.lower, argnums=(0, 1))(
            *held, run.fed.transport.executor.clients[0].train, ()
        )
        x, y = x - 0.3 * g_x.map(torch.mul, mask["x"]), y - 0.3 * g_y.map(torch.mul, mask["y"])
    advance(run, 1)
    for ours, moved, before in zip(run.state, (x, y), start, strict=True):
        torch.testing.assert_close(
            flatten(ours), flatten(before + 0.7 * (moved - before)), rtol=0, atol=1e-12
        )


def test_fiarse_divides_by_who_moved_a_weight() -> None:
    """Capacities 1 and 1/4, weights 1 and 3: of what the small client keeps, the mean of both; of the rest, the large
    one's alone."""
    moves = []
    for cohort in ([0], [1], [0, 1]):
        run = federation(
            build("fiarse"),
            [1.0, 0.25],
            clients=2,
            environment={"batch_size": None},
            weights=[1.0, 3.0],
        )
        run.fed.sample = lambda cohort=cohort: cohort  # type: ignore[method-assign]
        before = vector(run)
        advance(run, 1)
        moves.append(vector(run) - before)
    large, small, both = moves
    counts = (large != 0).double() + 3 * (small != 0)
    assert set(counts.tolist()) == {1.0, 4.0}
    torch.testing.assert_close(both, (large + 3 * small) / counts, rtol=0, atol=1e-12)
    share = (counts[: len(flatten(run.state.x))] > 0).double().mean()
    assert run.fed.records()["covered_x"] == pytest.approx(float(share))


def test_oap_covers_every_weight_when_the_budgets_allow() -> None:
    for method, capacity in ((OAP(core=0.03), 0.5), (OAPStructured(core=0.1), 0.3)):
        run = federation(method, capacity, clients=5)
        advance(run, 1)
        records = run.fed.records()
        assert (records["min_coverage_x"], records["covered_x"]) == (1.0, 1.0), method
    few = federation(OAP(core=0.03), 0.5, clients=2)
    advance(few, 1)
    records = few.fed.records()
    assert records["covered_x"] == pytest.approx(0.47, abs=0.03)  # 0.03 + 2 (0.5^2 - 0.03)
    before = few.fed.problem.start
    advance(few, 4)  # the slices turn
    moved = torch.cat(
        [(flatten(a) != flatten(b)) for a, b in zip(few.state[:2], before, strict=True)]
    )
    assert moved.double().mean() > 0.9


def test_oap_gives_everybody_the_largest_weights_and_what_it_pays_for() -> None:
    run = federation(OAP(core=0.1), [0.7, 0.45, 0.2], clients=3)
    masks = run.algorithm.masks(run.state, run.fed, [0, 1, 2])  # type: ignore[attr-defined]
    flat = [torch.cat([flatten(mask["x"]), flatten(mask["y"])]) for mask in masks]
    sizes = vector(run).abs()
    assert [int(mask.sum()) for mask in flat] == [int(r**2 * len(sizes)) for r in (0.7, 0.45, 0.2)]
    largest = sizes.argsort(descending=True)
    assert all(bool(mask[largest[: int(0.1 * len(sizes))]].all()) for mask in flat[:2])
    assert bool(flat[2][largest[: int(0.04 * len(sizes))]].all()), (
        "a budget below the core goes to the very largest"
    )
    rest = largest[-(-len(sizes) // 10) :]
    assert not (flat[0] & flat[1])[rest].any()


@pytest.mark.parametrize("method", [OAP(), FIARSE()])
def test_norm_layers_and_what_starts_at_zero_are_never_masked(method: FedAvg) -> None:
    run = federation(method, 0.25, "conv4")
    problem = run.fed.problem
    norms = {name for name in problem.x if int(name.split(".")[1]) in (1, 5, 9, 13)}
    w = maskable(problem, *problem.start)
    assert set(problem.x) - set(w) == norms
    assert budget(w, run.state.x, (0.25, 0.25)) == w.numel // 16
    zero = fb.Problem(
        problem.upper,
        problem.lower,
        problem.x,
        Tree(problem.y).map(torch.zeros_like),
        axes=problem.axes,
    )
    assert not set(zero.y) & set(maskable(zero, *zero.start))


def test_budgets_count_exactly() -> None:
    w = Tree(a=torch.rand(100), b=torch.rand(100))
    assert [budget(w, Tree(a=w["a"]), (r, r)) for r in (0.7, 0.3, 1.0, 0.01)] == [98, 18, 200, 1]
    assert budget(w, Tree(a=w["a"]), (0.5, 0.2)) == 25 + 4


def test_bytes_are_those_of_what_is_sent() -> None:
    """Submodels send less; masked models send all, and OAP's masks besides."""
    whole = 8 * sum(p.numel() for p in nets.mlp(64, 8, 3).parameters())
    half = 8 * (4 * 64 + 4 + 3 * 4 + 3)
    for name, down, up in (
        ("static", half, half),
        ("fiarse", whole, whole),
        ("oap", whole * 9 // 8, whole),
    ):
        run = federation(build(name), 0.5, clients=1)
        advance(run, 1)
        totals = run.fed.ledger.totals()
        assert (totals["bytes_down"], totals["bytes_up"]) == (down, up)
