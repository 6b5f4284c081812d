"""AFBO: synchronous without delays; right with delays, losses, NaN and lost memory."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.afbo import AFBO, State
from fedbilevel.algorithms.shared_asynchronous import MAX_LOSSES, NO_REPLIES, LatestReplies
from fedbilevel.core.tree import flatten, norm
from fedbilevel.federation import Federation, Reply
from fedbilevel.federation.delays import Constant, Faults, LogNormal, Pareto, Stragglers
from fedbilevel.runs.run import Run
from tests.support.architecture import names as architecture
from tests.support.cases import client_means, directions, zero_of
from tests.support.lies import let_lie

# Tiny local steps, so that the fixed point is that of the problem.
STEPS: dict[str, Any] = {
    "server_lr_x": 0.05,
    "server_lr_y": 0.25,
    "server_lr_z": 0.25,
    "lr_x": 1e-10,
    "lr_y": 1e-10,
    "lr_z": 1e-10,
}
UNEQUAL_SPEEDS: dict[str, Any] = {
    "delay": LogNormal(1.0, 0.5),
    "stragglers": Stragglers(2, 5.0),
    "participation": 2,
}
FAULTS = Faults(drop=0.1, duplicate=0.1, corrupt=0.1, leave=0.1, away_s=4.0)


@pytest.fixture
def task() -> Any:
    return fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)


def start(task: Any, method: fb.algorithms.Algorithm, **environment: Any) -> Run:
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(**environment))
    return Run(method, fed, {})


def advance(run: Run, iterations: int) -> Run:
    for _ in range(iterations):
        run.advance()
    return run


def relative_gradient(task: Any, run: Run) -> float:
    """The norm of the true hypergradient, relative to that at the start."""
    at_start = task.gradient(task.problem.x)["x"].norm()
    return float(task.gradient(run.state.x)["x"].norm() / at_start)


@pytest.mark.parametrize("memory", ["server", "client"])
def test_without_delays_and_with_everyone_it_is_shrofbo(task: Any, memory: Any) -> None:
    """ShroFBO multiplies its server steps by the mean number of local steps, here 2."""
    local = {"lr_x": 0.02, "lr_y": 0.1, "lr_z": 0.1}
    server = {"server_lr_x": 0.06, "server_lr_y": 0.4, "server_lr_z": 0.4}
    steps = [1, 2, 3, 1, 2, 3]
    run = start(task, AFBO(**local, **server, memory=memory), local_steps=steps)
    ours = advance(run, 12).state
    environment = fb.Environment(local_steps=steps)
    halved = {name: value / 2 for name, value in server.items()}
    shrofbo = fb.algorithms.ShroFBO(**local, **halved)
    theirs = fb.solve(task.problem, task.clients, shrofbo, rounds=12, environment=environment)
    torch.testing.assert_close(ours.x["x"], theirs.x["x"], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.y["y"], theirs.y["y"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"memory": "client"}, {"inner_rounds": 3}], ids=str)
def test_with_unequal_speeds_it_goes_to_the_true_solution(task: Any, changes: Any) -> None:
    run = start(task, AFBO(**STEPS, **changes), local_steps=(1, 3), **UNEQUAL_SPEEDS)
    advance(run, 350)
    assert run.fed.records()["max_staleness"] > 5
    assert relative_gradient(task, run) < 1e-2


LOCAL_STEPS = [1, 3, 5, 2, 4, 7]


def drifted_fixed_point(task: Any, scale: float) -> tuple[dict[str, float], State]:
    """Where the mean over clients of their mean directions along local paths is 0, by hand."""
    lr = {"lr_x": 0.03 * scale, "lr_y": 0.1 * scale, "lr_z": 0.05 * scale}
    sizes = [5, 4, 4]

    def mean_direction(u: Tensor) -> Tensor:
        means = []
        for m, steps in zip(client_means(task), LOCAL_STEPS, strict=True):
            local = u
            total = torch.zeros_like(u)
            for _ in range(steps):
                d = directions(m, *local.split(sizes))
                total = total + torch.cat(d)
                moves = [rate * part for rate, part in zip(lr.values(), d, strict=True)]
                local = local - torch.cat(moves)
            means.append(total / steps)
        return torch.stack(means).mean(0)

    x, y, z = zero_of(mean_direction, sum(sizes)).split(sizes)
    return lr, State(fb.Tree(x=x), fb.Tree(y=y), fb.Tree(y=z))


def test_local_steps_move_the_fixed_point_in_proportion_to_their_size(task: Any) -> None:
    """It is the solution of the problem only up to the drift of local steps."""
    distances = []
    for scale in (1.0, 0.1):
        lr, start = drifted_fixed_point(task, scale)
        environment = fb.Environment(local_steps=LOCAL_STEPS)
        fed = fb.simulated_federation(task.problem, task.clients, environment)
        end = AFBO(**lr, server_lr_x=1.0, server_lr_y=1.0, server_lr_z=1.0).iterate(start, fed)
        torch.testing.assert_close(end.x["x"], start.x["x"], rtol=0, atol=1e-10)
        torch.testing.assert_close(end.y["y"], start.y["y"], rtol=0, atol=1e-10)
        torch.testing.assert_close(end.z["y"], start.z["y"], rtol=0, atol=1e-10)
        distances.append(float((start.x["x"] - task.x_star()["x"]).norm()))
    assert distances[0] > 0.01
    assert 6 < distances[0] / distances[1] < 15


class AverageOfArrivals(AFBO):
    """The rule of AFA-CD: forget all replies but those that have just arrived."""

    def iterate(self, s: State, fed: Federation) -> State:
        return super().iterate(s._replace(latest=NO_REPLIES), fed)


def test_averaging_whatever_arrives_solves_the_problem_of_the_fast(task: Any) -> None:
    run = start(task, AverageOfArrivals(**STEPS), **UNEQUAL_SPEEDS)
    assert relative_gradient(task, advance(run, 250)) > 0.05


def test_delay_aware_steps_are_divided_by_one_plus_the_mean_age(task: Any) -> None:
    """With 6 clients, equal delays and 2 arrivals per iteration, ages are 0, 0, 1, 1, 2 and 2."""
    method = AFBO(**STEPS, delay_aware=True)
    run = advance(start(task, method, delay=Constant(1.0), participation=2), 4)
    latest = LatestReplies(*run.state.latest)
    ages = [run.fed.iteration - 1 - asked for asked, _ in latest.replies.values()]
    assert latest.mean_age(run.fed.iteration - 1) == sum(ages) / 6 > 0
    before = run.state
    run.advance()
    latest = LatestReplies(*run.state.latest)
    moved = (before.y["y"] - run.state.y["y"]) * (1 + latest.mean_age(4)) / STEPS["server_lr_y"]
    torch.testing.assert_close(moved, latest.mean("hy", run.state.y)["y"], rtol=0, atol=1e-12)


def replies_of(*values: tuple[int, float]) -> Any:
    """Replies of clients of weight 1, each with one number."""
    found = []
    for position, (client, value) in enumerate(values):
        tree = fb.Tree(x=torch.tensor([value]))
        found.append(Reply(position, client, 1, 1.0, 0, {"hx": tree}))
    return found


def test_the_sums_forget_the_rounding_of_a_large_reply() -> None:
    latest = LatestReplies(*NO_REPLIES)
    latest = latest.with_replies(replies_of((0, 1.0), (1, 1.0), (2, 1.0)), 0)
    for value in (1e9, 1.0):
        latest = latest.with_replies(replies_of((0, value)), 1)
    assert float(latest.mean("hx", fb.Tree(x=torch.zeros(1)))["x"]) == 1.0


@pytest.mark.parametrize("memory", ["server", "client"])
def test_a_client_that_sends_nan_once_is_heard_again(task: Any, memory: Any) -> None:
    """The NaN of one iteration must not stay in what a client remembers."""
    factor = 1.0

    def lower(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
        return task.problem.lower(x, y, batch, ()) * factor  # type: ignore[no-any-return]

    problem = dataclasses.replace(task.problem, lower=lower)
    fed = fb.simulated_federation(problem, task.clients, mode="loop")
    run = Run(AFBO(**STEPS, memory=memory), fed, {})
    for t in range(5):
        factor = float("nan") if t == 2 else 1.0
        run.advance()
    assert fed.ledger.refused_replies == 6
    assert LatestReplies(*run.state.latest).mean_age(4) == 0
    assert torch.isfinite(run.state.x["x"]).all()


def test_a_number_is_not_used_twice(task: Any) -> None:
    """A client that loses its memory and then a reply must not mistake an old acknowledgement.

    The acknowledgement of a reply from before is not one of the reply that was lost.
    """
    run = advance(start(task, AFBO(**STEPS, memory="client")), 3)
    other = advance(start(task, AFBO(**STEPS)), 3)
    memories = run.fed.transport.executor.memories  # type: ignore[attr-defined]
    memories.clear()
    for each in (run, other):
        outcomes = each.fed.transport.outcomes  # type: ignore[attr-defined]
        outcomes.faults = Faults(drop=0.9)
        each.advance()
        assert each.fed.ledger.lost_tasks > 0
        outcomes.faults = None
        advance(each, 3)
    latest = LatestReplies(*run.state.latest)
    assert len(latest.replies) == len(LatestReplies(*other.state.latest).replies) == 6
    torch.testing.assert_close(run.state.x["x"], other.state.x["x"], rtol=0, atol=0.2)
    mean = torch.stack([memories[i]["latest"]["hx"]["x"] for i in range(6)]).mean(0)
    torch.testing.assert_close(latest.mean("hx", run.state.x)["x"], mean, rtol=0, atol=1e-12)


def test_x_moves_once_in_inner_rounds(task: Any) -> None:
    run = start(task, AFBO(**STEPS, inner_rounds=3))
    moved = []
    for _ in range(7):
        before = run.state.x["x"]
        run.advance()
        moved.append(not torch.equal(before, run.state.x["x"]))
    assert moved == [False, False, True, False, False, True, False]


def fixed_point(task: Any, p: Any) -> Tensor:
    """Where grad_x F + B' p(x) = 0, for an estimate p that is linear in grad_y F."""
    A, B, c, e, t, D = task._means("uniform")

    def direction(x: Tensor) -> Tensor:
        y = torch.linalg.solve(A, B @ x + c)
        return x - t + D.T @ y + B.T @ p(A, y - e + D @ x)

    at_zero = direction(torch.zeros_like(t))
    columns = [direction(v) - at_zero for v in torch.eye(len(t), dtype=t.dtype)]
    return torch.linalg.solve(torch.stack(columns, dim=1), -at_zero)


