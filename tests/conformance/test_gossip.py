"""Methods without a server on graphs: where they end, what they compute, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import DSBO, Prometheus
from fedbilevel.algorithms.shared_gossip import State
from fedbilevel.federation import Federation
from fedbilevel.federation.topology import mixing_matrix
from fedbilevel.runs.run import Run
from tests.support.cases import (
    Matrices,
    Settings,
    client_means,
    ends_of_prometheus,
    hypergradient,
    neumann,
    upper_gradient_y,
    zero_of,
)
from tests.support.conformance import case, iterate, quadratic

N = 6
OWN = [  # a path of six clients, with other weights than those of Metropolis
    [0.6, 0.4, 0.0, 0.0, 0.0, 0.0],
    [0.4, 0.2, 0.4, 0.0, 0.0, 0.0],
    [0.0, 0.4, 0.3, 0.3, 0.0, 0.0],
    [0.0, 0.0, 0.3, 0.3, 0.4, 0.0],
    [0.0, 0.0, 0.0, 0.4, 0.2, 0.4],
    [0.0, 0.0, 0.0, 0.0, 0.4, 0.6],
]
GRAPHS: dict[str, Any] = {"ring": "ring", "grid": "grid", "complete": "complete", "own": OWN}
LINKS = {"ring": 6, "grid": 7, "complete": 15, "own": 5}  # the grid has 2 rows of 3
on_graphs = pytest.mark.parametrize("graph", GRAPHS)


def task_of(**options: Any) -> Any:
    return quadratic("dsbo", clients=N, dim_x=3, dim_y=2, seed=3, **options)


def run_on(task: Any, method: Any, graph: Any, iterations: int, **environment: Any) -> Run:
    return iterate(task, method, iterations, environment={"topology": graph, **environment})


def metropolis(graph: str) -> Tensor:
    """W by hand: the links of each graph, and 1 / (1 + the larger degree)."""
    if graph == "own":
        return torch.tensor(OWN, dtype=torch.float64)
    links = {
        "ring": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)],
        "grid": [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)],
        "complete": [(i, j) for i in range(N) for j in range(i)],
    }[graph]
    degree = [sum(i in link for link in links) for i in range(N)]
    W = torch.zeros(N, N, dtype=torch.float64)
    for i, j in links:
        W[i, j] = W[j, i] = 1 / (1 + max(degree[i], degree[j]))
    for i in range(N):
        W[i, i] = 1 - W[i].sum()
    return W


# Written by hand, with a row per client


def samples(parts: list[Matrices], x: Tensor, y: Tensor) -> list[Tensor]:
    """s, h, U and V of all clients on full batches."""
    s = torch.stack([xi - m[4] + m[5].T @ yi for m, xi, yi in zip(parts, x, y, strict=True)])
    h = torch.stack([upper_gradient_y(m, xi, yi) for m, xi, yi in zip(parts, x, y, strict=True)])
    return [s, h, torch.stack([-m[1].T for m in parts]), torch.stack([m[0] for m in parts])]


def lower_gradients(parts: list[Matrices], x: Tensor, y: Tensor) -> Tensor:
    return torch.stack(
        [m[0] @ yi - m[1] @ xi - m[2] for m, xi, yi in zip(parts, x, y, strict=True)]
    )


def directions_of(h: Settings, s: Tensor, v: Tensor, U: Tensor, V: Tensor) -> Tensor:
    rows = []
    for i in range(N):
        q = neumann(V[i], v[i], h["neumann_lr"], h["neumann_steps"])
        rows.append(s[i] - U[i] @ q)
    return torch.stack(rows)


def dsbo_by_hand(parts: list[Matrices], W: Tensor, h: Settings, iterations: int) -> Any:
    x = torch.zeros(N, 3, dtype=torch.float64)
    y = torch.zeros(N, 2, dtype=torch.float64)
    o = samples(parts, x, y)
    b = h["momentum_weight"]
    for _ in range(iterations):
        new_x = W @ x - h["lr_x"] * directions_of(h, *o)
        new_y = W @ y - h["lr_y"] * lower_gradients(parts, x, y)
        fresh = samples(parts, x, y)
        mixed = [torch.tensordot(W, value, 1) for value in o]
        o = [(1 - b) * old + b * new for old, new in zip(mixed, fresh, strict=True)]
        x, y = new_x, new_y
    return x, y


def average_of(W: Tensor, h: Settings) -> Tensor:
    """beta (I - (1 - beta) W)^-1, which makes estimates at rest of samples."""
    b = h["momentum_weight"]
    return b * torch.linalg.inv(torch.eye(N, dtype=torch.float64) - (1 - b) * W)


def where_dsbo_ends(parts: list[Matrices], W: Tensor, h: Settings) -> tuple[Tensor, Tensor]:
    """x and y of all clients at the fixed point of its iteration.

    There o = (1 - beta) W o + beta (a sample of o), so that o is `average_of` the samples. With
    these the equations of x and y are linear.
    """
    average = average_of(W, h)

    def residual(u: Tensor) -> Tensor:
        x = u[: 3 * N].reshape(N, 3)
        y = u[3 * N :].reshape(N, 2)
        o = [torch.tensordot(average, value, 1) for value in samples(parts, x, y)]
        of_x = W @ x - x - h["lr_x"] * directions_of(h, *o)
        of_y = W @ y - y - h["lr_y"] * lower_gradients(parts, x, y)
        return torch.cat([of_x.flatten(), of_y.flatten()])

    u = zero_of(residual, 5 * N)
    return u[: 3 * N].reshape(N, 3), u[3 * N :].reshape(N, 2)


def prometheus_by_hand(parts: list[Matrices], W: Tensor, h: Settings, iterations: int) -> Any:
    x = torch.zeros(N, 3, dtype=torch.float64)
    y = torch.zeros(N, 2, dtype=torch.float64)

    def own(x: Tensor, y: Tensor) -> Tensor:
        rows = []
        for m, xi, yi in zip(parts, x, y, strict=True):
            q = neumann(m[0], upper_gradient_y(m, xi, yi), h["neumann_lr"], h["neumann_steps"])
            rows.append(hypergradient(m, xi, yi, q))
        return torch.stack(rows)

    p = own(x, y)
    u = p
    for _ in range(iterations):
        new_x = W @ x + h["relaxation"] * (x - h["lr_x"] * u - x)
        y = y - h["lr_y"] * lower_gradients(parts, x, y)
        x = new_x
        u = W @ u + own(x, y) - p
        p = own(x, y)
    return x, y


BY_HAND = {"dsbo": dsbo_by_hand, "prometheus": prometheus_by_hand}
METHODS: dict[str, Any] = {"dsbo": DSBO, "prometheus": Prometheus}


@on_graphs
@pytest.mark.parametrize("name", METHODS)
def test_it_is_the_iteration_written_with_matrices(name: str, graph: str) -> None:
    task = task_of()
    h = case(name).settings | {"neumann_steps": 2, "momentum_weight": 0.3}
    settings = {key: h[key] for key in case(name).settings}
    run = run_on(task, METHODS[name](**settings), GRAPHS[graph], 4)
    x, y = BY_HAND[name](client_means(task), metropolis(graph), h, 4)
    assert (x - x.mean(0)).norm() > 1e-2, "the clients agree: mixing does not show"
    torch.testing.assert_close(run.state.clients["x"]["x"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state.clients["y"]["y"], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state.x["x"], x.mean(0), rtol=0, atol=1e-12)


def stay(run: Run, **clients: Tensor) -> None:
    """Put the clients at a point, and check that two iterations leave them there."""
    trees = {name: fb.Tree({NAME_OF[name]: value}) for name, value in clients.items()}
    run.state = State(run.state.x, run.state.y, trees)
    for _ in range(2):
        run.advance()
    for name, value in trees.items():
        torch.testing.assert_close(run.state.clients[name], value, rtol=0, atol=1e-10)


NAME_OF = {"x": "x", "y": "y", "p": "x", "v": "y", "u": "x", "s": "x", "h": "y", "U": "U", "V": "V"}


@on_graphs
def test_prometheus_ends_where_the_mean_of_local_hypergradients_is_zero(graph: str) -> None:
    """Links cause no bias: the point is the same on every graph, and the clients agree on it."""
    parts = client_means(task_of(heterogeneity=1.0))
    h = case("prometheus").settings | {"neumann_steps": 3, "relaxation": 0.3}
    x, ys, p = ends_of_prometheus(parts, h)
    assert p.norm() > 0.1, "the clients agree: nothing is averaged"
    reached, own_y = prometheus_by_hand(parts, metropolis(graph), h, 700)
    torch.testing.assert_close(reached, x.expand(N, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(own_y, ys, rtol=0, atol=1e-4)
    run = run_on(task_of(heterogeneity=1.0), Prometheus(**h), GRAPHS[graph], 0)
    at_rest = torch.zeros_like
    stay(run, x=x.expand(N, -1), y=ys, p=p, v=at_rest(ys), u=at_rest(p))


DSBO_STEPS = {"lr_x": 0.1, "lr_y": 0.3, "momentum_weight": 0.3, "neumann_steps": 2}


@on_graphs
def test_dsbo_ends_at_its_biased_fixed_point(graph: str) -> None:
    parts = client_means(task_of(heterogeneity=1.0))
    h = case("dsbo").settings | DSBO_STEPS
    W = metropolis(graph)
    x, y = where_dsbo_ends(parts, W, h)
    assert (x - x.mean(0)).norm() > 1e-3, "the clients agree: there is no bias to be seen"
    reached, _ = dsbo_by_hand(parts, W, h, 200)
    torch.testing.assert_close(reached, x, rtol=0, atol=1e-6)
    run = run_on(task_of(heterogeneity=1.0), DSBO(**h), GRAPHS[graph], 0)
    s, v, U, V = (torch.tensordot(average_of(W, h), o, 1) for o in samples(parts, x, y))
    stay(run, x=x, y=y, s=s, h=v, U=U, V=V.unsqueeze(1).expand(-1, 2, -1, -1))


def test_the_bias_of_dsbo_goes_with_its_steps_on_every_graph() -> None:
    """In closed form: a tenth of all steps leaves about a tenth of the bias."""
    task = task_of(heterogeneity=1.0)
    parts = client_means(task)
    many_terms = {"neumann_lr": 0.7, "neumann_steps": 40}
    for graph in GRAPHS:
        bias = []
        for scale in (1.0, 0.1, 0.01):
            steps = {"lr_x": 0.1 * scale, "lr_y": 0.1 * scale, "momentum_weight": 0.1 * scale}
            x, _ = where_dsbo_ends(parts, metropolis(graph), steps | many_terms)
            bias.append(float((x.mean(0) - task.x_star()["x"]).norm()))
        assert bias[0] > 1e-3
        assert bias[1] < 0.2 * bias[0]
        assert bias[2] < 0.2 * bias[1]


@pytest.mark.parametrize("name", METHODS)
def test_identical_clients_are_the_centralised_method_on_every_graph(name: str) -> None:
    one = task_of(heterogeneity=0.0).clients[0]
    task = task_of(heterogeneity=0.0)
    alone = dataclasses.replace(task, clients=[one])
    together = dataclasses.replace(task, clients=[one] * N)
    method = METHODS[name](**case(name).settings | {"neumann_steps": 2})
    x = iterate(alone, method, 5).state.x["x"]
    for graph in GRAPHS.values():
        run = run_on(together, method, graph, 5)
        torch.testing.assert_close(run.state.clients["x"]["x"], x.expand(N, -1), rtol=0, atol=1e-12)


# Costs


@on_graphs
def test_bytes_are_those_that_cross_links(graph: str) -> None:
    """Every link carries the values of both its clients, once per iteration, which is a round."""
    p, d, b = 3, 2, 2
    numbers = {"dsbo": 2 * p + 2 * d + p * d + b * d * d, "prometheus": 2 * p}
    for name, method in METHODS.items():
        run = run_on(task_of(), method(neumann_steps=2), GRAPHS[graph], 3)
        totals = run.fed.ledger.totals()
        assert totals["rounds"] == 3
        assert totals["bytes_up"] == 3 * 2 * LINKS[graph] * 8 * numbers[name]
        assert totals["bytes_down"] == 0
        # Client 0 has two neighbours on a ring and a grid, 5 on the complete graph, 1 on the path.
        links = {"ring": 2, "grid": 2, "complete": 5, "own": 1}[graph]
        assert run.fed.ledger.clients[0]["bytes_up"] == 3 * links * 8 * numbers[name]


def test_absent_clients_send_nothing_and_keep_their_values() -> None:
    task = task_of()
    run = run_on(task, Prometheus(), "complete", 1, participation=2)
    x, _ = task.problem.start
    moved = (run.state.clients["x"]["x"] != x["x"]).any(1)
    assert int(moved.sum()) == 2
    assert run.fed.ledger.totals()["bytes_up"] == 2 * 8 * 2 * 3
    present = moved.nonzero()[0]
    assert [bool(run.fed.ledger.clients[i]["bytes_up"]) for i in range(N)] == moved.tolist()
    assert len(present) == 1


def test_the_mean_of_the_trackers_is_that_of_the_estimates() -> None:
    task = task_of(noise=1.0, samples=8)
    run = run_on(task, Prometheus(refresh=3), "ring", 0, batch_size=2, participation=4)
    for _ in range(7):
        run.advance()
        u, p = (run.state.clients[name]["x"] for name in ("u", "p"))
        assert (u - p).norm() > 1e-3
        torch.testing.assert_close(u.mean(0), p.mean(0), rtol=0, atol=1e-12)


def test_weights_of_clients_are_those_of_the_problem() -> None:
    """Clients with 1, 2, ... samples; Prometheus ends where the weighted mean is zero."""
    task = task_of(heterogeneity=1.0)
    clients = []
    for i, client in enumerate(task.clients):
        train = tuple(tensor.repeat_interleave(1 + i, 0) for tensor in client.train)
        clients.append(fb.ClientData(train, client.val))
    weights = [N * (1 + i) / 21 for i in range(N)]
    h = case("prometheus").settings | {"neumann_steps": 3}
    x, ys, p = ends_of_prometheus(client_means(task), h, weights)
    assert (x - ends_of_prometheus(client_means(task), h)[0]).norm() > 0.1
    weighted = dataclasses.replace(task, clients=clients)
    run = iterate(weighted, Prometheus(**h), 0, environment={"topology": "ring"}, weights="samples")
    at_rest = torch.zeros_like
    stay(run, x=x.expand(N, -1), y=ys, p=p, v=at_rest(ys), u=at_rest(p))


def test_an_iteration_takes_as_long_as_its_slowest_client() -> None:
    task = task_of()
    slow = fb.delays.Stragglers(clients=1, slowdown=5.0)
    conditions = {"delay": fb.delays.Constant(2.0), "stragglers": slow}
    run = run_on(task, Prometheus(), "ring", 3, **conditions)
    assert run.fed.now == (1 + 3) * 10.0  # p_i and v_i at the start take a task, too


def test_all_samples_are_used_when_a_refresh_is_due() -> None:
    task = task_of(noise=1.0, samples=8)
    run = run_on(task, Prometheus(refresh=3, neumann_steps=1), "ring", 0, batch_size=2)
    per_client = []
    for _ in range(6):
        before = run.fed.ledger.totals()["samples"]
        run.advance()
        per_client.append((run.fed.ledger.totals()["samples"] - before) // N)
    assert per_client == [16 + 4, 4, 16, 4, 4, 16]  # the first also begins on all of 8 + 8


# What must fail


class NeverMixes(Prometheus):
    """Every client goes its own way."""

    def iterate(self, s: State, fed: Federation) -> State:
        whole = fed.mixing_matrix
        fed.__dict__["mixing_matrix"] = torch.eye(len(fed), dtype=torch.float64)
        new = super().iterate(s, fed)
        fed.__dict__["mixing_matrix"] = whole
        return new


class LosesTrack(Prometheus):
    """Mixes the trackers without adding what has changed."""

    def iterate(self, s: State, fed: Federation) -> State:
        new = super().iterate(s, fed)
        clients = new.clients | {"u": new.clients["p"]}
        return new._replace(clients=clients)


@pytest.mark.parametrize("broken", [NeverMixes, LosesTrack])
def test_broken_variants_miss_the_point(broken: type[Prometheus]) -> None:
    task = task_of(heterogeneity=1.0)
    h = case("prometheus").settings | {"neumann_steps": 1, "relaxation": 0.3}
    x, *_ = ends_of_prometheus(client_means(task), h)

    def gap(method: Prometheus) -> Tensor:
        state = run_on(task, method, "complete", 60).state
        return (state.clients["x"]["x"] - x).abs().max()

    assert gap(Prometheus(**h)) < 2e-2 < 5e-2 < gap(broken(**h))


def test_a_row_stochastic_matrix_would_end_elsewhere() -> None:
    """Why a matrix must be doubly stochastic: the fixed point moves by more than its bias."""
    task = task_of(heterogeneity=1.0)
    settings = case("dsbo").settings | DSBO_STEPS
    W = metropolis("ring")
    lopsided = W.clone()
    lopsided[1, 0] += 0.3
    lopsided[1, 1] -= 0.3
    right, _ = where_dsbo_ends(client_means(task), W, settings)
    wrong, _ = where_dsbo_ends(client_means(task), lopsided, settings)
    assert (right.mean(0) - wrong.mean(0)).norm() > 1e-2
    with pytest.raises(ValueError, match=r"not doubly stochastic: column 0 sums to 1\.3"):
        fb.Environment(topology=lopsided.tolist())


def test_a_method_with_a_server_refuses_a_topology() -> None:
    with pytest.raises(ValueError, match=r"topology is ring, but simfbo has a server; .* dsbo"):
        run_on(task_of(), fb.algorithms.SimFBO(), "ring", 0)


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("faults", fb.delays.Faults(drop=0.1)),
        ("stages", [fb.stages.Half()]),
        ("norm_factor", 10.0),
    ],
)
def test_conditions_for_a_server_are_refused(condition: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{condition} is .*, but dsbo has no server"):
        run_on(task_of(), DSBO(), "ring", 0, **{condition: value})


def test_a_transport_without_links_refuses_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_of()
    fed = fb.simulated_federation(task.problem, task.clients)
    monkeypatch.setattr(type(fed.transport), "has_links", False)
    with pytest.raises(ValueError, match=r"prometheus has no server: .* such methods run in sim"):
        Run(Prometheus(), fed, {})
    assert fed.ledger.rounds == 0


def test_matrices_that_do_not_fit_are_refused() -> None:
    problem = dataclasses.replace(
        task_of().problem, x={"x": torch.zeros(157_000)}, y={"y": torch.zeros(2010)}
    )
    with pytest.raises(ValueError, match=r"3\.4e\+08 numbers per client"):
        DSBO().check(problem, fb.Environment())


def test_the_named_graphs_are_those_by_hand() -> None:
    for graph in ("ring", "grid", "complete"):
        torch.testing.assert_close(mixing_matrix(graph, N, seed=0), metropolis(graph))
