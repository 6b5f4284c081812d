"""Derivatives on a batch that is evaluated in parts are those on the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.micro_batches import parts_of
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import root, uniform
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import load_task
from tests.support import sequences


def problem_with(embed: bool = False, **options: Any) -> fb.Problem:
    """Losses of which each is a mean over samples, and no derivative is 0."""

    def features(x: fb.Tree, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(data[0] @ x["B"]), data[1]

    def upper(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch if embed else features(x, batch)
        return ((torch.tanh(inputs @ y["w"]) - target) ** 2).mean()

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.1 * (y["w"] ** 2).sum() * x["B"].sum()

    generator = torch.Generator().manual_seed(0)
    B = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(4, generator=generator, dtype=torch.float64)
    return fb.Problem(
        upper, lower, x={"B": B}, y={"w": w}, embed=features if embed else None, **options
    )


def batch_of(train: int, val: int) -> fb.Batch:
    generator = torch.Generator().manual_seed(1)

    def side(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        return inputs, torch.randn(count, generator=generator, dtype=torch.float64)

    return fb.Batch(side(train), side(val), root(0, "test"))


@pytest.mark.parametrize("embed", [False, True])
@pytest.mark.parametrize("derivatives", ["exact", "differences"])
@pytest.mark.parametrize(("train", "val"), [(6, 6), (7, 5), (9, 4), (8, 1)])
def test_every_derivative_is_that_of_the_whole_batch(
    embed: bool, derivatives: Any, train: int, val: int
) -> None:
    whole = Oracle(problem_with(embed, derivatives=derivatives))
    split = Oracle(problem_with(embed, derivatives=derivatives, micro_batch=2))
    batch = batch_of(train, val)
    x, y = whole.problem.start
    v = y.map(lambda tensor: tensor.flip(0))

    def all_derivatives(oracle: Oracle) -> list[Any]:
        return [
            oracle.upper(x, y, batch),
            oracle.lower(x, y, batch),
            oracle.directions(x, y, v, batch, 0.5),
            oracle.penalty_directions(x, y, v, batch, 3.0),
            oracle.lower_gradient_y(x, y, batch),
            oracle.lower_gradients(x, y, batch),
            oracle.upper_gradients(x, y, batch),
            oracle.upper_gradient_x(x, y, batch),
            oracle.upper_gradient_y(x, y, batch),
            oracle.hessian_product(x, y, v, batch),
            oracle.lower_gradient_and_product(x, y, v, batch),
            oracle.cross_product(x, y, v, batch),
            oracle.products(x, y, v, batch),
            oracle.hypergradient(x, y, v, batch),
            oracle.difference_hypergradient(x, y, v, batch, 1e-3),
            oracle.lower_gradients(x, y, oracle.embed(x, batch)),
        ]

    tolerance = 1e-12 if derivatives == "exact" else 1e-8
    found = all_derivatives(split)
    torch.testing.assert_close(found, all_derivatives(whole), rtol=tolerance, atol=tolerance)
    assert split.gradients == whole.gradients


def test_no_part_has_more_samples_than_asked_for() -> None:
    for train, val in ((9, 4), (4, 9), (7, 7), (100, 40)):
        parts = parts_of(batch_of(train, val), 2)
        assert max(len(part.batch.train[0]) for part in parts) <= 2
        assert max(len(part.batch.val[0]) for part in parts) <= 2
        for level in (0, 1):
            assert sum(part.factors[level] for part in parts) == pytest.approx(len(parts))


def test_parts_draw_different_random_numbers() -> None:
    keys = [part.batch.rng for part in parts_of(batch_of(6, 6), 2)]
    draws = [uniform(key, (4,)) for key in keys if isinstance(key, Tensor)]
    assert len(draws) == 3
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], root(0, "test"))


@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize("name", ["memfbo", "simfbo"])
def test_a_run_is_the_same_and_takes_less_memory(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    whole = sequences.whole_network_below(sequences.Attention().double())
    runs = []
    for problem in (whole, dataclasses.replace(whole, micro_batch=4)):
        federation = fb.simulated_federation(
            problem, sequences.clients(samples=64), fb.Environment(batch_size=48), mode=mode
        )
        result = fb.solve(problem, [], name, rounds=3, every=3, federation=federation)
        runs.append((result, federation.ledger.totals()))
    (a, cost), (b, less) = runs
    torch.testing.assert_close(a.x, b.x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(a.y, b.y, rtol=1e-8, atol=1e-8)
    assert less["peak_bytes"] < 0.5 * cost["peak_bytes"]
    assert less["gradients"] == cost["gradients"]
    assert less["samples"] == cost["samples"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"micro_batch": 0}, "micro_batch is 0; it must be at least 1"),
        ({"micro_batch": 2, "lower_level": "private"}, "an episode cannot be split"),
    ],
)
def test_refuses_what_cannot_be_split(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        problem_with(**options)


def test_an_experiment_says_how_many_samples_are_evaluated_at_once() -> None:
    config = configs.resolve(*configs.read("digits"), settings=["runtime.micro_batch=8"])
    assert load_task(config).problem.micro_batch == 8