@pytest.mark.parametrize("terms", [2, 12])
def test_neumann_goes_to_its_truncated_solution(task: Any, terms: int) -> None:
    def p(A: Tensor, v: Tensor) -> Tensor:
        factor = torch.eye(4) - A
        return sum(torch.linalg.matrix_power(factor, k) @ v for k in range(terms))  # type: ignore[return-value]

    method = AFBO(
        **STEPS | {"server_lr_x": 0.1},
        hypergradient="neumann",
        neumann_lr=1.0,
        neumann_steps=terms,
        inner_rounds=4,
    )
    run = advance(start(task, method, **UNEQUAL_SPEEDS), 300)
    torch.testing.assert_close(run.state.x["x"], fixed_point(task, p), rtol=0, atol=1e-3)
    assert (relative_gradient(task, run) > 0.05) == (terms == 2)


def test_the_printed_estimator_loses_the_indirect_term(task: Any) -> None:
    """With all m factors p tends to 0 as m grows, and x to the minimiser of the direct term."""
    runs = {}
    for estimator in ("printed", "random-truncation"):
        method = AFBO(
            **STEPS | {"server_lr_x": 0.1},
            hypergradient=estimator,  # type: ignore[arg-type]
            neumann_lr=1.0,
            neumann_steps=12,
            inner_rounds=4,
        )
        runs[estimator] = advance(start(task, method), 200)

    def p(A: Tensor, v: Tensor) -> Tensor:
        return 6 * torch.linalg.matrix_power(torch.eye(4) - A, 6) @ v

    x = runs["printed"].state.x["x"]
    torch.testing.assert_close(x, fixed_point(task, p), rtol=0, atol=1e-2)
    printed = relative_gradient(task, runs["printed"])
    assert printed > 0.3
    assert relative_gradient(task, runs["random-truncation"]) < 0.5 * printed


