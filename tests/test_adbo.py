"""SDBO and ADBO: the updates by hand for several clients, the planes, who is waited for, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import ADBO, SDBO
from fedbilevel.core.tree import is_finite
from fedbilevel.runs.run import Run

from .conformance.cases import CASES, cutting_planes, neumann, settle, where_planes_end

SETTINGS = CASES["sdbo"].settings


def task(**options: Any) -> Any:
    return fb.tasks.load("quadratic", **{"clients": 5, "condition": 3.0, "seed": 3} | options)


def matrices(of: Any) -> list[Any]:
    return [[part[0] for part in (*client.train, *client.val)] for client in of.clients]


def run(
    of: Any, method: SDBO, iterations: int, weights: Any = "uniform", **environment: Any
) -> Run:
    fed = fb.simulated_federation(
        of.problem, of.clients, fb.Environment(**environment), weights=weights
    )
    here = Run(method, fed, {})
    for _ in range(iterations):
        here.advance()
    return here


def leaves(state: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize(
    "changes", [{"plane_steps": 1}, {"plane_steps": 3}, {"plane_every": 2, "lr_dual_planes": 0.5}]
)
def test_several_clients_by_hand(changes: dict[str, Any]) -> None:
    of, weights = task(), [0.1, 0.3, 0.2, 0.15, 0.25]
    settings = SETTINGS | changes
    state = run(of, SDBO(**settings), 25, weights).state
    x, y = cutting_planes(matrices(of), [5 * p for p in weights], settings, 25)
    assert min(x.norm(), y.norm()) > 0.05
    torch.testing.assert_close(state.x["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.y["y"], y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_planes_are_tangents_of_h_and_cut_off_no_point_where_it_is_zero(steps: int) -> None:
    """For quadratics h is one too, with phi_i and y' held: its central differences are those of the plane, exactly."""
    of, weights = task(), [1.5, 0.5, 0.75, 1.25, 1.0]
    settings = SETTINGS | {"plane_steps": steps, "plane_every": 7}
    s = run(
        of, SDBO(**settings), 8, [w / 5 for w in weights]
    ).state  # the second plane is made at this point
    x, y, ys, parts = (
        s.x["x"],
        s.y["y"],
        torch.stack([i["y"]["y"] for i in s.clients]),
        matrices(of),
    )
    settled, mean = settle(parts, weights, settings, x, list(ys), y)
    w, b = torch.tensor(weights, dtype=x.dtype), torch.stack([i["b"]["y"][-1] for i in s.clients])

    def solved(at: Tensor) -> Tensor:
        """y'_i is affine in x."""
        eye, lr = settings["penalty"] * torch.eye(4), settings["lr_y"]
        moves = [neumann(A + eye, B @ (at - x), lr, steps - 1) for A, B, *_ in parts]
        return torch.stack([there + move for there, move in zip(settled, moves, strict=True)])

    def h(x: Tensor, ys: Tensor, y: Tensor) -> Tensor:
        return w @ (ys - solved(x)).square().sum(1) + (y - mean).square().sum()

    def plane(x: Tensor, ys: Tensor, y: Tensor) -> Tensor:
        return s.a["x"][-1] @ x + w @ (b * ys).sum(1) + s.c["y"][-1] @ y + s.kappa[-1]

    here, drawn = (x, ys, y), torch.Generator().manual_seed(0)
    assert h(*here) > 1e-3
    torch.testing.assert_close(plane(*here), h(*here), rtol=0, atol=1e-12)
    for _ in range(20):
        move = [torch.randn(part.shape, generator=drawn, dtype=part.dtype) for part in here]
        ahead, behind = (
            [p + sign * m for p, m in zip(here, move, strict=True)] for sign in (1, -1)
        )
        torch.testing.assert_close(
            plane(*ahead) - plane(*behind), h(*ahead) - h(*behind), rtol=0, atol=1e-10
        )
        feasible = ahead[0], solved(ahead[0]), mean
        assert h(*feasible) < 1e-20
        assert plane(*feasible) < 0


def test_planes_without_a_multiplier_are_dropped() -> None:
    here = run(task(), SDBO(**SETTINGS | {"plane_every": 2, "prune_below": 0.0}), 9)
    s, lam = here.state, torch.tensor([0.3, 1e-11, 0.2, 0.0, 1e-9], dtype=torch.float64)
    assert len(s.lam) == 5
    pruned = SDBO(**SETTINGS).cut(s._replace(lam=lam), here.fed)
    assert pruned.lam.tolist() == [0.3, 0.2, 1e-9, 0.0]
    rows = [(pruned.a["x"], s.a["x"]), (pruned.c["y"], s.c["y"]), (pruned.kappa, s.kappa)]
    rows += [
        (new["b"]["y"], old["b"]["y"]) for new, old in zip(pruned.clients, s.clients, strict=True)
    ]
    for new, old in rows:
        assert len(new) == 4
        assert torch.equal(new[:3], old[[0, 2, 4]])


def test_without_delays_and_with_everyone_adbo_is_sdbo() -> None:
    of = task(samples=4, noise=1.0)
    options = {"batch_size": 2, "delay": fb.delays.Constant(1.0)}
    asynchronous = run(of, ADBO(**SETTINGS), 25, **options)
    synchronous = run(of, SDBO(**SETTINGS), 25, **options)
    assert all(map(torch.equal, leaves(asynchronous.state), leaves(synchronous.state)))
    assert asynchronous.fed.ledger.phases == synchronous.fed.ledger.phases
    assert asynchronous.fed.now == synchronous.fed.now


