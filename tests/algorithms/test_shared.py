"""Local hypergradients: their data, and random truncation, unbiased and shared within a step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import AFL, RABO, LFedNest, LocalBSGM, shared, shared_hypergradients
from fedbilevel.algorithms.shared import LocalHypergradient
from fedbilevel.core.client_data import Batch
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.tree import Tree
from fedbilevel.runs.run import Run
from tests.support.cases import client_means, hypergradient, neumann, upper_gradient_y
from tests.support.conformance import iterate
from tests.support.estimators import load_quadratic, pooled_matrices

NOTHING_MOVES: dict[str, Any] = {
    "lr_x": 1e-12,
    "lr_y": 1e-12,
    "neumann_lr": 0.8,
    "neumann_steps": 4,
    "truncation": "random",
}


@pytest.mark.parametrize("name", ["localbsgm", "localbsgvr", "adafbio"])
def test_local_truncation_is_unbiased_over_all_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one client, whose Hessian is the global one."""
    task = load_quadratic(clients=1)
    A, B, _, e, t, _ = pooled_matrices(task)
    method: Any = fb.algorithms.get(name)(**NOTHING_MOVES)
    fed = fb.simulated_federation(task.problem, task.clients)
    x, y = task.problem.start
    directions = []
    for length in range(4):

        def drawn(key: Tensor, low: int, high: int, length: int = length) -> Tensor:
            return torch.tensor(length)

        monkeypatch.setattr(shared_hypergradients, "integers", drawn)
        directions.append(fed.ask(method.begin(), [0], x=x, y=y).mean("u")["x"])
    expected = -t + B.T @ neumann(A, -e, 0.8, 3)
    torch.testing.assert_close(torch.stack(directions).mean(0), expected, rtol=0, atol=1e-12)
    assert (directions[0] - directions[3]).norm() > 0.1


def test_local_random_truncation_has_the_expectation_of_the_sum() -> None:
    """LocalBSGM's momentum over 50 equal clients, 25 times, is within 4.5 standard errors."""
    task = load_quadratic(clients=50, heterogeneity=0.0)
    settings = {
        "lr_x": 1e-9,
        "lr_y": 1e-9,
        "neumann_lr": 0.8,
        "neumann_steps": 4,
        "momentum_weight": 1.0,
    }
    exact = iterate(task, LocalBSGM(**settings, truncation="sum"), 1).state.u["x"]
    method = LocalBSGM(**settings)
    fed = fb.simulated_federation(task.problem, task.clients)
    start = method.init(task.problem)
    sample = torch.stack([method.iterate(start, fed).u["x"] for _ in range(25)])
    error = sample.std(0) / 25**0.5
    assert ((sample.mean(0) - exact).abs() < 4.5 * error + 1e-7).all()
    assert (error > 1e-6).all()
    assert (error < 0.1 * exact.norm()).all()


@pytest.mark.parametrize("name", ["localbsgvr", "adafbio"])
def test_variance_reduction_shares_the_truncation(name: str) -> None:
    """Where x and y stay, d(new) - d(old) is 0 only if both have the same random length."""
    task = load_quadratic()
    method = fb.algorithms.get(name)(**NOTHING_MOVES, momentum_weight=1e-9)
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(local_steps=5))
    run = Run(method, fed, {})
    run.advance()
    first = run.state.u["x"]
    run.advance()
    torch.testing.assert_close(run.state.u["x"], first, rtol=0, atol=1e-7)


def test_storm_keeps_the_complement_of_the_weight() -> None:
    """With full batches the momentum equals the old direction, and the weight would not show."""
    new = fb.Tree(x=torch.tensor([5.0]))
    momentum = fb.Tree(x=torch.tensor([3.0]))
    old = fb.Tree(x=torch.tensor([1.0]))
    (renewed,) = shared.storm([new], [momentum], [old], weight=0.25)
    assert float(renewed["x"]) == 5.0 + 0.75 * (3.0 - 1.0)


def load_varied(clients: int, samples: int) -> Any:
    """Clients whose samples differ in all their derivatives, second ones included."""
    task = load_quadratic(clients=clients, samples=samples, noise=0.5)
    varied = []
    for client in task.clients:
        A, B, c = client.train
        scale = torch.linspace(0.5, 1.5, samples, dtype=torch.float64)[:, None, None]
        varied.append(fb.ClientData((A * scale, B * (2 - scale), c), client.val))
    return dataclasses.replace(task, clients=varied)


def two_samples() -> Any:
    """A client with two samples on each side."""
    return load_varied(clients=1, samples=2)


def mean_estimate(batches: Iterable[tuple[Batch, list[Batch]]], **settings: Any) -> Tensor:
    """The mean of the estimates on these batches, at one point."""
    task = two_samples()
    phase = LocalHypergradient(neumann_lr=0.6, terms=3, **settings)
    x = Tree(x=torch.linspace(-1, 1, 5, dtype=torch.float64))
    y = Tree(y=torch.linspace(2, -1, 4, dtype=torch.float64))
    estimates = []
    for batch, fresh in batches:
        estimates.append(phase.own_hypergradient(Oracle(task.problem), x, y, batch, fresh)["x"])
    return torch.stack(estimates).mean(0)


