"""AFBO: equal to its synchronous form without delays, right with them, and right after losses, lies and amnesia."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import afl
from fedbilevel.algorithms.afbo import AFBO, Latest, State
from fedbilevel.federation import Federation, Reply
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Pareto, Stragglers
from fedbilevel.runs.run import Run

STEPS = {
    "server_lr_x": 0.05,
    "server_lr_y": 0.25,
    "server_lr_z": 0.25,
    "lr_x": 1e-10,
    "lr_y": 1e-10,
    "lr_z": 1e-10,
}
UNEQUAL: dict[str, Any] = {
    "delay": LogNormal(1.0, 0.5),
    "stragglers": Stragglers(2, 5.0),
    "participation": 2,
}
FAULTS = Faults(drop=0.1, duplicate=0.1, corrupt=0.1, leave=0.1, away_s=4.0)


@pytest.fixture
def task() -> Any:
    return fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)


def advance(
    task: Any, method: AFBO, iterations: int, run: Run | None = None, **environment: Any
) -> Run:
    if run is None:
        fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(**environment))
        run = Run(method, fed, {})
    for _ in range(iterations):
        run.advance()
    return run


def gap(task: Any, run: Run) -> float:
    """The true hypergradient, relative to that at the start."""
    start = task.gradient(task.problem.x)["x"].norm()
    return float(task.gradient(run.state.x)["x"].norm() / start)


@pytest.mark.parametrize("memory", ["server", "client"])
def test_without_delays_and_with_everyone_it_is_its_synchronous_form(
    task: Any, memory: Any
) -> None:
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


@pytest.mark.parametrize("changes", [{}, {"memory": "client"}, {"inner_rounds": 3}], ids=str)
def test_with_unequal_speeds_it_goes_to_the_true_solution(task: Any, changes: Any) -> None:
    run = advance(task, AFBO(**STEPS, **changes), 350, local_steps=(1, 3), **UNEQUAL)
    assert run.fed.records()["max_staleness"] > 5
    assert gap(task, run) < 1e-2


def test_delay_aware_steps_are_divided_by_one_plus_the_mean_age(task: Any) -> None:
    """With 6 clients and 2 arrivals a round at equal delays, what is in the sums in round 3 is 0, 0, 1, 1, 2, 2 old."""
    run = advance(task, AFBO(**STEPS, delay_aware=True), 4, delay=Constant(1.0), participation=2)
    latest, before = Latest(*run.state.latest), run.state
    ages = [run.fed.iteration - 1 - number for number, _ in latest.said.values()]
    assert latest.age(run.fed.iteration - 1) == sum(ages) / 6 > 0
    run.advance()
    after = Latest(*run.state.latest)
    moved = (before.y["y"] - run.state.y["y"]) * (1 + after.age(4)) / STEPS["server_lr_y"]
    torch.testing.assert_close(moved, after.mean("hy", run.state.y)["y"], rtol=0, atol=1e-12)


def said(*messages: tuple[int, float], dtype: torch.dtype = torch.float32) -> Any:
    """Replies of clients of weight 1, each a number."""
    return [
        Reply(place, client, 1, 1.0, 0, {"hx": fb.Tree(x=torch.tensor([value], dtype=dtype))})
        for place, (client, value) in enumerate(messages)
    ]


def test_the_sums_forget_the_rounding_of_a_large_message() -> None:
    latest = Latest({}, 0.0, {}).renew(said((0, 1.0), (1, 1.0), (2, 1.0)), 0)
    for value in (1e9, 1.0):
        latest = latest.renew(said((0, value)), 1)
    assert float(latest.mean("hx", fb.Tree(x=torch.zeros(1)))["x"]) == 1.0


@pytest.mark.parametrize("memory", ["server", "client"])
def test_a_client_that_talks_nonsense_once_is_heard_again(task: Any, memory: Any) -> None:
    """Its own computation is not finite for a while; that must not stay in what it remembers."""
    sick = {"now": False}

    def lower(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return task.problem.lower(x, y, batch, ()) * (float("nan") if sick["now"] else 1.0)

    problem = dataclasses.replace(task.problem, lower=lower)
    fed = fb.simulated_federation(problem, task.clients, mode="loop")
    run = Run(AFBO(**STEPS, memory=memory), fed, {})
    for t in range(5):
        sick["now"] = t == 2
        run.advance()
    assert fed.ledger.refused_replies == 6
    assert Latest(*run.state.latest).age(4) == 0
    assert torch.isfinite(run.state.x["x"]).all()


def test_a_number_is_not_used_twice(task: Any) -> None:
    """A client that forgets, then loses a message, must not take an old acknowledgement for that message's."""
    run = advance(task, AFBO(**STEPS, memory="client"), 3)
    other = advance(task, AFBO(**STEPS), 3)
    run.fed.transport.executor.memories.clear()
    for here in (run, other):
        here.fed.transport.fates.faults = Faults(drop=0.9)
        here.advance()
        assert here.fed.ledger.lost_tasks > 0
        here.fed.transport.fates.faults = None
        for _ in range(3):
            here.advance()
    latest, truth = Latest(*run.state.latest), Latest(*other.state.latest)
    assert len(latest.said) == len(truth.said) == 6
    torch.testing.assert_close(run.state.x["x"], other.state.x["x"], rtol=0, atol=0.2)
    exact = [run.fed.transport.executor.memories[i]["sent"]["hx"]["x"] for i in range(6)]
    torch.testing.assert_close(
        latest.mean("hx", run.state.x)["x"], torch.stack(exact).mean(0), rtol=0, atol=1e-12
    )


