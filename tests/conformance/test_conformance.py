"""Every registered algorithm goes through this suite by being registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO, State
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run

from .cases import CASES, Case


def quadratic(name: str, **options: Any) -> fb.tasks.Task:
    """The yardstick with a lower level that this method is for. A private one has full batches for episodes."""
    task = fb.tasks.load("quadratic", **options)
    kind = fb.algorithms.get(name).lower_levels[0]
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, lower_level=kind))


def takes_quadratics(name: str) -> bool:
    """Some methods need more than two losses: features to compare, say. They have tests of their own."""
    try:
        fb.algorithms.get(name)().check(quadratic(name, clients=1).problem, fb.Environment())
    except ValueError:
        return False
    return True


NAMES = [name for name in fb.algorithms.names() if takes_quadratics(name)]


def test_who_is_tested_elsewhere() -> None:
    assert set(fb.algorithms.names()) - set(NAMES) == {
        "protonet"
    }  # tests/test_few_shot_baselines.py


def case(name: str) -> Case:
    if name not in CASES:
        pytest.fail(f"{name!r} is registered but has no case: add it to tests/conformance/cases.py")
    return CASES[name]


def build(name: str, **changes: Any) -> Algorithm:
    return fb.algorithms.get(name)(**{**case(name).settings, **changes})


def iterate(task: fb.tasks.Task, algorithm: Algorithm, iterations: int, **options: Any) -> Run:
    environment = fb.Environment(**options.pop("environment", {}))
    fed = fb.simulated_federation(task.problem, task.clients, environment, **options)
    run = Run(algorithm, fed, {})
    for _ in range(iterations):
        run.advance()
    return run


def uneven(task: fb.tasks.Task) -> fb.tasks.Task:
    """The task with clients of unequal size: client i keeps 2 + i % 3 training samples, or that many on both sides."""
    clients = []
    for i, c in enumerate(task.clients):
        fewer = [tuple(t[: 2 + i % 3] for t in side) for side in (c.train, c.val)]
        clients.append(
            fb.ClientData(fewer[0], fewer[1] if task.problem.lower_level == "private" else c.val)
        )
    return dataclasses.replace(task, clients=clients)


def check_converges(
    algorithm: Algorithm,
    rounds: int,
    tolerance: float = 1e-6,
    goal: Any = None,
    federate: Any = None,
) -> None:
    """On heterogeneous clients, full batches, everyone: to grad Phi = 0, or to a biased method's own `goal`.

    federate: makes the federation of a problem and its clients; by default it is a simulated one.
    """
    task = quadratic(algorithm.name, clients=5, condition=3.0, heterogeneity=1.0, seed=3)
    start, truth = task.problem.x, task.x_star()
    pooled = dataclasses.replace(task.problem, lower_level="shared")
    local = torch.stack(
        [torch.linalg.norm(fb.hypergradient(pooled, [c], truth)["x"]) for c in task.clients]
    )
    slope = task.gradient(start)["x"].norm()
    assert slope > 0.1, "the fixture is flat: it would accept any algorithm"
    assert local.min() > 0.1, (
        "the fixture's clients agree: it would accept a method that averages local solutions"
    )
    federation = federate and federate(task.problem, task.clients)
    options: dict[str, Any] = {"evaluate": task.evaluate, "every": rounds, "federation": federation}
    result = fb.solve(task.problem, task.clients, algorithm, rounds=rounds, **options)
    assert result.status == "completed"
    y = None
    if goal is None:
        assert result.history[-1]["hypergradient_norm"] < tolerance * slope
    else:
        found = goal(task)
        biased, y = found if isinstance(found, tuple) else (found, None)
        assert task.gradient({"x": biased})["x"].norm() > 0.1, (
            "the bias does not show on this fixture"
        )
        torch.testing.assert_close(result.x["x"], biased, rtol=0, atol=10 * tolerance)
    there = task.y_star(result.x)["y"] if y is None else y
    torch.testing.assert_close(result.y["y"], there, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_converges_to_what_it_solves(name: str) -> None:
    kind, mine = fb.algorithms.get(name).solves, case(name)
    assert (kind == "global") == (mine.goal is None), (
        "a method that is not global needs the closed form of its goal"
    )
    goal = mine.goal and (lambda task: mine.goal(task, mine.settings))  # type: ignore[misc]
    check_converges(build(name), mine.rounds, mine.tolerance, goal)


LOCAL = [name for name in NAMES if fb.algorithms.get(name).solves == "local"]


@pytest.mark.parametrize(
    "name", [name for name in LOCAL if name not in ("sdbo", "adbo")]
)  # theirs: tests/test_adbo.py
def test_local_methods_are_unbiased_on_identical_clients(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=3, condition=1.5, heterogeneity=0.0, seed=3)
    method = build(name, neumann_steps=12)  # the Neumann sum ends at (1/3)^12 = 2e-6
    result = fb.solve(
        task.problem, task.clients, method, rounds=160, evaluate=task.evaluate, every=10**6
    )
    assert result.history[-1]["hypergradient_norm"] < 1e-5 * result.history[0]["hypergradient_norm"]


class Still(SimFBO):
    """Does nothing."""

    def iterate(self, s: State, fed: Federation) -> State:
        fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        return s


class Ascends(SimFBO):
    """Moves x uphill."""

    def iterate(self, s: State, fed: Federation) -> State:
        return State(s.x + s.x - (new := super().iterate(s, fed)).x, new.y, new.z)


class WithoutHessian(SimFBO):
    """Drops the indirect term: z stays 0."""

    def iterate(self, s: State, fed: Federation) -> State:
        return super().iterate(s, fed)._replace(z=s.z)


class FirstClientOnly(SimFBO):
    """Solves the problem of one client."""

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.descend(), [0], x=s.x, y=s.y, z=s.z)
        h = self
        return State(
            s.x - h.server_lr_x * r.mean("qx"),
            s.y - h.server_lr_y * r.mean("qy"),
            s.z - h.server_lr_z * r.mean("qz"),
        )


@pytest.mark.parametrize("broken", [Still, Ascends, WithoutHessian, FirstClientOnly])
def test_the_suite_refuses_broken_algorithms(broken: type[SimFBO]) -> None:
    with pytest.raises(AssertionError):
        check_converges(broken(**case("simfbo").settings), case("simfbo").rounds)


def moved(run: Run) -> Tensor:
    """How far x and y came, as one vector."""
    x, y = run.fed.problem.start
    return torch.cat([run.state.x["x"] - x["x"], run.state.y["y"] - y["y"]])


def tensors(state: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changes", [{}, {"radius": 0.3}], ids=["settings", "small radius"])
def test_one_client_is_the_centralised_method(name: str, changes: dict[str, Any]) -> None:
    if not changes.keys() <= case(name).settings.keys():
        changes = {"lr_y": 0.3}
    if callable(case(name).settings["lr_x"]):
        changes = {**changes, "lr_x": 0.07}
    task = quadratic(name, clients=1, seed=4)
    settings = case(name).settings | changes
    run = iterate(task, build(name, **changes), 6, environment={"local_steps": 3})
    matrices = tuple(part[0] for part in (*task.clients[0].train, *task.clients[0].val))
    twin = fb.simulated_federation(task.problem, task.clients)
    x, y = case(name).centralised(matrices, settings, 3, 6, twin.draw)  # type: ignore[arg-type]
    torch.testing.assert_close(run.state.x["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state.y["y"], y, rtol=0, atol=1e-12)


def test_only_randomised_methods_have_no_closed_form_of_their_cost() -> None:
    assert {name for name in NAMES if case(name).cost is None} == {
        "aggitd",
        "fedmbo",
    }  # tests/test_nested.py has theirs


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).cost])
def test_ledger_is_the_closed_form(name: str) -> None:
    task = quadratic(name, clients=4, dim_x=3, dim_y=2)
    steps = [1, 4, 2, 3]
    run = iterate(task, build(name), 3, environment={"local_steps": steps})
    totals = run.fed.ledger.totals()
    each, once = case(name).cost(steps, 8 * 3, 8 * 2), case(name).once  # type: ignore[misc]
    expected = tuple(3 * a + b for a, b in zip(each, once, strict=True))
    assert (
        totals["rounds"],
        totals["bytes_down"],
        totals["bytes_up"],
        totals["gradients"],
    ) == expected


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_run_another_seed_another_run(name: str) -> None:
    task = quadratic(name, clients=6, samples=8, noise=1.0)
    environment = {"participation": 3, "local_steps": (1, 3), "batch_size": 2}
    first, again, other = (
        moved(iterate(task, build(name), 4, environment=environment, seed=seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    name: str, tmp_path: Path
) -> None:
    task = quadratic(name, clients=5, samples=4, noise=1.0)
    environment = fb.Environment(participation=3, local_steps=(1, 3), batch_size=2)

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        method, out = build(name), tmp_path / folder
        return fb.solve(
            task.problem,
            task.clients,
            method,
            rounds=rounds,
            environment=environment,
            out=out,
            resume=resume,
        )

    budget = 3 * solve(1, "stopped").history[-1]["round"]
    resumed, whole = solve(budget, "stopped", resume=True), solve(budget, "whole")
    assert whole.history[-1]["iteration"] >= 2
    assert all(map(torch.equal, tensors((resumed.x, resumed.y)), tensors((whole.x, whole.y))))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_settings_are_refused_in_one_sentence(name: str) -> None:
    steps = [
        f.name
        for f in dataclasses.fields(fb.algorithms.get(name))
        if f.name.startswith(("lr_", "server_lr_"))
    ]
    assert {"lr_x", "lr_y"} <= set(steps)
    for setting in steps:
        for value in (-0.1, 0.0, float("nan"), float("inf"), "fast", None):
            with pytest.raises((ValueError, TypeError), match=setting) as error:
                build(name, **{setting: value})
            assert "\n" not in str(error.value)
    for setting in ("radius", "neumann_lr", "neumann_steps", "inner_rounds", "lower_steps"):
        if setting in case(name).settings:
            with pytest.raises((ValueError, TypeError), match=setting):
                build(name, **{setting: -1})


@pytest.mark.parametrize("name", NAMES)
def test_schedules_stand_where_floats_do(name: str) -> None:
    task = quadratic(name, clients=2)
    values = [0.3, 0.1, 0.05]
    steps = [
        s for s in case(name).settings if s.startswith(("lr_", "server_lr_")) and "bounds" not in s
    ]
    scheduled = build(name, **{step: lambda t: values[t] for step in steps})
    run = iterate(task, scheduled, 3)
    by_hand = iterate(task, build(name, **dict.fromkeys(steps, values[0])), 1)
    for value in values[1:]:
        by_hand.algorithm = build(name, **dict.fromkeys(steps, value))
        by_hand.advance()
    assert torch.equal(run.state.x["x"], by_hand.state.x["x"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped(SimFBO):
    """A method with a setting that is a function and no schedule."""

    shape: Callable[[Tensor], Tensor] = torch.relu


def test_only_step_sizes_are_schedules() -> None:
    now = Shaped(lr_x=lambda t: 1 / (2 + t)).at(2)
    assert (now.lr_x, now.shape) == (0.25, torch.relu)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if len(fb.algorithms.get(name).lower_levels) == 1]
)
def test_refuses_the_other_kind_of_problem(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    (kind,) = {"shared", "private"} - set(fb.algorithms.get(name).lower_levels)
    problem = dataclasses.replace(task.problem, lower_level=kind)
    with pytest.raises(
        ValueError, match=f"{name} is for a .* lower level; this problem's is {kind}"
    ):
        fb.solve(problem, task.clients, build(name), rounds=1)


def test_simfbo_solves_the_reweighted_problem_and_shrofbo_the_real_one() -> None:
    """With fixed unequal tau_i and tiny local steps: the closed forms of algorithms under system heterogeneity."""
    task = fb.tasks.load("quadratic", clients=4, condition=3.0, seed=5)
    steps = [1, 2, 3, 5]
    settings = {
        "lr_x": 1e-7,
        "lr_y": 1e-7,
        "lr_z": 1e-7,
        "server_lr_x": 0.05,
        "server_lr_y": 0.4,
        "server_lr_z": 0.4,
    }
    real, reweighted = task.x_star()["x"], task.x_star(weights=steps)["x"]
    assert (real - reweighted).norm() > 0.1
    for method, goal in ((SimFBO, reweighted), (ShroFBO, real)):
        found = iterate(task, method(**settings), 200, environment={"local_steps": steps}).state.x[
            "x"
        ]
        torch.testing.assert_close(found, goal, rtol=0, atol=1e-5)


def test_simfbo_independent_batches_have_the_same_expectation_and_cost_seven_gradients() -> None:
    task = fb.tasks.load("quadratic", clients=1, samples=1)
    shared = iterate(task, build("simfbo"), 3, environment={"local_steps": 2})
    independent = iterate(
        task, build("simfbo", independent_batches=True), 3, environment={"local_steps": 2}
    )
    torch.testing.assert_close(shared.state.x["x"], independent.state.x["x"], rtol=0, atol=1e-12)
    assert independent.fed.ledger.totals()["gradients"] == 7 * 2 * 3
    noisy = fb.tasks.load("quadratic", clients=1, samples=16, noise=1.0)
    options = {"environment": {"batch_size": 2}}
    shared, independent = (
        iterate(noisy, build("simfbo", independent_batches=flag), 1, **options)
        for flag in (False, True)
    )
    assert not torch.allclose(shared.state.x["x"], independent.state.x["x"])
    assert independent.fed.ledger.totals()["samples"] == 3 * shared.fed.ledger.totals()["samples"]


def test_damping_solves_the_damped_system() -> None:
    """At the fixed point (A + damping) z = grad_y F, so x solves grad_x F + B'z = 0 with that z."""
    task = fb.tasks.load("quadratic", clients=1, condition=2.0)
    state = iterate(task, build("simfbo", damping=0.5), 600).state
    A, B, _, e, t, D = (part[0] for part in (*task.clients[0].train, *task.clients[0].val))
    x, y, z = state.x["x"], state.y["y"], state.z["y"]
    torch.testing.assert_close((A + 0.5 * torch.eye(4)) @ z, y - e + D @ x, rtol=0, atol=1e-8)
    torch.testing.assert_close(x - t + D.T @ y + B.T @ z, torch.zeros_like(x), rtol=0, atol=1e-8)