def one_sample(train: int, val: int) -> Batch:
    (client,) = two_samples().clients
    return Batch(tuple(t[[train]] for t in client.train), tuple(t[[val]] for t in client.val))


def test_a_batch_for_each_product_makes_the_estimate_unbiased_and_one_batch_does_not() -> None:
    """Over all choices of one of two samples for v, both products and the cross product."""
    (client,) = two_samples().clients
    full = mean_estimate([(Batch(client.train, client.val), [])])
    one = mean_estimate((one_sample(a, b), []) for a, b in itertools.product(range(2), repeat=2))
    choices = itertools.product(range(2), repeat=4)
    fresh = mean_estimate(
        (one_sample(a, b), [one_sample(c, 0), one_sample(d, 0)]) for a, b, c, d in choices
    )
    torch.testing.assert_close(fresh, full, rtol=0, atol=1e-12)
    assert (one - full).norm() > 0.01


def test_differences_on_fresh_batches_are_the_products_on_them() -> None:
    task = load_varied(clients=2, samples=6)
    environment = fb.Environment(batch_size=2)

    def solve(method: type[fb.algorithms.RABO], batch: Any) -> Tensor:
        settings = {"lr_x": 0.2, "lower_steps": 1, "neumann_lr": 0.5, "neumann_steps": 4}
        algorithm = method(**settings, hypergradient_batch=batch)
        result = fb.solve(task.problem, task.clients, algorithm, rounds=6, environment=environment)
        return result.x["x"]

    exact = solve(fb.algorithms.RABO, "fresh")
    differences = solve(fb.algorithms.RAFBO, "fresh")
    torch.testing.assert_close(differences, exact, rtol=0, atol=1e-9)
    assert (solve(fb.algorithms.RAFBO, "one") - exact).norm() > 1e-3


def test_the_products_of_an_estimate_use_their_batches_in_turn() -> None:
    first = one_sample(0, 1)
    A0, B, c = (part[0] for part in first.train)
    e, t, D = (part[0] for part in first.val)
    A1 = one_sample(1, 0).train[0][0]  # type: ignore[index]
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    y = torch.linspace(2, -1, 4, dtype=torch.float64)
    v = y - e + D @ x
    term_1 = v - 0.6 * A1 @ v
    term_2 = term_1 - 0.6 * A0 @ term_1
    expected = hypergradient((A0, B, c, e, t, D), x, y, 0.6 * (v + term_1 + term_2))
    estimate = mean_estimate([(first, [one_sample(1, 0), one_sample(0, 0)])])
    torch.testing.assert_close(estimate, expected, rtol=0, atol=1e-12)


METHODS: dict[str, tuple[Any, str, int]] = {
    "rabo": (RABO(neumann_steps=4, lower_steps=1), "hypergradient", 4),
    "afl": (AFL(neumann_steps=3), "work", 4),
    "lfednest": (
        LFedNest(neumann_steps=3, neumann_lr=0.5, lower_steps=1, upper_steps=1),
        "local_upper_round",
        4,
    ),
}


@pytest.mark.parametrize(("method", "phase", "terms"), METHODS.values(), ids=METHODS)
def test_the_samples_of_a_local_hypergradient(method: Any, phase: str, terms: int) -> None:
    """Batches of 2 of 7 samples on both sides of 3 clients, in one step."""
    task = load_varied(clients=3, samples=7)

    def run(choice: str) -> tuple[int, Tensor]:
        chosen = dataclasses.replace(method, hypergradient_batch=choice)
        after = iterate(task, chosen, 1, environment={"batch_size": 2})
        return after.fed.ledger.phases[phase].samples, after.state.x["x"]

    samples, x = zip(*map(run, ("one", "fresh", "full")), strict=True)
    assert samples == (3 * 4, 3 * 4 * terms, 3 * 14)
    assert min((x[0] - x[1]).norm(), (x[1] - x[2]).norm(), (x[0] - x[2]).norm()) > 1e-5


def test_all_samples_make_the_hypergradient_that_of_a_full_batch() -> None:
    """y stays, so that x moves by the estimate alone."""
    task = load_varied(clients=3, samples=7)
    method = RABO(lr_y=1e-300, lower_steps=1, lr_x=0.1, hypergradient_batch="full")
    state = iterate(task, method, 1, environment={"batch_size": 2}).state
    expected = []
    for m in client_means(task):
        x, y = (torch.zeros_like(part) for part in (m[4], m[2]))
        p = neumann(m[0], upper_gradient_y(m, x, y), method.neumann_lr, method.neumann_steps - 1)
        expected.append(-0.1 * hypergradient(m, x, y, p))
    torch.testing.assert_close(state.x["x"], torch.stack(expected).mean(0), rtol=0, atol=1e-12)