def test_x_moves_once_in_inner_rounds(task: Any) -> None:
    run = advance(task, AFBO(**STEPS, inner_rounds=3), 0)
    moved = []
    for _ in range(7):
        before = run.state.x["x"]
        run.advance()
        moved.append(not torch.equal(before, run.state.x["x"]))
    assert moved == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("variant", ["cs", "cd"])
def test_afl_averages_all_that_was_said_or_what_has_just_arrived(task: Any, variant: Any) -> None:
    """Of six clients with equal delays 0 and 1 answer first, then 2 and 3, all of them about the start."""
    method = fb.algorithms.AFL(
        variant=variant, neumann_steps=2, neumann_lr=0.7, server_lr_x=0.3, server_lr_y=0.2
    )
    work = afl.Work(lr_x=0.01, lr_y=0.05, neumann_steps=2, neumann_lr=0.7)
    fed = fb.simulated_federation(task.problem, task.clients)
    x, y = task.problem.start
    said = [reply.values for reply in fed.ask(work, range(6), x=x, y=y)]
    run = advance(task, method, 1, delay=Constant(1.0), participation=2)
    first = run.state
    run.advance()
    heard = said[2:4] if variant == "cd" else said[:4]
    for name, lr in (("x", 0.3), ("y", 0.2)):
        mean = torch.stack([values[f"h{name}"][name] for values in heard]).mean(0)
        after = getattr(first, name)[name] - lr * mean
        torch.testing.assert_close(getattr(run.state, name)[name], after, rtol=0, atol=1e-12)


class Arrivals(AFBO):
    """AFA-CD's rule: average whatever arrives."""

    def iterate(self, s: State, fed: Federation) -> State:
        return super().iterate(s._replace(latest=({}, 0.0, {})), fed)


def test_averaging_whatever_arrives_solves_the_problem_of_the_fast(task: Any) -> None:
    run = advance(task, Arrivals(**STEPS), 250, **UNEQUAL)
    assert gap(task, run) > 0.05


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

    method = AFBO(
        **STEPS, hypergradient="neumann", neumann_lr=1.0, neumann_steps=terms, inner_rounds=4
    )
    run = advance(task, dataclasses.replace(method, server_lr_x=0.1), 300, **UNEQUAL)
    torch.testing.assert_close(run.state.x["x"], fixed_point(task, p), rtol=0, atol=1e-3)
    assert (gap(task, run) > 0.05) == (terms == 2)


def test_the_printed_estimator_loses_the_indirect_term(task: Any) -> None:
    """Erratum 5: with all m factors p tends to 0 as m grows, and x to the minimiser of the direct term alone."""
    settings = STEPS | {"server_lr_x": 0.1}
    found = {}
    for estimator in ("printed", "random-truncation"):
        method = AFBO(
            **settings, hypergradient=estimator, neumann_lr=1.0, neumann_steps=12, inner_rounds=4
        )  # type: ignore[arg-type]
        found[estimator] = advance(task, method, 200)

    def p(A: Tensor, v: Tensor) -> Tensor:
        return 6 * torch.linalg.matrix_power(torch.eye(4) - A, 6) @ v

    torch.testing.assert_close(
        found["printed"].state.x["x"], fixed_point(task, p), rtol=0, atol=1e-2
    )
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
        fed = fb.simulated_federation(task.problem, task.clients, environment, weights=weights)
        states.append(advance(task, method, 60, Run(method, fed, {})).state)
    assert (states[0].x["x"] - task.problem.x["x"]).norm() > 0.1
    for ours, theirs in zip(*((s.x["x"], s.y["y"], s.z["y"]) for s in states), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    said = Latest(*states[1].latest).said
    assert all(message == {} for _, message in said.values()), (
        "the server keeps numbers, not messages"
    )


def test_a_client_that_loses_its_memory_makes_the_sums_begin_anew(task: Any) -> None:
    run = advance(task, AFBO(**STEPS, memory="client"), 100, **UNEQUAL)
    assert len(Latest(*run.state.latest).said) == 6
    del run.fed.transport.executor.memories[next(iter(run.fed.transport.executor.memories))]
    heard = []
    for _ in range(40):
        run.advance()
        heard.append(len(Latest(*run.state.latest).said))
    assert min(heard) < 3
    assert heard[-1] == 6
    assert run.fed.records()["restarts"] > 0
    for _ in range(400):
        run.advance()
    assert gap(task, run) < 1e-2


def test_a_run_with_tasks_in_flight_resumes_bit_for_bit(
    task: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment = fb.Environment(
        local_steps=(1, 3), delay=Pareto(1.0, 2.0), participation=2, faults=FAULTS
    )

    def solve(rounds: int, folder: str, resume: bool = False) -> Any:
        method = AFBO(**STEPS, memory="client")
        return fb.solve(
            *(task.problem, task.clients, method),
            rounds=rounds,
            environment=environment,
            out=tmp_path / folder,
            resume=resume,
        )

    caplog.set_level(logging.ERROR, logger="fedbilevel")
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
        (
            {"memory": "client", "hypergradient": "neumann"},
            "hypergradient must be 'linear-system', not 'neumann'",
        ),
        ({"inner_rounds": 0}, "inner_rounds is 0; it must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AFBO(**settings)
