"""AFBO: equal to its synchronous form without delays, right with them, and right after losses, lies and amnesia."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.afbo import AFBO, Latest, State
from fedbilevel.delays import Faults, LogNormal, Pareto, Stragglers
from fedbilevel.federation import Federation
from fedbilevel.solve import Run

STEPS = {"server_lr_x": 0.05, "server_lr_y": 0.25, "server_lr_z": 0.25, "lr_x": 1e-10, "lr_y": 1e-10, "lr_z": 1e-10}
UNEQUAL: dict[str, Any] = {"delay": LogNormal(1.0, 0.5), "stragglers": Stragglers(2, 5.0), "participation": 2}
FAULTS = Faults(drop=0.1, duplicate=0.1, corrupt=0.1, leave=0.1, away_s=4.0)


@pytest.fixture
def task() -> Any:
    return fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)


def advance(task: Any, method: AFBO, iterations: int, run: Run | None = None, **environment: Any) -> Run:
    if run is None:
        fed = fb.SimulatedFederation(task.problem, task.clients, method, fb.Environment(**environment))
        run = Run(fed, {})
    for _ in range(iterations):
        run.advance()
    return run


def gap(task: Any, run: Run) -> float:
    """The true hypergradient, relative to that at the start."""
    start = task.gradient(task.problem.x)["x"].norm()
    return float(task.gradient(run.state.x)["x"].norm() / start)


@pytest.mark.parametrize("memory", ["server", "client"])
def test_without_delays_and_with_everyone_it_is_its_synchronous_form(task: Any, memory: Any) -> None:
    """That is ShroFBO, whose steps are larger by the mean of the local steps, here 2."""
    local = {"lr_x": 0.02, "lr_y": 0.1, "lr_z": 0.1}
    server = {"server_lr_x": 0.06, "server_lr_y": 0.4, "server_lr_z": 0.4}
    steps = [1, 2, 3, 1, 2, 3]
    ours = advance(task, AFBO(**local, **server, memory=memory), 12, local_steps=steps).state
    environment = fb.Environment(local_steps=steps)
    halved = fb.algorithms.ShroFBO(**local, **{name: value / 2 for name, value in server.items()})
    theirs = fb.solve(task.problem, task.clients, halved, rounds=12, environment=environment)
    torch.testing.assert_close(ours.x["x"], theirs.x["x"], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.y["y"], theirs.y["y"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"memory": "client"}, {"delay_aware": True}, {"inner_rounds": 3}], ids=str)
def test_with_unequal_speeds_it_goes_to_the_true_solution(task: Any, changes: Any) -> None:
    run = advance(task, AFBO(**STEPS, **changes), 500, local_steps=(1, 3), **UNEQUAL)
    assert run.fed.records()["max_staleness"] > 5
    assert gap(task, run) < 1e-3


class Arrivals(AFBO):
    """AFA-CD's rule: average whatever arrives."""

    def iterate(self, s: State, fed: Federation) -> State:
        return super().iterate(s._replace(latest=({}, 0.0, {})), fed)


def test_averaging_whatever_arrives_solves_the_problem_of_the_fast(task: Any) -> None:
    run = advance(task, Arrivals(**STEPS), 500, **UNEQUAL)
    assert gap(task, run) > 0.05
    heard = run.fed.ledger.phases["work"].gradients
    assert heard > 0


def fixed_point(task: Any, p: Any) -> Tensor:
    """Where grad_x F + B' p(x) = 0 for an estimate p that is linear in grad_y F."""
    A, B, c, e, t, D = task._means("uniform")

    def total(x: Tensor) -> Tensor:
        y = torch.linalg.solve(A, B @ x + c)
        return x - t + D.T @ y + B.T @ p(A, y - e + D @ x)

    zero = torch.zeros_like(t)
    columns = torch.stack([total(v) - total(zero) for v in torch.eye(len(t), dtype=t.dtype)], dim=1)
    return torch.linalg.solve(columns, -total(zero))


@pytest.mark.parametrize("terms", [2, 12])
def test_neumann_goes_to_its_truncated_solution(task: Any, terms: int) -> None:
    def p(A: Tensor, v: Tensor) -> Tensor:
        return sum(torch.linalg.matrix_power(torch.eye(4) - A, k) @ v for k in range(terms))  # type: ignore[return-value]

    method = AFBO(**STEPS, hypergradient="neumann", neumann_lr=1.0, neumann_steps=terms, inner_rounds=4)
    run = advance(task, dataclasses.replace(method, server_lr_x=0.1), 300, **UNEQUAL)
    torch.testing.assert_close(run.state.x["x"], fixed_point(task, p), rtol=0, atol=1e-3)
    assert (gap(task, run) > 0.05) == (terms == 2)


