"""RABO and RAFBO: what local Hessians cost, differences against second derivatives, and episodes of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.algorithms.rabo import RABO, RAFBO, GlobalDirections, LocalHypergradient
from fedbilevel.core.oracle import Embedded, Oracle
from fedbilevel.core.problem import Batch
from fedbilevel.core.rng import fold_in, root
from fedbilevel.core.tree import Tree, dot, flatten, norm
from fedbilevel.runs.run import Run

from .conformance.cases import neumann
from .conformance.cases import root as zero_of
from .conformance.test_conformance import check_converges

STEPS: dict[str, Any] = {
    "lr_x": 0.2,
    "lr_y": 0.5,
    "lr_z": 0.5,
    "lower_steps": 1,
    "neumann_lr": 1.0,
    "neumann_steps": 5,
}


def on_client(method: RABO) -> LocalHypergradient:
    """What this method asks of a client."""
    return method.on_clients(**method.estimates())


def cosine(a: Tree, b: Tree) -> float:
    return float(dot(a, b) / (norm(a) * norm(b)))


@pytest.mark.parametrize(
    "method", [RABO(**STEPS, hypergradient="global"), RAFBO(**STEPS, hypergradient="global")]
)
def test_the_global_hypergradient_leads_to_the_true_solution(method: RABO) -> None:
    check_converges(
        dataclasses.replace(method, width=1.0) if isinstance(method, RAFBO) else method, rounds=600
    )


def test_z_stays_in_its_ball() -> None:
    task = fb.tasks.load("quadratic", clients=3)
    for radius, inside in ((1e-3, True), (1e3, False)):
        method = RABO(hypergradient="global", radius=radius)
        run = Run(method, fb.simulated_federation(task.problem, task.clients), {})
        run.advance()
        assert (float(norm(run.state.z)) < 1.001e-3) == inside


def test_local_hypergradients_are_biased_and_global_ones_are_not() -> None:
    """At (x, y*(x)), with Neumann sums and z so long that they are exact: the means against the true hypergradient."""
    task = fb.tasks.load("quadratic", clients=6, condition=20.0, heterogeneity=1.0, seed=7)
    x = Tree(x=torch.ones(5, dtype=torch.float64))
    y, truth = task.y_star(x), task.gradient(x)
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


def network(embed: bool = True) -> tuple[fb.Problem, Batch]:
    """An MLP in float64 on random data, its features embedded or not."""
    net = nets.mlp(6, 12, 3, seed=2).double()
    _, x, y = fb.split_module(net, lower="head.")

    def features(x: Tree, data: Any) -> Any:
        return {
            "h": torch.tanh(data["i"] @ x["backbone.1.weight"].T + x["backbone.1.bias"]),
            "labels": data["labels"],
        }

    def upper(x: Tree, y: Tree, data: Any) -> Tensor:
        data = data if embed else features(x, data)
        penalty = 0.1 * dot(x, x) * data["h"].square().mean()  # x counts beside its features too
        return (
            F.cross_entropy(data["h"] @ y["head.weight"].T + y["head.bias"], data["labels"])
            + penalty
        )

    def lower(x: Tree, y: Tree, data: Any) -> Tensor:
        return upper(x, y, data) + 0.1 * dot(y, y)

    draw = torch.Generator().manual_seed(5)
    sides = [
        {
            "i": torch.randn(9, 6, generator=draw, dtype=torch.float64),
            "labels": torch.randint(3, (9,), generator=draw),
        }
        for _ in range(2)
    ]
    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=features if embed else None)
    return problem, Batch(*sides, root(0, "test"))


@pytest.mark.parametrize("stacked", [False, True])
def test_derivatives_on_embedded_batches_are_those_on_the_batches(stacked: bool) -> None:
    (problem, batch), (plain, _) = network(), network(embed=False)
    x, y = problem.start
    v = y.map(lambda t: torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape))
    names = [
        "lower_gradient_y",
        "upper_gradient_y",
        "upper_gradient_x",
        "upper_gradients",
        "lower_gradients",
    ]
    second = [
        "hessian_product",
        "cross_product",
        "products",
        "hypergradient",
        "lower_gradient_and_product",
    ]

    def every(oracle: Oracle, batch: Any) -> list[Any]:
        first = [getattr(oracle, name)(x, y, batch) for name in names]
        products = [getattr(oracle, name)(x, y, v, batch) for name in second]
        return [first, products, oracle.difference_hypergradient(x, y, v, batch, 1e-3)]

    def embedded(batch: Batch) -> list[Any]:
        oracle = Oracle(problem)
        there = oracle.embed(x, batch)
        assert isinstance(there, Embedded)
        return every(oracle, there)

    expected = every(Oracle(plain), batch)
    if stacked:
        twice = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), batch)
        found = torch.utils._pytree.tree_map(lambda t: t[1], torch.func.vmap(embedded)(twice))
    else:
        found = embedded(batch)
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert Oracle(plain).embed(x, batch) is batch


def test_an_embedded_batch_runs_the_backbone_once() -> None:
    problem, batch = network()
    calls = []

    def counted(x: Tree, data: Any, rng: Any) -> Any:
        calls.append(1)
        return problem.embed(x, data, rng)  # type: ignore[misc]

    oracle = Oracle(dataclasses.replace(problem, embed=counted))
    x, y = problem.start
    on_client(RABO(neumann_steps=7)).local_hypergradient(oracle, x, y, oracle.embed(x, batch))
    assert len(calls) == 2, "once for each side"


def test_directional_differences_agree_to_their_error() -> None:
    problem, batch = network()
    x, y = problem.start
    y = y.map(lambda t: t + 0.5)
    settings: dict[str, Any] = {"neumann_lr": 0.3, "neumann_steps": 6}

    def estimate(method: RABO) -> Tree:
        oracle = Oracle(problem)
        return on_client(method).local_hypergradient(oracle, x, y, oracle.embed(x, batch))

    exact = estimate(RABO(**settings))
    errors = [
        float(norm(estimate(RAFBO(**settings, width=w)) - exact) / norm(exact))
        for w in (0.2, 0.1, 3e-3)
    ]
    assert 3.5 < errors[0] / errors[1] < 4.5, "the error is of the order of width^2"
    assert errors[2] < 1e-5


def test_the_error_of_a_difference_does_not_depend_on_the_length_of_its_direction() -> None:
    problem, batch = network()
    (x, y), oracle = problem.start, Oracle(problem)
    v = y.map(lambda t: torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape))
    f_x = oracle.upper_gradient_x(x, y, batch)
    one, many = (
        oracle.difference_hypergradient(x, y, k * v, batch, 0.1) - f_x for k in (1.0, 1000.0)
    )
    assert float(norm(many - 1000.0 * one)) < 1e-9 * float(norm(many))


@pytest.mark.parametrize("dim_x", [3, 30])
def test_the_cost_of_a_difference_does_not_depend_on_the_size_of_x(dim_x: int) -> None:
    task = fb.tasks.load("quadratic", clients=2, dim_x=dim_x)
    run = fb.solve(task.problem, task.clients, RAFBO(**STEPS), rounds=2)
    assert run.history[-1]["gradients"] == 2 * (1 + 1 + 2 * 4 + 3)


def test_the_printed_estimator_ascends() -> None:
    """At the solved lower level its direction has a negative product with the true hypergradient, and Phi grows."""
    task = fb.tasks.load("quadratic", clients=3, dim_x=4, condition=2.0, heterogeneity=0.0, seed=1)
    far = [
        dataclasses.replace(c, val=(50 * c.val[0], 0 * c.val[1], 0 * c.val[2]))
        for c in task.clients
    ]  # f = |y - e|^2 / 2 + |x|^2 / 2 with e far away: the indirect term is nearly all there is
    task = dataclasses.replace(task, clients=far)
    settings = STEPS | {"lr_x": 1e-3, "lr_y": 0.5, "lower_steps": 50, "neumann_steps": 60}

    def phi_after(method: RABO) -> float:
        return float(task.phi(fb.solve(task.problem, task.clients, method, rounds=20).x))

    start = float(task.phi(task.problem.x))
    right, printed = RAFBO(**settings, width=1.0), RAFBO(**settings, width=1.0, estimator="printed")
    assert phi_after(RABO(**settings)) < start
    assert phi_after(right) < start
    assert phi_after(printed) > start
    fed = fb.simulated_federation(task.problem, task.clients)
    x = Tree(task.problem.x)
    h = fed.ask(on_client(printed), range(3), x=x, y=task.y_star(x)).coverage_mean("h")
    assert cosine(h, task.gradient(x)) < -0.5


def test_the_response_of_the_lower_level_has_the_neumann_sum_as_expectation() -> None:
    task = fb.tasks.load("quadratic", clients=1, dim_x=3, dim_y=2, seed=2)
    method = RAFBO(neumann_lr=0.7, neumann_steps=4, estimator="response", directions=20)
    x, y = (
        Tree(x=torch.tensor([0.3, -1.0, 0.5]).double()),
        Tree(y=torch.tensor([0.2, 0.4]).double()),
    )
    client = task.clients[0]

    def draw(key: Tensor) -> Tensor:
        batch = Batch(client.train, client.val, key)
        return flatten(on_client(method).local_hypergradient(Oracle(task.problem), x, y, batch))

    draws = torch.func.vmap(draw)(fold_in(root(1, "response"), torch.arange(400)))
    found, spread = draws.mean(0), draws.std(0) / len(draws) ** 0.5
    A, B, _, e, t, D = (part[0] for part in (*client.train, *client.val))
    expected = x["x"] - t + D.T @ y["y"] + B.T @ neumann(A, y["y"] - e + D @ x["x"], 0.7, 3)
    assert bool((spread < 0.1).all())
    assert bool(((found - expected).abs() < 4 * spread).all())


@pytest.mark.parametrize("method", [RABO, RAFBO])
def test_private_lower_levels_have_a_solution_of_their_own(method: type[RABO]) -> None:
    """Every client is one episode: sum_i grad Phi_i(x) = 0 with Phi_i(x) = f_i(x, y_i*(x)), linear in x."""
    task = fb.tasks.load("quadratic", clients=4, condition=1.5, heterogeneity=1.0, seed=3)
    problem = dataclasses.replace(task.problem, lower_level="private")
    parts = [[part.mean(0) for part in (*client.train, *client.val)] for client in task.clients]

    def total(x: Tensor) -> Tensor:
        slopes = []
        for A, B, c, e, t, D in parts:
            y = torch.linalg.solve(A, B @ x + c)
            slopes.append(x - t + D.T @ y + B.T @ torch.linalg.solve(A, y - e + D @ x))
        return torch.stack(slopes).mean(0)

    goal = zero_of(total, 5)
    settings = STEPS | {"lr_x": 0.4, "lr_y": 1.0, "lower_steps": "20 epochs", "neumann_steps": 20}
    width = {"width": 1.0} if method is RAFBO else {}
    result = fb.solve(problem, task.clients, method(**settings, **width), rounds=48)
    assert float((goal - task.x_star()["x"]).norm()) > 0.1, (
        "the shared problem has another solution"
    )
    torch.testing.assert_close(result.x["x"], goal, rtol=0, atol=1e-6)
    assert result.history[-1]["iteration"] == result.history[-1]["round"] == 48


def test_the_shared_start_moves_by_the_mean_displacement_of_the_episodes() -> None:
    task = fb.tasks.load("quadratic", clients=3, heterogeneity=1.0)
    problem, ends = dataclasses.replace(task.problem, lower_level="private"), []
    (x, y), lr = problem.start, 0.5
    for client in task.clients:
        A, B, c = (part.mean(0) for part in client.train)
        here = y["y"]
        for _ in range(2):
            here = here - lr * (A @ here - B @ x["x"] - c)
        ends.append(here)
    result = fb.solve(problem, task.clients, RABO(**STEPS | {"lower_steps": 2}), rounds=1)
    torch.testing.assert_close(result.y["y"], torch.stack(ends).mean(0), rtol=0, atol=1e-12)


def test_both_sides_of_an_episode_are_drawn_together() -> None:
    """With a private lower level sample j is the same on both sides, and so is the key."""
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(x: Tree, y: Tree, data: Any, rng: Tensor) -> Tensor:
        seen.append((data[0].clone(), rng.clone()))
        return 0.5 * dot(y, y) + (x["x"] * data[0].sum()).sum() * 0

    problem = fb.Problem(
        upper=loss,
        lower=loss,
        x={"x": torch.zeros(1)},
        y={"y": torch.ones(1)},
        lower_level="private",
    )
    numbers = torch.arange(20.0)
    clients = [fb.ClientData(train=(numbers,), val=(numbers,))]
    environment = fb.Environment(batch_size=4, local_steps=3)
    fed = fb.simulated_federation(problem, clients, environment, mode="loop")
    seen.clear()
    fed.ask(
        RABO(lower_steps=1, neumann_steps=1).episodes(), [0], x=problem.start[0], y=problem.start[1]
    )
    batches, keys = zip(*seen, strict=True)
    assert (
        len({tuple(batch.tolist()) for batch in batches}) == len({int(key) for key in keys}) == 3
    ), "an episode a step"
    seen.clear()
    fed.transport.losses(*problem.start)
    assert len(seen) > 1
    assert len({(*batch.tolist(), int(key)) for batch, key in seen}) == 1, (
        "what a run records is of an episode too"
    )
    uneven = fb.ClientData(train=(numbers,), val=(numbers[:5],))
    for i, federated in enumerate(([uneven], [*clients, uneven])):
        with pytest.raises(
            ValueError, match=f"client {i}, before round 1: train holds 20 samples and val 5; with"
        ):
            fb.solve(problem, federated, "rabo", rounds=1)
    late = fb.simulated_federation(problem, [*clients, uneven])
    with pytest.raises(
        ValueError, match="client 1, phase 'episodes', round 1: train holds 20 samples and val 5"
    ):
        late.ask(RABO().episodes(), [1], x=problem.start[0], y=problem.start[1])


REFUSED = {
    "global, private": (
        {"hypergradient": "global"},
        "hypergradient is 'global'; with a private lower level",
    ),
    "steps of the environment": (
        {"lower_steps": None},
        "lower_steps is None; with a private lower level",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_for_episodes_is_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    problem = dataclasses.replace(task.problem, lower_level="private")
    with pytest.raises(ValueError, match=sentence):
        fb.solve(problem, task.clients, RABO(**changes), rounds=1)
    with pytest.raises(
        ValueError, match="estimator is 'printed'; with hypergradient 'global' it must be"
    ):
        RAFBO(estimator="printed", hypergradient="global")