class CurvedClient(NamedTuple):
    """Losses whose Hessians and cross derivatives depend on the point, with derivatives by hand.

    f = |y - e|^2 / 2 + |x - t|^2 / 2 + sum_j x_j^2 y_j^2 / 4
    g = y' A y / 2 - y' (B x + c) + sum_j (y_j^4 / 12 + x_j^2 y_j^2 / 2)
    """

    A: Tensor
    B: Tensor
    c: Tensor
    e: Tensor
    t: Tensor

    def lower_gradient_y(self, x: Tensor, y: Tensor) -> Tensor:
        return self.A @ y - self.B @ x - self.c + y**3 / 3 + x**2 * y

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.A + torch.diag(y**2 + x**2)

    def cross_product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return -self.B.T @ v + 2 * x * y * v

    def upper_gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x - self.t + x * y**2 / 2, y - self.e + x**2 * y / 2


def curved_lower(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
    A, B, c = (part[0] for part in batch)
    u, w = x["x"], y["y"]
    quadratic = w @ A @ w / 2 - w @ (B @ u + c)
    return quadratic + (w**4 / 12 + u**2 * w**2 / 2).sum()


def curved_upper(x: fb.Tree, y: fb.Tree, batch: Any) -> Tensor:
    e, t = (part[0] for part in batch)
    u, w = x["x"], y["y"]
    return ((w - e) ** 2 / 2 + (u - t) ** 2 / 2 + u**2 * w**2 / 4).sum()


def curved_problem(count: int) -> tuple[fb.Problem, list[CurvedClient]]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clients = []
    for _ in range(count):
        root = draw(3, 3)
        A = torch.eye(3, dtype=torch.float64) + 0.3 * root @ root.T
        clients.append(CurvedClient(A, draw(3, 3), draw(3), draw(3), draw(3)))
    x = {"x": torch.full((3,), 0.4, dtype=torch.float64)}
    y = {"y": torch.full((3,), -0.3, dtype=torch.float64)}
    return fb.Problem(upper=curved_upper, lower=curved_lower, x=x, y=y), clients


DURATIONS = [1.0, 1.7, 2.9, 4.3, 17.1]
WEIGHTS = [0.1, 0.3, 0.2, 0.15, 0.25]


def algorithm_1(clients: list[CurvedClient], h: dict[str, Any], outer_delays: bool = True) -> Any:
    """Algorithm 1 of AFBO with its own event queue; two replies an iteration, 40 iterations.

    Without outer delays every client is fresh at each step on x.
    """
    m = len(clients)
    x = torch.full((3,), 0.4, dtype=torch.float64)
    y = torch.full((3,), -0.3, dtype=torch.float64)
    G: dict[int, Tensor] = {}
    point: dict[int, tuple[Tensor, Tensor]] = {}
    H: dict[int, Tensor] = {}
    flying: dict[int, tuple[float, int, Tensor]] = {}
    idle = list(range(m))
    arrived: set[int] = set()
    now = 0.0
    free_at = [0.0] * m
    ages = []

    def end_of_task(i: int) -> float:
        """A client does one thing at a time."""
        free_at[i] = max(now, free_at[i]) + DURATIONS[i]
        return free_at[i]

    def mean(values: dict[int, Tensor]) -> Tensor:
        total = sum(WEIGHTS[i] * value for i, value in values.items())
        return total / sum(WEIGHTS[i] for i in values)  # type: ignore[return-value]

    for iteration in range(40):
        for i in idle:
            local = y
            gradients = []
            for _ in range(1 + i % 3):
                gradients.append(clients[i].lower_gradient_y(x, local))
                local = local - 0.1 * gradients[-1]
            flying[i] = (end_of_task(i), iteration, torch.stack(gradients).mean(0))
        idle = []
        while flying:
            overdue = [t for _, t, _ in flying.values() if iteration - t >= h["max_delay"] - 1]
            if len(idle) >= 2 and not overdue:
                break
            i = min(flying, key=lambda i: flying[i][:2])
            end, posted, G[i] = flying.pop(i)
            now = max(now, end)
            idle.append(i)
            arrived.add(i)
            ages.append(iteration - posted)
        y = y - 0.2 * mean(G)
        if iteration % h["inner_rounds"] != h["inner_rounds"] - 1:
            continue
        fresh = arrived if outer_delays else set(range(m))
        point |= dict.fromkeys(fresh, (x, y))
        v = mean({j: clients[j].upper_gradients(*at)[1] for j, at in point.items()})
        factor = torch.eye(3) - 0.3 * mean({j: clients[j].hessian(*at) for j, at in point.items()})
        if h["hypergradient"] == "printed":
            products = m
            p = 0.3 * m * torch.linalg.matrix_power(factor, m) @ v
        else:
            products = 3
            p = 0.3 * sum(torch.linalg.matrix_power(factor, u) @ v for u in range(4))
        Jp = mean({j: clients[j].cross_product(*at, p) for j, at in point.items()})
        H |= {i: clients[i].upper_gradients(x, y)[0] - Jp for i in fresh}
        x = x - 0.1 * mean(H)
        if h["aphe"] == "clients":
            for asked in [arrived] + [point] * (products + 1):
                now = max(end_of_task(i) for i in asked)
        arrived = set()
    return x, y, now, max(ages)


@pytest.mark.parametrize("aphe", ["server", "clients"])
@pytest.mark.parametrize("hypergradient", ["printed", "neumann"])
@pytest.mark.parametrize(("inner_rounds", "max_delay"), [(1, None), (3, None), (2, 4), (2, 1)])
def test_aphe_is_algorithm_1_with_inner_and_outer_delays(
    tmp_path: Path, aphe: Any, hypergradient: Any, inner_rounds: int, max_delay: Any
) -> None:
    problem, clients = curved_problem(5)
    data = [
        fb.ClientData((A[None], B[None], c[None]), (e[None], t[None])) for A, B, c, e, t in clients
    ]
    durations = tmp_path / "durations.csv"
    durations.write_text("".join(f"{i},{s}\n" for i, s in enumerate(DURATIONS)))
    environment = fb.Environment(
        participation=2, local_steps=[1, 2, 3, 1, 2], delay=fb.delays.Trace(str(durations))
    )
    settings: dict[str, Any] = {
        "hypergradient": hypergradient,
        "inner_rounds": inner_rounds,
        "aphe": aphe,
    }
    method = AFBO(
        **settings,
        max_delay=max_delay,
        lr_y=0.1,
        server_lr_x=0.1,
        server_lr_y=0.2,
        neumann_lr=0.3,
        neumann_steps=4,
    )
    fed = fb.simulated_federation(problem, data, environment, weights=WEIGHTS)
    run = advance(Run(method, fed, {}), 40)
    x, y, now, oldest = algorithm_1(clients, settings | {"max_delay": max_delay or 1000})
    torch.testing.assert_close(run.state.x["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state.y["y"], y, rtol=0, atol=1e-12)
    records = run.fed.records()
    assert run.fed.now == pytest.approx(now)
    assert records["max_staleness"] == oldest
    assert (oldest == 0) == (max_delay == 1)
    if max_delay is not None:
        assert oldest == max_delay - 1
    if max_delay == 1 or aphe == "clients":
        return
    assert records["max_outer_age"] >= inner_rounds
    other, *_ = algorithm_1(clients, settings | {"max_delay": 1000}, outer_delays=False)
    assert (x - other).norm() > 1e-3, "the outer delays do not show"


def test_barriers_are_charged_unless_the_server_is_said_to_know() -> None:
    task = fb.tasks.load("quadratic", clients=4)
    settings = STEPS | {"hypergradient": "neumann", "neumann_steps": 5}
    delay = LogNormal(1.0, 0.5)
    charged = advance(start(task, AFBO(**settings, aphe="clients"), delay=delay), 1).fed
    free = advance(start(task, AFBO(**settings, aphe="server"), delay=delay), 1).fed
    assert charged.ledger.rounds == 1 + 1 + 4 + 1
    assert set(charged.ledger.phases) == {"inner", "gradients", "product", "cross"}
    assert free.ledger.rounds == 1
    assert set(free.ledger.phases) == {"inner"}
    assert charged.now > 4 * free.now


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("weights", ["uniform", [1, 2, 3, 1, 2, 3]], ids=["uniform", "weights"])
def test_memory_on_the_clients_gives_the_same_iterates(
    task: Any, faults: Any, weights: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="fedbilevel")
    environment = fb.Environment(local_steps=(1, 3), faults=faults, **UNEQUAL_SPEEDS)

    def final_state(memory: Any) -> State:
        fed = fb.simulated_federation(task.problem, task.clients, environment, weights=weights)
        state: State = advance(Run(AFBO(**STEPS, memory=memory), fed, {}), 60).state
        return state

    on_server = final_state("server")
    on_clients = final_state("client")
    assert (on_server.x["x"] - task.problem.x["x"]).norm() > 0.1
    torch.testing.assert_close(on_clients.x["x"], on_server.x["x"], rtol=0, atol=1e-10)
    torch.testing.assert_close(on_clients.y["y"], on_server.y["y"], rtol=0, atol=1e-10)
    torch.testing.assert_close(on_clients.z["y"], on_server.z["y"], rtol=0, atol=1e-10)
    replies = LatestReplies(*on_clients.latest).replies
    assert all(values == {} for _, values in replies.values()), "the server keeps numbers only"


def test_a_client_that_loses_its_memory_makes_the_sums_restart(task: Any) -> None:
    run = advance(start(task, AFBO(**STEPS, memory="client"), **UNEQUAL_SPEEDS), 100)
    assert len(LatestReplies(*run.state.latest).replies) == 6
    memories = run.fed.transport.executor.memories  # type: ignore[attr-defined]
    del memories[next(iter(memories))]
    heard = []
    for _ in range(40):
        run.advance()
        heard.append(len(LatestReplies(*run.state.latest).replies))
    assert min(heard) < 3
    assert heard[-1] == 6
    assert run.fed.records()["restarts"] > 0
    advance(run, 400)
    assert relative_gradient(task, run) < 1e-2


def say_that_memory_is_lost(values: dict[str, Any]) -> dict[str, Any]:
    """A whole reply, whatever the client remembers."""
    ticket = fb.Tree({**values["ticket"], "base": torch.tensor(-1)})
    return {**values, "ticket": ticket}


def test_a_client_that_always_says_it_lost_its_memory_cannot_empty_the_sums_for_long(
    task: Any,
) -> None:
    conditions = {"participation": 3, "strikes": 3}
    run = start(task, AFBO(**STEPS, memory="client"), **conditions)
    let_lie(run.fed, 2, say_that_memory_is_lost)
    advance(run, 60)
    assert run.fed.records()["restarts"] * 60 == pytest.approx(MAX_LOSSES)
    assert list(run.fed.excluded) == [2]
    heard = LatestReplies(*run.state.latest).replies
    assert sorted(heard) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "number"),
    [("number", -7), ("number", 2**62), ("number", float("nan")), ("base", 10**6), ("base", -2)],
)
def test_a_ticket_with_other_numbers_than_its_message_is_refused(
    name: str, number: float, task: Any
) -> None:
    def lie(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "ticket": fb.Tree({**values["ticket"], name: torch.tensor(number)})}

    run = start(task, AFBO(**STEPS, memory="client"), strikes=3)
    honest = start(task, AFBO(**STEPS, memory="client"))
    let_lie(run.fed, 0, lie)
    for each in (run, honest):
        advance(each, 100)
    assert run.fed.ledger.refused_replies == 3
    assert list(run.fed.excluded) == [0]
    distance = float(norm(run.state.x - honest.state.x))
    assert distance < float(norm(honest.state.x))


@pytest.mark.parametrize(
    "method",
    [
        AFBO(**STEPS),
        AFBO(**STEPS, memory="client"),
        fb.algorithms.AFL(),
        fb.algorithms.MemFBO(barrier=False),
        fb.algorithms.UniFBO(barrier=False),
    ],
    ids=lambda method: f"{method.name}-{getattr(method, 'memory', 'server')}",
)
def test_the_last_reply_of_a_client_that_is_put_aside_does_not_stay(method: Any, task: Any) -> None:
    run = advance(start(task, method, strikes=1), 10)
    run.fed.refuse(4, "it was told to")
    run.advance()
    latest = LatestReplies(*run.state.latest)
    assert sorted(latest.replies) == [0, 1, 2, 3, 5]
    assert latest.weight == pytest.approx(5.0)
    if getattr(method, "memory", "server") == "server":
        expected = sum(flatten(trees["hx"]) for _, trees in latest.replies.values())
        assert torch.allclose(flatten(latest.sums["hx"]), expected, rtol=0, atol=1e-12)


def test_a_run_with_tasks_in_flight_resumes_bit_for_bit(
    task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="fedbilevel")
    environment = fb.Environment(
        local_steps=(1, 3), delay=Pareto(1.0, 2.0), participation=2, faults=FAULTS
    )

    def solve(rounds: int, folder: str, resume: bool = False) -> fb.Result:
        return fb.solve(
            task.problem,
            task.clients,
            AFBO(**STEPS, memory="client"),
            rounds=rounds,
            environment=environment,
            out=tmp_path / folder,
            resume=resume,
        )

    solve(23, "stopped")
    resumed = solve(60, "stopped", resume=True)
    whole = solve(60, "whole")
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
        ({"max_delay": 0}, "max_delay is 0; it must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AFBO(**settings)


def test_free_exchanges_are_refused_where_time_is_real() -> None:
    task = fb.tasks.load("quadratic", clients=2)
    fed = architecture()["on_threads"](task.problem, task.clients)
    run = Run(AFBO(hypergradient="neumann", aphe="server"), fed, {"rounds": 5})
    with pytest.raises(RuntimeError, match=r"^aphe is 'server', but only a simulation can leave"):
        run.advance()
