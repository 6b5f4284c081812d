"""Episodes: both sides of a client's data are drawn together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms.rabo import RABO
from fedbilevel.core.tree import Tree, dot

NUMBERS = torch.arange(20.0)
CLIENT = fb.ClientData(train=(NUMBERS,), val=(NUMBERS,))
UNEVEN = fb.ClientData(train=(NUMBERS,), val=(NUMBERS[:5],))


def private(loss: Any) -> fb.Problem:
    x = {"x": torch.zeros(1)}
    y = {"y": torch.ones(1)}
    return fb.Problem(upper=loss, lower=loss, x=x, y=y, lower_level="private")


def simple_loss(x: Tree, y: Tree, data: Any) -> Tensor:
    return 0.5 * dot(y, y) + (x["x"] * data[0].sum()).sum() * 0


def test_both_sides_of_an_episode_have_the_same_samples_and_the_same_key() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(x: Tree, y: Tree, data: Any, rng: Tensor) -> Tensor:
        seen.append((data[0].clone(), rng.clone()))
        return simple_loss(x, y, data)

    problem = private(loss)
    x, y = problem.start
    environment = fb.Environment(batch_size=4, local_steps=3)
    fed = fb.simulated_federation(problem, [CLIENT], environment, mode="loop")
    seen.clear()
    fed.ask(RABO(lower_steps=1, neumann_steps=1).episodes(), [0], x=x, y=y)
    batches = {tuple(batch.tolist()) for batch, _ in seen}
    keys = {int(key) for _, key in seen}
    assert len(batches) == len(keys) == 3, "one episode per local step, with both losses on it"
    seen.clear()
    fed.transport.losses(x, y)
    assert len(seen) > 1
    episodes = {(*batch.tolist(), int(key)) for batch, key in seen}
    assert len(episodes) == 1, "the recorded losses are those of one episode"


@pytest.mark.parametrize("clients", [[UNEVEN], [CLIENT, UNEVEN]])
def test_sides_of_unequal_size_are_refused_before_the_first_round(
    clients: list[fb.ClientData],
) -> None:
    i = len(clients) - 1
    sentence = f"client {i}, before round 1: train holds 20 samples and val 5; with"
    with pytest.raises(ValueError, match=sentence):
        fb.solve(private(simple_loss), clients, "rabo", rounds=1)


def test_sides_of_unequal_size_are_refused_in_an_exchange() -> None:
    problem = private(simple_loss)
    x, y = problem.start
    fed = fb.simulated_federation(problem, [CLIENT, UNEVEN])
    sentence = "client 1, phase 'episodes', round 1: train holds 20 samples and val 5"
    with pytest.raises(ValueError, match=sentence):
        fed.ask(RABO().episodes(), [1], x=x, y=y)
