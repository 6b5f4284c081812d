"""Variables that belong to the clients: every method that allows them ends in the closed form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.asfbo import Descend as AdaptiveDescend
from fedbilevel.algorithms.simfbo import Descend, Local, SimFBO, State
from fedbilevel.algorithms.unifbo import OwnMoves
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run
from tests.support.conformance import build, case
from tests.support.owners import (
    client_owned,
    own_x_gradient,
    own_x_solution,
    own_y_gradient,
    own_y_solution,
    personal,
)

WEIGHTS = [0.1, 0.3, 0.2, 0.25, 0.15]
# Step sizes with which runs are short; a client's own variables move by the local ones.
_FAST = {"lr_y": 0.9, "lr_z": 0.9, "server_lr_x": 0.15}
SETTINGS: dict[str, Any] = {
    "simfbo": _FAST,
    "shrofbo": _FAST,
    "afbo": _FAST,
    "asfbo": {**_FAST, "server_lr_x_bounds": (0.15, 0.16)},
    "la-asfbo": {**_FAST, "server_lr_x_bounds": (0.15, 0.16)},
    "unifbo": {"lr_x": 0.3, "momentum_weight": 1.0},
    "fedbio": {"lr_x": 0.15, "lr_y": 0.9, "lr_z": 0.9},
    "fedbioacc": {"lr_x": 0.15, "lr_y": 0.7, "lr_z": 0.7},
    "rabo": {"solver": "cg", "neumann_steps": 6, "lower_steps": 2},
    "rafbo": {"solver": "cg", "neumann_steps": 6, "lower_steps": 2, "width": 1.0},
    "fednest": {"lower_steps": 2, "inner_rounds": 1, "neumann_steps": 15, "lr_x": 0.4},
}
ROUNDS = {"fednest": 3 * 40, "aggitd": 800, "unifbo": 240, "fedbioacc": 350}


def owning(level: str) -> list[str]:
    """The bilevel methods for variables of a level that belong to the clients."""
    names = []
    for name in fb.algorithms.names():
        algorithm = fb.algorithms.get(name)
        if level in algorithm.client_levels and algorithm.solves != "single":
            names.append(name)
    return names


def method(name: str, level: str) -> Any:
    settings = SETTINGS.get(name, {})
    if level == "x" and "server_lr_x" in case(name).settings:
        settings = {"lr_x": 0.15, "server_lr_y": 0.9, "server_lr_z": 0.9}
        if "server_lr_y_bounds" in case(name).settings:
            bounds = (0.9, 0.95)
            settings |= {"server_lr_y_bounds": bounds, "server_lr_z_bounds": bounds}
    return build(name, **settings)


def test_the_methods_for_variables_of_clients() -> None:
    solve_y = {"simfbo", "shrofbo", "unifbo", "fedbio", "aggitd", "fednest", "rabo", "afbo"}
    assert solve_y | {"asfbo", "la-asfbo", "rafbo", "fedbioacc"} == set(owning("y"))
    solve_x = {"simfbo", "shrofbo", "asfbo", "la-asfbo", "unifbo", "fedbio", "afbo"}
    assert set(owning("x")) == solve_x


def solve(task: Any, algorithm: Any, rounds: int, **options: Any) -> fb.Result:
    options = {"weights": WEIGHTS, "every": rounds, **options}
    return fb.solve(task.problem, task.clients, algorithm, rounds=rounds, **options)


def check_own_y(algorithm: Any, rounds: int, tolerance: float = 1e-6, **options: Any) -> None:
    """Check that a run ends where the mean of the clients' hypergradients is 0."""
    task = client_owned("y")
    x_star, y_star = own_y_solution(task, WEIGHTS)
    slope = own_y_gradient(task, torch.zeros_like(x_star), WEIGHTS).norm()
    shared = fb.tasks.load("quadratic", clients=5, condition=1.5, seed=3)
    assert slope > 0.1
    assert (shared.x_star(WEIGHTS)["x"] - x_star).norm() > 0.1, "sharing y makes no difference"
    result = solve(task, algorithm, rounds, **options)
    x = result.x["x"]
    assert own_y_gradient(task, x, WEIGHTS).norm() < tolerance * slope
    torch.testing.assert_close(personal(result, "y", 5), y_star, rtol=0, atol=10 * tolerance)
    assert result.y == {}