def test_a_plane_is_charged_as_the_barriers_it_is() -> None:
    """Every task takes a second: 20 iterations and 2 planes of 3 steps; and what is under way is waited for first."""
    of, settings = task(), SETTINGS | {"plane_steps": 3}
    fed = run(of, SDBO(**settings), 20, delay=fb.delays.Constant(1.0)).fed
    assert {name: cost.rounds for name, cost in fed.ledger.phases.items()} == {
        "gradients": 20,
        "settle": 4,
        "cut": 2,
    }
    assert fed.now == 20 + 2 * 3
    slow = {
        "delay": fb.delays.Constant(1.0),
        "stragglers": fb.delays.Stragglers(1, 4.0),
        "participation": 4,
    }
    fed = run(of, ADBO(**settings), 1, **slow).fed
    assert (
        fed.ledger.phases["gradients"].rounds == 2
    )  # four that answered after 1 s, the straggler after 4 s
    assert fed.now == 4 + 3 * 4


@pytest.mark.parametrize(("max_delay", "worst"), [(1, 0), (3, 2), (6, 5)])
def test_nobody_is_heard_later_than_max_delay_allows(max_delay: int, worst: int) -> None:
    of = task(clients=8)
    conditions = {
        "participation": 2,
        "delay": fb.delays.LogNormal(1.0, 1.0),
        "stragglers": fb.delays.Stragglers(2, 20.0),
    }
    method = ADBO(**SETTINGS | {"max_delay": max_delay, "plane_every": 100})
    here = run(of, method, 40, **conditions)
    records = here.fed.records()
    assert records["max_staleness"] == worst
    assert here.fed.ledger.phases["gradients"].rounds > 40  # it had to wait for someone
    assert all(here.state.t - i["heard"] <= max_delay for i in here.state.clients)


def test_a_step_uses_the_multipliers_of_its_task() -> None:
    """The straggler answers 3.5 s after its task, in the others' fourth round since the plane; lambda has moved."""
    of = task(clients=3)
    conditions = {
        "participation": 2,
        "delay": fb.delays.Constant(1.0),
        "stragglers": fb.delays.Stragglers(1, 3.5),
    }
    here = run(of, ADBO(**SETTINGS | {"plane_every": 100}), 1, **conditions)
    here.state = here.state._replace(lam=torch.ones(1, dtype=torch.float64))
    (late,) = here.fed.transport.fates.slow
    here.advance()
    sent = here.state.clients[late]
    for _ in range(3):
        here.advance()
    now = here.state.clients[late]
    assert (sent["heard"], now["heard"], here.state.t) == (0, 4, 5)
    _, _, _, e, t, D = matrices(of)[late]
    step = SETTINGS["lr_x"] * (sent["x"]["x"] - t + D.T @ sent["y"]["y"] + sent["theta"]["x"])
    torch.testing.assert_close(now["x"]["x"], sent["x"]["x"] - step, rtol=0, atol=1e-12)
    step = SETTINGS["lr_y"] * (sent["y"]["y"] - e + D @ sent["x"]["x"] + sent["b"]["y"][0])
    torch.testing.assert_close(now["y"]["y"], sent["y"]["y"] - step, rtol=0, atol=1e-12)
    assert abs(float(here.state.lam) - 1) > 0.01


def test_lost_answers_leave_a_client_out_of_a_plane() -> None:
    of = task(samples=3, noise=0.1)
    conditions = {
        "participation": 3,
        "delay": fb.delays.LogNormal(1.0, 0.5),
        "faults": fb.delays.Faults(drop=0.2, corrupt=0.1, duplicate=0.1, leave=0.1),
    }
    here = run(of, ADBO(**SETTINGS | {"plane_every": 4}), 40, **conditions)
    assert here.fed.ledger.lost_tasks > 10
    assert here.fed.ledger.refused_replies > 5
    out = [not i["b"]["y"][j].any() for i in here.state.clients for j in range(len(here.state.lam))]
    assert 0 < sum(out) < len(out) / 2
    assert is_finite(tuple(here.state))
    assert of.gradient(here.state.x)["x"].norm() < of.gradient(of.problem.x)["x"].norm()


def test_on_identical_clients_the_bias_goes_with_more_steps_and_less_penalty() -> None:
    """It is then that of q alone, K terms of a Neumann sum of H + mu: what is left of the slope, and of a run of it."""
    of = task(clients=3, condition=1.5, heterogeneity=0.0)
    settings = SETTINGS | {"penalty": 0.05, "server_lr_y": 0.1, "c1": 0.002}

    def left(x: Tensor) -> float:
        return float(of.gradient({"x": x})["x"].norm() / of.gradient(of.problem.x)["x"].norm())

    assert left(where_planes_end(of, settings | {"plane_steps": 1})) > 0.3
    assert left(where_planes_end(of, settings | {"plane_steps": 6})) < 0.06
    assert left(where_planes_end(of, settings | {"plane_steps": 60, "penalty": 1e-4})) < 1e-3
    for steps, low, high in ((1, 0.3, 0.5), (6, 0.0, 0.1)):
        x, _ = cutting_planes(matrices(of), [1.0] * 3, settings | {"plane_steps": steps}, 300)
        assert low < left(x) < high


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"plane_every": 0}, "plane_every is 0; it must be at least 1"),
        ({"plane_steps": 0}, "plane_steps is 0; it must be at least 1"),
        ({"max_delay": 0}, "max_delay is 0; it must be at least 1"),
        ({"c1": -1.0}, "c1 is -1.0; it must not be negative"),
        ({"c2": -1.0}, "c2 is -1.0; it must not be negative"),
        ({"penalty": -1.0}, "penalty is -1.0; it must not be negative"),
        ({"prune_below": -1.0}, "prune_below is -1.0; it must not be negative"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        ADBO(**given)
