"""Every method computes the same numbers on every executor and transport of one process.

The reference executor on the virtual clock is the truth. Several processes, real nodes and GPUs
have tests elsewhere.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.execution.reference import ReferenceExecutor
from fedbilevel.execution.stacked import StackedExecutor
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run
from tests.support.architecture import names as architecture
from tests.support.conformance import (
    NAMES,
    build,
    case,
    check_converges,
    moved,
    quadratic,
    tensors,
    uneven,
)

ITERATIONS = 4
OPTIONS: dict[str, Any] = {"weights": "samples", "seed": 2}
COHORTS = fb.Environment(participation=5, local_steps=(1, 4), batch_size=3)
# Draws are keyed by the number of a task. Without a barrier, on threads, that number depends on who
# arrives first: methods that post are therefore compared without draws.
EVERYONE = fb.Environment(local_steps=(1, 4), batch_size=3)
WITHOUT_DRAWS = fb.Environment(local_steps=3)
POSTING = ("afbo", "afl", "adbo")
# The transport of the documentation has no links: tests/conformance/test_gossip.py.
WITH_SERVER = [name for name in NAMES if fb.algorithms.get(name).has_server]


def on_the_virtual_clock(
    task: fb.tasks.Task, environment: fb.Environment, **options: Any
) -> Federation:
    return fb.simulated_federation(task.problem, task.clients, environment, **OPTIONS, **options)


def on_threads(task: fb.tasks.Task, environment: fb.Environment, kind: Any) -> Federation:
    """The transport of docs/howto/own-stage.md, with its weights and its executor replaced."""
    federate = architecture()["on_threads"]
    fed: Federation = federate(task.problem, task.clients, environment, seed=OPTIONS["seed"])
    sizes = [client.size("train") for client in task.clients]
    fed.assigner.weights = lambda: [size / sum(sizes) for size in sizes]
    executor = kind(task.problem, task.clients, environment.batch_size)
    fed.transport.executor = executor  # type: ignore[attr-defined]
    return fed


def run(name: str, fed: Federation) -> Run:
    started = Run(build(name), fed, {})
    for _ in range(ITERATIONS):
        started.advance()
    return started


def assert_agree(other: Run, truth: Run, variables_only: bool = False) -> None:
    """Check that two runs have the same costs and the same state.

    Methods that post keep the idle clients in their state, in the order of arrival: for these, with
    `variables_only`, x and y are compared alone.
    """
    assert other.fed.ledger.phases == truth.fed.ledger.phases
    ours = tensors(other.state)
    theirs = tensors(truth.state)
    if variables_only:
        ours = tensors((other.state.x, other.state.y))
        theirs = tensors((truth.state.x, truth.state.y))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_stacks_and_chunks_give_the_numbers_of_the_reference(name: str) -> None:
    task = uneven(quadratic(name, clients=7, samples=6, noise=0.5, seed=1))
    truth = run(name, on_the_virtual_clock(task, COHORTS, mode="loop"))
    assert isinstance(truth.fed.transport.executor, ReferenceExecutor)  # type: ignore[attr-defined]
    assert moved(truth).norm() > 1e-3
    assert_agree(run(name, on_the_virtual_clock(task, COHORTS)), truth)
    assert_agree(run(name, on_the_virtual_clock(task, COHORTS, memory=1)), truth)


@pytest.mark.parametrize("name", WITH_SERVER)
def test_another_transport_gives_the_numbers_of_the_virtual_clock(name: str) -> None:
    task = uneven(quadratic(name, clients=4, samples=6, noise=0.5, seed=1))
    posts = name in POSTING
    environment = WITHOUT_DRAWS if posts else EVERYONE
    truth = run(name, on_the_virtual_clock(task, environment, mode="loop"))
    assert moved(truth).norm() > 1e-3
    assert_agree(
        run(name, on_threads(task, environment, ReferenceExecutor)), truth, variables_only=posts
    )


@pytest.mark.parametrize("name", ["simfbo", "afbo"])
def test_a_stacked_executor_serves_another_transport(name: str) -> None:
    task = quadratic(name, clients=3, samples=6, noise=0.5, seed=1)
    truth = run(name, on_the_virtual_clock(task, WITHOUT_DRAWS, mode="loop"))
    fed = on_threads(task, WITHOUT_DRAWS, StackedExecutor)
    # A stacked executor serves one thread at a time.
    fed.transport.pool = ThreadPoolExecutor(1)  # type: ignore[attr-defined]
    assert_agree(run(name, fed), truth, variables_only=True)


@pytest.mark.parametrize("name", ["simfbo", "afbo"])
def test_methods_converge_on_the_transport_of_the_documentation(name: str) -> None:
    mine = case(name)
    check_converges(build(name), mine.rounds, mine.tolerance, federate=architecture()["on_threads"])