def check_own_x(algorithm: Any, rounds: int, tolerance: float = 1e-6, **options: Any) -> None:
    """Check that a run ends where the gradient in every client's x is 0."""
    task = client_owned("x")
    xs_star, y_star = own_x_solution(task, WEIGHTS)
    slope = own_x_gradient(task, torch.zeros_like(xs_star), WEIGHTS).norm()
    assert slope > 0.1
    result = solve(task, algorithm, rounds, **options)
    xs = personal(result, "x", 5)
    assert own_x_gradient(task, xs, WEIGHTS).norm() < tolerance * slope
    torch.testing.assert_close(result.y["y"], y_star, rtol=0, atol=10 * tolerance)
    assert result.x == {}


@pytest.mark.parametrize("name", owning("y"))
def test_own_y_ends_in_the_closed_form(name: str) -> None:
    check_own_y(method(name, "y"), ROUNDS.get(name, 130), case(name).tolerance)


def test_aggitd_with_own_y_has_the_mean_of_the_true_hypergradient() -> None:
    """Its draws Q make each step on x random, and only their mean has a closed form.

    y_i goes to y_i*(0) in the first iteration, x hardly moves, and the others take every Q once.
    """
    N = 14
    task = client_owned("y")
    method = build("aggitd", lr_x=1e-9, lr_y=0.9, inner_rounds=N, lower_steps=2, upper_steps=1)
    fed = fb.simulated_federation(task.problem, task.clients, weights=WEIGHTS)
    draws = iter([0, *range(N + 1)])
    fed.draw = lambda count: next(draws)  # type: ignore[method-assign]
    run = Run(method, fed, {})
    run.advance()
    start = run.state.x["x"]
    for _ in range(N + 1):
        run.advance()
    mean = (start - run.state.x["x"]) / (1e-9 * (N + 1))
    expected = own_y_gradient(task, torch.zeros(5, dtype=torch.float64), WEIGHTS)
    assert (mean - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("name", owning("x"))
def test_own_x_ends_in_the_closed_form(name: str) -> None:
    check_own_x(method(name, "x"), ROUNDS.get(name, 130), case(name).tolerance)


_AFBO: dict[str, Any] = {
    "lr_x": 0.05,
    "lr_y": 0.6,
    "lr_z": 0.6,
    "server_lr_x": 0.05,
    "server_lr_y": 0.2,
    "server_lr_z": 0.2,
}
_UNIFBO: dict[str, Any] = {"barrier": False, "momentum_weight": 1.0}


@pytest.mark.parametrize(
    ("name", "settings", "check", "rounds", "tolerance"),
    [
        ("afbo", _AFBO, check_own_x, 800, 1e-5),
        ("afbo", _AFBO, check_own_y, 450, 1e-6),
        ("unifbo", {**_UNIFBO, "lr_x": 0.3}, check_own_x, 800, 1e-5),
        ("unifbo", {**_UNIFBO, "lr_x": 0.1}, check_own_y, 600, 1e-6),
    ],
)
def test_clients_that_answer_at_any_time_end_in_the_closed_form(
    name: str, settings: dict[str, Any], check: Any, rounds: int, tolerance: float
) -> None:
    environment = fb.Environment(participation=2, delay=fb.delays.LogNormal())
    check(build(name, **settings), rounds, tolerance, environment=environment)


class Forgets(Descend):
    """Leaves every y_i where it started."""

    def own(self, c: Local) -> dict[str, Any]:
        return {"x": c.x, "z": c.z}


class WithoutIndirectTerm(Descend):
    """Leaves every z_i, and so the indirect part of the hypergradient, at 0."""

    def own(self, c: Local) -> dict[str, Any]:
        return {"x": c.x, "y": c.y}


class Ascends(Descend):
    """Moves what it owns uphill."""

    def step(self, c: Local, oracle: Oracle, batch: Any) -> Local:
        new = super().step(c, oracle, batch)
        return new._replace(x=c.x + c.x - new.x, y=c.y + c.y - new.y)


class KeepsTheMean(SimFBO):
    """Gives every client the y of the first one."""

    def iterate(self, s: State, fed: Federation) -> State:
        state = super().iterate(s, fed)
        memories = fed.transport.executor.memories  # type: ignore[attr-defined]
        for client in range(1, len(fed)):
            memories[client] = memories[0]
        return state


@pytest.mark.parametrize("phase", [Forgets, WithoutIndirectTerm, Ascends])
@pytest.mark.parametrize("check", [check_own_x, check_own_y])
def test_the_check_refuses_broken_phases(phase: type[Descend], check: Any) -> None:
    if check is check_own_x and phase is not Ascends:
        phase = type("Still", (Descend,), {"own": lambda self, c: {}})
    broken = type("Broken", (SimFBO,), {"local_phase": phase})
    level = check.__name__[-1]
    with pytest.raises(AssertionError):
        check(broken(**{**case("simfbo").settings, **_own_steps(level)}), 120)


def _own_steps(level: str) -> dict[str, Any]:
    return SETTINGS["simfbo"] if level == "y" else {"lr_x": 0.15}


@pytest.mark.parametrize("name", ["asfbo", "unifbo"])
def test_the_check_refuses_clients_that_do_not_move(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = {"asfbo": AdaptiveDescend, "unifbo": OwnMoves}[name]
    monkeypatch.setattr(phase, "own", lambda self, c: {})
    with pytest.raises(AssertionError):
        check_own_x(method(name, "x"), 100)


def test_the_check_refuses_a_common_y() -> None:
    with pytest.raises(AssertionError):
        check_own_y(KeepsTheMean(**{**case("simfbo").settings, **_own_steps("y")}), 120)


def test_hypergradient_is_the_closed_form() -> None:
    task = client_owned("y")
    x = {"x": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    gradient = fb.hypergradient(task.problem, task.clients, x, weights=WEIGHTS)
    expected = own_y_gradient(task, x["x"], WEIGHTS)
    torch.testing.assert_close(gradient["x"], expected, rtol=0, atol=1e-12)
    y = fb.solve_lower(task.problem, task.clients, x, weights=WEIGHTS)
    assert y["y"].shape == (5, 4)
    task = client_owned("x")
    xs = torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(5, 5)
    for solver in ("exact", "cg"):
        gradient = fb.hypergradient(task.problem, task.clients, {"x": xs}, solver, WEIGHTS)
        expected = own_x_gradient(task, xs, WEIGHTS)
        torch.testing.assert_close(gradient["x"], expected, rtol=0, atol=1e-9)
    slope = fb.finite_difference(
        task.problem, task.clients, {"x": xs}, {"x": torch.ones_like(xs)}, weights=WEIGHTS
    )
    assert slope == pytest.approx(float(expected.sum()), abs=1e-6)
    with pytest.raises(ValueError, match=r"x\['x'\] has shape \(5,\); it must have \(5, 5\)"):
        fb.hypergradient(task.problem, task.clients, {"x": xs[0]})


def mixed(task: Any) -> fb.Problem:
    """The quadratic problem with a y of two parts: the server's and the clients'."""

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        A, B, c = (part.mean(0) for part in batch)
        whole = torch.cat([y["server"], y["client"]])
        return 0.5 * whole @ A @ whole - whole @ (B @ x["x"] + c)

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        e, t, D = (part.mean(0) for part in batch)
        whole = torch.cat([y["server"], y["client"]])
        return 0.5 * ((whole - e) ** 2).sum() + 0.5 * ((x["x"] - t) ** 2).sum() + whole @ D @ x["x"]

    zeros = torch.zeros(2, dtype=torch.float64)
    y = {"client": zeros, "server": zeros}
    return fb.Problem(upper, lower, task.problem.x, y, owner={"client": "client"})


def _mixed_method(name: str) -> Any:
    settings: dict[str, Any] = {"lr_y": 0.5, "lr_z": 0.5}
    if "server_lr_x" in case(name).settings:
        settings |= {"server_lr_x": 0.15, "server_lr_y": 0.5, "server_lr_z": 0.5}
    return build(name, **settings)


@pytest.mark.parametrize("name", ["simfbo", "shrofbo", "fedbio", "unifbo", "afbo"])
def test_a_y_of_which_clients_own_a_part(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=5, condition=1.5, seed=3)
    problem = mixed(task)
    start = fb.hypergradient(problem, task.clients, problem.x, weights=WEIGHTS)["x"].norm()
    result = solve(dataclasses.replace(task, problem=problem), _mixed_method(name), 300)
    assert result.y.keys() == {"server"}
    end = fb.hypergradient(problem, task.clients, result.x, weights=WEIGHTS)["x"].norm()
    assert end < 1e-6 * start


@pytest.mark.parametrize("name", ["rabo", "fednest", "aggitd"])
def test_methods_with_inner_loops_need_all_of_y_or_none(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    sentence = rf"{name} needs all of y .*, but this problem's owner leaves 'server' to the server"
    with pytest.raises(ValueError, match=sentence):
        fb.solve(mixed(task), task.clients, method(name, "y"), rounds=1)


OTHERS = [
    (name, level)
    for name in fb.algorithms.names()
    for level in ("x", "y")
    if level not in fb.algorithms.get(name).client_levels
]


@pytest.mark.parametrize(("name", "level"), OTHERS)
def test_other_methods_refuse_and_name_those_that_can(name: str, level: str) -> None:
    task = client_owned(level, clients=2)
    sentence = rf"needs {level} on the server, but this problem's owner gives '{level}' .*simfbo"
    with pytest.raises(ValueError, match=sentence) as error:
        fb.algorithms.get(name)().check(task.problem, fb.Environment())
    assert "\n" not in str(error.value)


def test_unifbo_does_not_take_projected_steps_on_what_clients_own() -> None:
    task = client_owned("x")
    problem = dataclasses.replace(task.problem, project_x=lambda x: x)
    with pytest.raises(ValueError, match="owner gives 'x' to the clients, whose whitened steps"):
        fb.solve(problem, task.clients, "unifbo", rounds=1)


EVERYTHING = [(name, level) for level in ("x", "y") for name in owning(level)]


@pytest.mark.parametrize(("name", "level"), EVERYTHING)
def test_stack_and_loop_agree_and_nothing_that_clients_own_travels(name: str, level: str) -> None:
    task = client_owned(level, samples=4, noise=1.0, dim_x=3, dim_y=2)
    environment = fb.Environment(participation=3, local_steps=(1, 3), batch_size=2)
    results = []
    for mode in ("stack", "loop"):
        fed = fb.simulated_federation(task.problem, task.clients, environment, mode=mode)
        sent = watch(fed)
        results.append(
            fb.solve(task.problem, task.clients, method(name, level), rounds=12, federation=fed)
        )
        assert sent
        assert all(size == (2 if level == "x" else 3) for size in sent)
    stack, loop = results
    for client in range(5):
        for a, b in zip(stack.personal(client), loop.personal(client), strict=True):
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-12)
    costs = ("bytes_up", "bytes_down", "gradients", "samples")
    assert [stack.history[-1][key] for key in costs] == [loop.history[-1][key] for key in costs]
    assert stack.history[-1]["upper_loss"] == pytest.approx(loop.history[-1]["upper_loss"])


def watch(fed: Federation) -> list[int]:
    """The sizes of all tensors that cross the transport of a federation, from now on."""
    sizes: list[int] = []
    executor = fed.transport.executor  # type: ignore[attr-defined]
    run = executor.run

    def record(values: Any, leading: int) -> None:
        for value in values.values():
            for tensor in value.values() if isinstance(value, dict) else []:
                sizes.append(tensor.numel() // leading)

    def watched(tasks: Any, sums: bool = False) -> Any:
        for task in tasks:
            record(task.broadcast.wire_message, 1)
        for results in run(tasks, sums):
            record(results.values, len(results.tasks))
            yield results

    executor.run = watched
    return sizes


@pytest.mark.parametrize(("name", "level"), EVERYTHING)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    name: str, level: str, tmp_path: Path
) -> None:
    task = client_owned(level, samples=4, noise=1.0)
    environment = fb.Environment(participation=3, local_steps=(1, 3), batch_size=2)

    def run(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        out = tmp_path / folder
        options = {"environment": environment, "out": out, "resume": resume, "every": 1}
        return solve(task, method(name, level), rounds, **options)

    first = run(1, "stopped").history[-1]["round"]
    resumed = run(3 * first, "stopped", resume=True)
    whole = run(3 * first, "whole")
    loaded = fb.load_run(tmp_path / "stopped")
    moved = False
    for client in range(5):
        for ours, theirs, read, start in zip(
            resumed.personal(client),
            whole.personal(client),
            loaded.personal(client),
            (task.problem.x, task.problem.y),
            strict=True,
        ):
            for key in ours:
                assert torch.equal(ours[key], theirs[key])
                assert torch.equal(ours[key], read[key])
                moved |= not torch.equal(ours[key], start[key])
    assert moved