def test_the_printed_estimator_loses_the_indirect_term(task: Any) -> None:
    """Erratum 5: with all m factors p tends to 0 as m grows, and x to the minimiser of the direct term alone."""
    settings = STEPS | {"server_lr_x": 0.1}
    found = {}
    for estimator in ("printed", "random-truncation"):
        method = AFBO(**settings, hypergradient=estimator, neumann_lr=1.0, neumann_steps=12, inner_rounds=4)  # type: ignore[arg-type]
        found[estimator] = advance(task, method, 200)

    def p(A: Tensor, v: Tensor) -> Tensor:
        return 6 * torch.linalg.matrix_power(torch.eye(4) - A, 6) @ v

    torch.testing.assert_close(found["printed"].state.x["x"], fixed_point(task, p), rtol=0, atol=1e-2)
    assert gap(task, found["printed"]) > 0.3
    assert gap(task, found["random-truncation"]) < 0.5 * gap(task, found["printed"])


def test_barriers_are_charged_unless_the_server_is_said_to_know() -> None:
    task = fb.tasks.load("quadratic", clients=4)
    costs = {}
    for aphe in ("clients", "server"):
        method = AFBO(**STEPS, hypergradient="neumann", neumann_steps=5, aphe=aphe)  # type: ignore[arg-type]
        run = advance(task, method, 1, delay=LogNormal(1.0, 0.5))
        costs[aphe] = (run.fed.ledger.rounds, set(run.fed.ledger.phases), run.fed.now)
    assert costs["clients"][:2] == (1 + 1 + 4 + 1, {"inner", "start", "product", "hypergradient"})
    assert costs["server"][:2] == (1, {"inner"})
    assert costs["clients"][2] > 4 * costs["server"][2]


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("weights", ["uniform", [1, 2, 3, 1, 2, 3]], ids=["uniform", "weights"])
def test_memory_on_the_clients_gives_the_same_iterates(
    task: Any, faults: Any, weights: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="fedbilevel")
    states = []
    for memory in ("server", "client"):
        environment = fb.Environment(local_steps=(1, 3), faults=faults, **UNEQUAL)
        method = AFBO(**STEPS, memory=memory)  # type: ignore[arg-type]
        fed = fb.SimulatedFederation(task.problem, task.clients, method, environment, weights=weights)
        states.append(advance(task, method, 60, Run(fed, {})).state)
    assert (states[0].x["x"] - task.problem.x["x"]).norm() > 0.1
    for ours, theirs in zip(*((s.x["x"], s.y["y"], s.z["y"]) for s in states), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    said = Latest(*states[1].latest).said
    assert all(isinstance(number, float) for number in said.values()), "the server keeps numbers, not messages"


def test_a_client_that_loses_its_memory_makes_the_sums_begin_anew(task: Any) -> None:
    run = advance(task, AFBO(**STEPS, memory="client"), 100, **UNEQUAL)
    assert len(Latest(*run.state.latest).said) == 6
    del run.fed.engine.memories[next(iter(run.fed.engine.memories))]
    heard = []
    for _ in range(40):
        run.advance()
        heard.append(len(Latest(*run.state.latest).said))
    assert min(heard) < 3
    assert heard[-1] == 6
    assert gap(task, advance(task, AFBO(**STEPS), 500, run)) < 1e-3


def test_a_run_with_tasks_in_flight_resumes_bit_for_bit(task: Any, tmp_path: Any) -> None:
    environment = fb.Environment(local_steps=(1, 3), delay=Pareto(1.0, 2.0), participation=2, faults=FAULTS)

    def solve(rounds: int, folder: str, resume: bool = False) -> Any:
        method = AFBO(**STEPS, memory="client")
        return fb.solve(
            *(task.problem, task.clients, method),
            rounds=rounds,
            environment=environment,
            out=tmp_path / folder,
            resume=resume,
        )

    logging.getLogger("fedbilevel").setLevel(logging.ERROR)
    solve(23, "stopped")
    resumed, whole = solve(60, "stopped", resume=True), solve(60, "whole")
    assert torch.equal(resumed.x["x"], whole.x["x"])
    assert torch.equal(resumed.y["y"], whole.y["y"])
    assert resumed.history[-1]["virtual_s"] == whole.history[-1]["virtual_s"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hypergradient": "exact"}, "hypergradient is 'exact'; it must be one of"),
        ({"memory": "cloud"}, "memory is 'cloud'; it must be one of"),
        ({"aphe": "both"}, "aphe is 'both'; it must be one of"),
        ({"memory": "client", "hypergradient": "neumann"}, "hypergradient must be 'linear-system', not 'neumann'"),
        ({"inner_rounds": 0}, "inner_rounds is 0; it must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AFBO(**settings)
