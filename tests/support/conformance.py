"""Runs of registered methods on the quadratic task, and the check that they converge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run
from tests.support.cases import CASES, Case


def quadratic(name: str, **options: Any) -> Any:
    """The quadratic task, with a lower level of a kind that the method solves.

    With a private lower level, a client's full batch is its episode.
    """
    task = fb.tasks.load("quadratic", **options)
    kind = fb.algorithms.get(name).lower_levels[0]
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, lower_level=kind))


def takes_quadratics(name: str) -> bool:
    """Whether a method solves the quadratic task; some need more, such as features."""
    try:
        fb.algorithms.get(name)().check(quadratic(name, clients=1).problem, fb.Environment())
    except ValueError:
        return False
    return True


OWN_HEADS = ("fedbabu", "fedper", "fedrep")  # methods whose y must belong to the clients
NAMES = [name for name in fb.algorithms.names() if takes_quadratics(name)]


def case(name: str) -> Case:
    """The hand-written case of a method; a method without one fails."""
    if name not in CASES:
        pytest.fail(f"{name!r} is registered but has no case: add it to tests/support/cases.py")
    return CASES[name]


def build(name: str, **changes: Any) -> Algorithm:
    """A method with the settings of its case, some of them changed."""
    return fb.algorithms.get(name)(**{**case(name).settings, **changes})


def iterate(task: fb.tasks.Task, algorithm: Algorithm, iterations: int, **options: Any) -> Run:
    """The run after some iterations; options are those of the federation, `environment` a dict."""
    environment = fb.Environment(**options.pop("environment", {}))
    fed = fb.simulated_federation(task.problem, task.clients, environment, **options)
    run = Run(algorithm, fed, {})
    for _ in range(iterations):
        run.advance()
    return run


def uneven(task: fb.tasks.Task) -> fb.tasks.Task:
    """The task with clients of unequal size.

    Client i keeps 2 + i % 3 training samples; with a private lower level, as many on both sides.
    """
    clients = []
    for i, client in enumerate(task.clients):
        count = 2 + i % 3
        train = tuple(tensor[:count] for tensor in client.train)
        val = client.val
        if task.problem.lower_level == "private":
            val = tuple(tensor[:count] for tensor in client.val)
        clients.append(fb.ClientData(train, val))
    return dataclasses.replace(task, clients=clients)


def moved(run: Run) -> Tensor:
    """How far x and y moved since the start, as one vector."""
    x, y = run.fed.problem.start
    return torch.cat([run.state.x["x"] - x["x"], run.state.y["y"] - y["y"]])


def tensors(state: object) -> list[Tensor]:
    """The leaves of a state, as tensors."""
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(state)]


def check_converges(
    algorithm: Algorithm,
    rounds: int,
    tolerance: float = 1e-6,
    goal: Callable[[Any], Any] | None = None,
    federate: Callable[[fb.Problem, Sequence[fb.ClientData]], Federation] | None = None,
) -> None:
    """Check that a run on heterogeneous clients, full batches and everyone ends where it must.

    Args:
        algorithm: The method.
        rounds: The length of the run.
        tolerance: How close it must come, relative to the hypergradient at the start.
        goal: From the task to the point that a biased method converges to; without it, the run must
            end where grad Phi = 0.
        federate: Builds the federation of a problem and its clients; simulated by default.
    """
    task = quadratic(algorithm.name, clients=5, condition=3.0, heterogeneity=1.0, seed=3)
    shared = dataclasses.replace(task.problem, lower_level="shared")
    slope = task.gradient(task.problem.x)["x"].norm()
    assert slope > 0.1, "the fixture is flat: it would accept any algorithm"
    for client in task.clients:
        local = fb.hypergradient(shared, [client], task.x_star())["x"]
        assert local.norm() > 0.1, "clients agree: a mean of local solutions would be accepted"
    federation = federate and federate(task.problem, task.clients)
    options: dict[str, Any] = {"evaluate": task.evaluate, "every": rounds, "federation": federation}
    result = fb.solve(task.problem, task.clients, algorithm, rounds=rounds, **options)
    assert result.status == "completed"
    y = task.y_star(result.x)["y"]
    if goal is None:
        assert result.history[-1]["hypergradient_norm"] < tolerance * slope
    else:
        x = goal(task)
        if isinstance(x, tuple):
            x, y = x
        assert task.gradient({"x": x})["x"].norm() > 0.1, "the bias does not show on this fixture"
        torch.testing.assert_close(result.x["x"], x, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(result.y["y"], y, rtol=0, atol=10 * tolerance)
