"""RABO and RAFBO: the bias of local Hessians, estimates by differences, and episodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.rabo import RABO, RAFBO, GlobalDirections
from fedbilevel.algorithms.shared import LocalHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, root
from fedbilevel.core.tree import Tree, dot, flatten, norm
from fedbilevel.runs.run import Run
from tests.support.cases import client_means, hypergradient, neumann, upper_gradient_y, zero_of
from tests.support.conformance import check_converges
from tests.support.embedded_net import embedded_net

STEPS: dict[str, Any] = {
    "lr_x": 0.2,
    "lr_y": 0.5,
    "lr_z": 0.5,
    "lower_steps": 1,
    "neumann_lr": 1.0,
    "neumann_steps": 5,
}


def local_phase(method: RABO) -> LocalHypergradient:
    """The phase in which clients evaluate their local hypergradients."""
    return method.local_phase(**method.estimates())


def cosine(a: Tree, b: Tree) -> float:
    return float(dot(a, b) / (norm(a) * norm(b)))


GLOBAL = [
    RABO(**STEPS, hypergradient="global"),
    RAFBO(**STEPS, hypergradient="global", width=1.0),
]


@pytest.mark.parametrize("method", GLOBAL, ids=["rabo", "rafbo"])
def test_the_global_hypergradient_leads_to_the_true_solution(method: RABO) -> None:
    check_converges(method, rounds=600)


@pytest.mark.parametrize(("radius", "inside"), [(1e-3, True), (1e3, False)])
def test_z_stays_in_its_ball(radius: float, inside: bool) -> None:
    task = fb.tasks.load("quadratic", clients=3)
    method = RABO(hypergradient="global", radius=radius)
    run = Run(method, fb.simulated_federation(task.problem, task.clients), {})
    run.advance()
    assert (float(norm(run.state.z)) < 1.001e-3) == inside


def test_local_hypergradients_are_biased_and_global_ones_are_not() -> None:
    """At (x, y*(x)), with an exact z and Neumann sums that are long enough to be exact."""
    task: Any = fb.tasks.load("quadratic", clients=6, condition=20.0, heterogeneity=1.0, seed=7)
    x = Tree(x=torch.ones(5, dtype=torch.float64))
    y = task.y_star(x)
    truth = task.gradient(x)
    exact = RABO(**STEPS | {"neumann_steps": 300}).estimates()
    fed = fb.simulated_federation(task.problem, task.clients)
    local = fed.ask(LocalHypergradient(**exact), range(6), x=x, y=y).coverage_mean("h")
    A, _, _, e, _, D = task._means("uniform")
    z = Tree(y=torch.linalg.solve(A, y["y"] - e + D @ x["x"]))
    r = fed.ask(GlobalDirections(**exact), range(6), x=x, y=y, z=z)
    assert cosine(local, truth) < 0.9
    assert float(norm(local - truth)) > 0.5 * float(norm(truth))
    torch.testing.assert_close(r.coverage_mean("dx")["x"], truth["x"], rtol=0, atol=1e-12)
    assert float(norm(r.coverage_mean("dz"))) < 1e-12


@pytest.mark.parametrize("curvature", [0.3, 1.0, 4.0])
def test_the_neumann_sum_keeps_a_part_of_the_inverse_and_conjugate_gradients_all(
    curvature: float,
) -> None:
    """Of the exact inverse of eq. (7), where the lower level is curved alike in all directions."""
    task = fb.tasks.load("quadratic", clients=1)
    m = client_means(task)[0]
    A = curvature * torch.eye(4, dtype=torch.float64)
    (client,) = task.clients
    batch = Batch((A[None], *client.train[1:]), client.val)
    x = Tree(x=torch.linspace(-1, 1, 5, dtype=torch.float64))
    y = Tree(y=torch.linspace(2, -1, 4, dtype=torch.float64))
    v = upper_gradient_y(m, x["x"], y["y"])

    def kept(method: RABO) -> float:
        """Along d2xy g v, the part of the exact indirect term."""
        h = local_phase(method).own_hypergradient(Oracle(task.problem), x, y, batch)["x"]
        direct = hypergradient(m, x["x"], y["y"], torch.zeros_like(v))
        exact = m[1].T @ v / curvature
        return float((h - direct) @ exact / (exact @ exact))

    default = RABO()
    expected = 1 - (1 - default.neumann_lr * curvature) ** default.neumann_steps
    assert kept(default) == pytest.approx(expected, rel=1e-12)
    if curvature == 1.0:
        assert expected == pytest.approx(0.41, abs=0.005)
    assert kept(RABO(solver="cg", neumann_steps=1)) == pytest.approx(1.0, rel=1e-12)
    assert kept(RAFBO(solver="cg", neumann_steps=1, width=1.0)) == pytest.approx(1.0, rel=1e-9)


def test_conjugate_gradients_give_the_hypergradient_of_equation_7() -> None:
    """In as many steps as y has numbers; the same number of Neumann terms is far from it."""
    task: Any = fb.tasks.load("quadratic", clients=5, condition=20.0, heterogeneity=1.0, seed=7)
    x = Tree(x=torch.ones(5, dtype=torch.float64))
    y = Tree(y=torch.linspace(2, -1, 4, dtype=torch.float64))
    exact = []
    for m in client_means(task):
        p = torch.linalg.solve(m[0], upper_gradient_y(m, x["x"], y["y"]))
        exact.append(hypergradient(m, x["x"], y["y"], p))
    expected = torch.stack(exact).mean(0)
    fed = fb.simulated_federation(task.problem, task.clients)

    def estimate(method: RABO) -> Tensor:
        return fed.ask(local_phase(method), range(5), x=x, y=y).coverage_mean("h")["x"]

    conjugate = estimate(RABO(solver="cg", neumann_steps=4))
    torch.testing.assert_close(conjugate, expected, rtol=0, atol=1e-10)
    by_differences = estimate(RAFBO(solver="cg", neumann_steps=4, width=1.0))
    torch.testing.assert_close(by_differences, expected, rtol=0, atol=1e-8)
    assert (estimate(RABO(neumann_lr=1.0, neumann_steps=4)) - expected).norm() > 0.1


def test_a_local_hypergradient_runs_the_backbone_once_per_side() -> None:
    problem, batch = embedded_net()
    calls = []

    def counted(x: Tree, data: Any, rng: Any) -> Any:
        calls.append(1)
        return problem.embed(x, data, rng)  # type: ignore[misc]

    oracle = Oracle(dataclasses.replace(problem, embed=counted))
    x, y = problem.start
    phase = local_phase(RABO(neumann_steps=7))
    phase.own_hypergradient(oracle, x, y, oracle.embed(x, batch))
    assert len(calls) == 2


def test_the_error_of_directional_differences_is_of_second_order_in_their_width() -> None:
    problem, batch = embedded_net()
    x, y = problem.start
    y = y.map(lambda t: t + 0.5)
    settings: dict[str, Any] = {"neumann_lr": 0.3, "neumann_steps": 6}

    def estimate(method: RABO) -> Tree:
        oracle = Oracle(problem)
        return local_phase(method).own_hypergradient(oracle, x, y, oracle.embed(x, batch))

    exact = estimate(RABO(**settings))

    def error(width: float) -> float:
        return float(norm(estimate(RAFBO(**settings, width=width)) - exact) / norm(exact))

    assert 3.5 < error(0.2) / error(0.1) < 4.5
    assert error(3e-3) < 1e-5


@pytest.mark.parametrize("dim_x", [3, 30])
def test_the_cost_of_a_difference_does_not_depend_on_the_size_of_x(dim_x: int) -> None:
    task = fb.tasks.load("quadratic", clients=2, dim_x=dim_x)
    run = fb.solve(task.problem, task.clients, RAFBO(**STEPS), rounds=2)
    assert run.history[-1]["gradients"] == 2 * (1 + 1 + 2 * 4 + 3)


ESTIMATES = {
    "conjugate gradients": ({"solver": "cg"}, 2 * 5 + 4),
    "fresh batches": ({"hypergradient_batch": "fresh"}, 2 * 5 + 2),
    "directional": ({"estimator": "directional"}, 2 * 5 + 2),
    "response": ({"estimator": "response", "directions": 3}, 1 + 5 * (3 + 1)),
    "printed": ({"estimator": "printed"}, 4),
    "global": ({"hypergradient": "global"}, 6),
}


@pytest.mark.parametrize(("changes", "gradients"), ESTIMATES.values(), ids=ESTIMATES)
def test_the_gradients_of_each_estimator(changes: dict[str, Any], gradients: int) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    run = fb.solve(task.problem, task.clients, RAFBO(**STEPS, **changes), rounds=2)
    assert run.history[-1]["gradients"] == 2 * (1 + gradients)


def test_the_printed_estimator_ascends() -> None:
    """Its direction at (x, y*(x)) has a negative product with the true one, and Phi grows.

    f = |y - e|^2 / 2 + |x|^2 / 2 with e far away: the indirect term is nearly all there is.
    """
    task: Any = fb.tasks.load(
        "quadratic", clients=3, dim_x=4, condition=2.0, heterogeneity=0.0, seed=1
    )
    clients = []
    for client in task.clients:
        e, t, D = client.val
        clients.append(dataclasses.replace(client, val=(50 * e, 0 * t, 0 * D)))
    task = dataclasses.replace(task, clients=clients)
    settings = STEPS | {"lr_x": 1e-3, "lr_y": 0.5, "lower_steps": 50, "neumann_steps": 60}
    directional = RAFBO(**settings, width=1.0)
    printed = RAFBO(**settings, width=1.0, estimator="printed")

    def phi_after(method: RABO) -> float:
        return float(task.phi(fb.solve(task.problem, task.clients, method, rounds=20).x))

    start = float(task.phi(task.problem.x))
    assert phi_after(RABO(**settings)) < start
    assert phi_after(directional) < start
    assert phi_after(printed) > start
    fed = fb.simulated_federation(task.problem, task.clients)
    x = Tree(task.problem.x)
    h = fed.ask(local_phase(printed), range(3), x=x, y=task.y_star(x)).coverage_mean("h")
    assert cosine(h, task.gradient(x)) < -0.5


def test_the_response_of_the_lower_level_has_the_neumann_sum_as_expectation() -> None:
    task = fb.tasks.load("quadratic", clients=1, dim_x=3, dim_y=2, seed=2)
    method = RAFBO(neumann_lr=0.7, neumann_steps=4, estimator="response", directions=20)
    x = Tree(x=torch.tensor([0.3, -1.0, 0.5]).double())
    y = Tree(y=torch.tensor([0.2, 0.4]).double())
    client = task.clients[0]

    def draw(key: Tensor) -> Tensor:
        batch = Batch(client.train, client.val, key)
        return flatten(local_phase(method).own_hypergradient(Oracle(task.problem), x, y, batch))

    draws = torch.func.vmap(draw)(fold_in(root(1, "response"), torch.arange(400)))
    mean = draws.mean(0)
    spread = draws.std(0) / len(draws) ** 0.5
    (m,) = client_means(task)
    p = neumann(m[0], upper_gradient_y(m, x["x"], y["y"]), 0.7, 3)
    expected = hypergradient(m, x["x"], y["y"], p)
    assert bool((spread < 0.1).all())
    assert bool(((mean - expected).abs() < 4 * spread).all())


PRIVATE = {"rabo": (RABO, {}), "rafbo": (RAFBO, {"width": 1.0})}


@pytest.mark.parametrize(("method", "changes"), PRIVATE.values(), ids=PRIVATE)
def test_with_private_lower_levels_it_solves_the_sum_of_the_clients_problems(
    method: type[RABO], changes: dict[str, Any]
) -> None:
    """Every client is one episode: sum_i grad Phi_i(x) = 0 with Phi_i(x) = f_i(x, y_i*(x))."""
    task: Any = fb.tasks.load("quadratic", clients=4, condition=1.5, heterogeneity=1.0, seed=3)
    problem = dataclasses.replace(task.problem, lower_level="private")
    parts = client_means(task)

    def total(x: Tensor) -> Tensor:
        slopes = []
        for m in parts:
            A, B, c, *_ = m
            y = torch.linalg.solve(A, B @ x + c)
            p = torch.linalg.solve(A, upper_gradient_y(m, x, y))
            slopes.append(hypergradient(m, x, y, p))
        return torch.stack(slopes).mean(0)

    goal = zero_of(total, 5)
    settings = STEPS | {"lr_x": 0.4, "lr_y": 1.0, "lower_steps": "20 epochs", "neumann_steps": 20}
    result = fb.solve(problem, task.clients, method(**settings, **changes), rounds=48)
    distance = (goal - task.x_star()["x"]).norm()
    assert float(distance) > 0.1, "the shared problem must have another solution"
    torch.testing.assert_close(result.x["x"], goal, rtol=0, atol=1e-6)
    assert result.history[-1]["iteration"] == result.history[-1]["round"] == 48


def test_the_shared_start_moves_by_the_mean_displacement_of_the_episodes() -> None:
    task = fb.tasks.load("quadratic", clients=3, heterogeneity=1.0)
    problem = dataclasses.replace(task.problem, lower_level="private")
    x, y = problem.start
    ends = []
    for A, B, c, *_ in client_means(task):
        y_i = y["y"]
        for _ in range(2):
            y_i = y_i - 0.5 * (A @ y_i - B @ x["x"] - c)
        ends.append(y_i)
    result = fb.solve(problem, task.clients, RABO(**STEPS | {"lower_steps": 2}), rounds=1)
    torch.testing.assert_close(result.y["y"], torch.stack(ends).mean(0), rtol=0, atol=1e-12)


REFUSED = {
    "one linear system for all": (
        {"hypergradient": "global"},
        "hypergradient is 'global'; with a private lower level",
    ),
    "the environment's local steps": (
        {"lower_steps": None},
        "lower_steps is None; with a private lower level",
    ),
    "samples of other episodes": (
        {"hypergradient_batch": "fresh"},
        "hypergradient_batch is 'fresh'; with a private lower level, as here, it must be 'one'",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_settings_without_a_meaning_for_episodes_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    problem = dataclasses.replace(task.problem, lower_level="private")
    with pytest.raises(ValueError, match=sentence):
        fb.solve(problem, task.clients, RABO(**changes), rounds=1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"estimator": "printed", "hypergradient": "global"},
            "estimator is 'printed'; with hypergradient 'global' it must be 'directional'",
        ),
        (
            {"solver": "cg", "hypergradient": "global"},
            "solver is 'cg'; it must be 'neumann' where hypergradient is 'global'",
        ),
        (
            {"solver": "cg", "estimator": "printed"},
            "solver is 'cg'; it must be 'neumann' where estimator is 'printed'",
        ),
        (
            {"hypergradient_batch": "fresh", "estimator": "response"},
            "hypergradient_batch is 'fresh'; it must be 'one' or 'full' where estimator is",
        ),
        (
            {"hypergradient_batch": "fresh", "solver": "cg"},
            "hypergradient_batch is 'fresh' and solver 'cg'",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        RAFBO(**changes)
