"""The conformance suite: every registered algorithm goes through it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO, State
from fedbilevel.federation import Federation
from tests.support.conformance import (
    NAMES,
    OWN_HEADS,
    build,
    case,
    check_converges,
    iterate,
    moved,
    quadratic,
    tensors,
)


def test_few_methods_do_not_take_the_quadratic_task() -> None:
    # Methods with personal heads: tests/algorithms/test_personal.py.
    assert set(fb.algorithms.names()) - set(NAMES) == {"protonet", *OWN_HEADS}


@pytest.mark.parametrize("name", NAMES)
def test_converges_to_what_it_solves(name: str) -> None:
    known = case(name)
    goal = None
    if fb.algorithms.get(name).solves == "global":
        assert known.goal is None
    else:
        assert known.goal, "a method that is not global needs the closed form of its goal"
        goal = functools.partial(known.goal, h=known.settings)
    check_converges(build(name), known.rounds, known.tolerance, goal)


# The bias of cutting planes has another reason, and its own test with those of ADBO.
LOCAL = [
    name
    for name in NAMES
    if fb.algorithms.get(name).solves == "local" and name not in ("sdbo", "adbo")
]


@pytest.mark.parametrize("name", LOCAL)
def test_local_methods_are_unbiased_on_identical_clients(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=3, condition=1.5, heterogeneity=0.0, seed=3)
    method = build(name, neumann_steps=12)  # the Neumann sum ends at (1/3)^12 = 2e-6
    options: dict[str, Any] = {"rounds": 160, "evaluate": task.evaluate, "every": 10**6}
    result = fb.solve(task.problem, task.clients, method, **options)
    first = result.history[0]["hypergradient_norm"]
    assert result.history[-1]["hypergradient_norm"] < 1e-5 * first


class Still(SimFBO):
    """Does nothing."""

    def iterate(self, s: State, fed: Federation) -> State:
        fed.ask(self.descend(), fed.sample(), x=s.x, y=s.y, z=s.z)
        return s


class Ascends(SimFBO):
    """Moves x uphill."""

    def iterate(self, s: State, fed: Federation) -> State:
        new = super().iterate(s, fed)
        return State(s.x + s.x - new.x, new.y, new.z)


class WithoutHessian(SimFBO):
    """Drops the indirect term: z stays 0."""

    def iterate(self, s: State, fed: Federation) -> State:
        return super().iterate(s, fed)._replace(z=s.z)


class FirstClientOnly(SimFBO):
    """Solves the problem of one client."""

    def iterate(self, s: State, fed: Federation) -> State:
        r = fed.ask(self.descend(), [0], x=s.x, y=s.y, z=s.z)
        x = s.x - self.server_lr_x * r.mean("qx")
        y = s.y - self.server_lr_y * r.mean("qy")
        z = s.z - self.server_lr_z * r.mean("qz")
        return State(x, y, z)


@pytest.mark.parametrize("broken", [Still, Ascends, WithoutHessian, FirstClientOnly])
def test_the_suite_refuses_broken_algorithms(broken: type[SimFBO]) -> None:
    with pytest.raises(AssertionError):
        check_converges(broken(**case("simfbo").settings), case("simfbo").rounds)


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
    assert {name for name in NAMES if case(name).cost is None} == {"aggitd", "fedmbo"}


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).cost])
def test_ledger_is_the_closed_form(name: str) -> None:
    task = quadratic(name, clients=4, dim_x=3, dim_y=2)
    steps = [1, 4, 2, 3]
    run = iterate(task, build(name), 3, environment={"local_steps": steps})
    totals = run.fed.ledger.totals()
    each = case(name).cost(steps, 8 * 3, 8 * 2)  # type: ignore[misc]
    expected = [3 * a + b for a, b in zip(each, case(name).once, strict=True)]
    counted = ("rounds", "bytes_down", "bytes_up", "gradients")
    assert [totals[key] for key in counted] == expected


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_run_another_seed_another_run(name: str) -> None:
    task = quadratic(name, clients=6, samples=8, noise=1.0)
    environment = {"participation": 3, "local_steps": (1, 3), "batch_size": 2}

    def end(seed: int) -> Tensor:
        return moved(iterate(task, build(name), 4, environment=environment, seed=seed))

    first = end(seed=0)
    assert torch.equal(first, end(seed=0))
    assert not torch.allclose(first, end(seed=1))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    name: str, tmp_path: Path
) -> None:
    task = quadratic(name, clients=5, samples=4, noise=1.0)
    environment = fb.Environment(participation=3, local_steps=(1, 3), batch_size=2)

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        return fb.solve(
            task.problem,
            task.clients,
            build(name),
            rounds=rounds,
            environment=environment,
            out=tmp_path / folder,
            resume=resume,
        )

    rounds = 3 * solve(1, "stopped").history[-1]["round"]
    resumed = solve(rounds, "stopped", resume=True)
    whole = solve(rounds, "whole")
    assert whole.history[-1]["iteration"] >= 2
    for ours, theirs in zip(
        tensors((resumed.x, resumed.y)), tensors((whole.x, whole.y)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_settings_are_refused_in_one_sentence(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(fb.algorithms.get(name))]
    steps = [field for field in fields if field.startswith(("lr_", "server_lr_"))]
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
def test_every_step_size_may_be_a_schedule(name: str) -> None:
    task = quadratic(name, clients=2)
    values = [0.3, 0.1, 0.05]
    steps = []
    for setting in case(name).settings:
        if setting.startswith(("lr_", "server_lr_")) and "bounds" not in setting:
            steps.append(setting)
    scheduled = build(name, **{step: lambda t: values[t] for step in steps})
    run = iterate(task, scheduled, 3)
    by_hand = iterate(task, build(name, **dict.fromkeys(steps, values[0])), 1)
    for value in values[1:]:
        by_hand.algorithm = build(name, **dict.fromkeys(steps, value))
        by_hand.advance()
    assert torch.equal(run.state.x["x"], by_hand.state.x["x"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped(SimFBO):
    """A method with a setting that is a function but not a schedule."""

    shape: Callable[[Tensor], Tensor] = torch.relu


def test_only_step_sizes_are_schedules() -> None:
    now = Shaped(lr_x=lambda t: 1 / (2 + t)).at(2)
    assert (now.lr_x, now.shape) == (0.25, torch.relu)


ONE_LOWER_LEVEL = [name for name in NAMES if len(fb.algorithms.get(name).lower_levels) == 1]


@pytest.mark.parametrize("name", ONE_LOWER_LEVEL)
def test_refuses_the_other_kind_of_problem(name: str) -> None:
    task = fb.tasks.load("quadratic", clients=2)
    (kind,) = {"shared", "private"} - set(fb.algorithms.get(name).lower_levels)
    problem = dataclasses.replace(task.problem, lower_level=kind)
    sentence = f"{name} is for a .* lower level; this problem's is {kind}"
    with pytest.raises(ValueError, match=sentence):
        fb.solve(problem, task.clients, build(name), rounds=1)


def test_simfbo_solves_the_reweighted_problem_and_shrofbo_the_real_one() -> None:
    """With fixed unequal tau_i and tiny local steps, both have closed forms."""
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
    real = task.x_star()["x"]
    reweighted = task.x_star(weights=steps)["x"]
    assert (real - reweighted).norm() > 0.1
    for method, goal in ((SimFBO, reweighted), (ShroFBO, real)):
        run = iterate(task, method(**settings), 200, environment={"local_steps": steps})
        torch.testing.assert_close(run.state.x["x"], goal, rtol=0, atol=1e-5)


def test_simfbo_independent_batches_have_the_same_expectation_and_cost_seven_gradients() -> None:
    together = build("simfbo")
    apart = build("simfbo", independent_batches=True)
    task = fb.tasks.load("quadratic", clients=1, samples=1)
    shared = iterate(task, together, 3, environment={"local_steps": 2})
    independent = iterate(task, apart, 3, environment={"local_steps": 2})
    torch.testing.assert_close(shared.state.x["x"], independent.state.x["x"], rtol=0, atol=1e-12)
    assert independent.fed.ledger.totals()["gradients"] == 7 * 2 * 3
    noisy = fb.tasks.load("quadratic", clients=1, samples=16, noise=1.0)
    shared = iterate(noisy, together, 1, environment={"batch_size": 2})
    independent = iterate(noisy, apart, 1, environment={"batch_size": 2})
    assert not torch.allclose(shared.state.x["x"], independent.state.x["x"])
    assert independent.fed.ledger.totals()["samples"] == 3 * shared.fed.ledger.totals()["samples"]


def test_damping_solves_the_damped_system() -> None:
    """At the fixed point (A + damping) z = grad_y F, so x solves grad_x F + B'z = 0 with that z."""
    task = fb.tasks.load("quadratic", clients=1, condition=2.0)
    state = iterate(task, build("simfbo", damping=0.5), 600).state
    A, B, _, e, t, D = (part[0] for part in (*task.clients[0].train, *task.clients[0].val))
    x = state.x["x"]
    y = state.y["y"]
    z = state.z["y"]
    torch.testing.assert_close((A + 0.5 * torch.eye(4)) @ z, y - e + D @ x, rtol=0, atol=1e-8)
    torch.testing.assert_close(x - t + D.T @ y + B.T @ z, torch.zeros_like(x), rtol=0, atol=1e-8)
