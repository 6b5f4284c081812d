"""AFL: which replies its two variants average."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms import AFL
from fedbilevel.federation.delays import Constant
from tests.support.conformance import iterate


@pytest.mark.parametrize("variant", ["cs", "cd"])
def test_afl_averages_the_last_replies_of_all_or_those_that_have_just_arrived(variant: Any) -> None:
    """Of six clients with equal delays 0 and 1 answer first, then 2 and 3, all from the start."""
    task = fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)
    method = AFL(variant=variant, neumann_steps=2, neumann_lr=0.7, server_lr_x=0.3, server_lr_y=0.2)
    fed = fb.simulated_federation(task.problem, task.clients)
    x, y = task.problem.start
    replies = [reply.values for reply in fed.ask(method.mean_directions(), range(6), x=x, y=y)]
    run = iterate(task, method, 1, environment={"delay": Constant(1.0), "participation": 2})
    before = run.state
    run.advance()
    averaged = replies[2:4] if variant == "cd" else replies[:4]
    for name, lr in (("x", 0.3), ("y", 0.2)):
        mean = torch.stack([values[f"h{name}"][name] for values in averaged]).mean(0)
        expected = getattr(before, name)[name] - lr * mean
        torch.testing.assert_close(getattr(run.state, name)[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["cs", "cd"])
def test_a_delay_of_at_most_one_iteration_is_a_barrier(variant: Any) -> None:
    task = fb.tasks.load("quadratic", clients=6, condition=3.0, seed=3)
    environment = {"delay": fb.delays.LogNormal(1.0, 1.0)}
    method = AFL(variant=variant, max_delay=1)
    bounded = iterate(task, method, 5, environment=environment | {"participation": 2})
    barrier = iterate(task, AFL(variant=variant), 5, environment=environment)
    torch.testing.assert_close(bounded.state.x, barrier.state.x, rtol=0, atol=1e-12)
    assert bounded.fed.now == barrier.fed.now
