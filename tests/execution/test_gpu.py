"""What is different on a GPU: imitated on a CPU where possible, run on a GPU where there is one.

This file needs PyTorch, NumPy, pytest and the core of the package, and nothing else, so that it
runs on a machine that has only these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.tree import flatten
from fedbilevel.execution.stacked import _steps as steps
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs
from fedbilevel.execution.stacked._pools import Pools
from fedbilevel.execution.stacked._trace import trace
from fedbilevel.federation.delays import Faults
from fedbilevel.runs.run import Run
from fedbilevel.tasks.quadratic import quadratic
from tests.support.gpu import (
    check_same_run,
    defer_checks,
    disable_capture,
    imitate_gpu,
    network_problem,
)

METHODS = [name for name in algorithms.names() if "shared" in algorithms.get(name).lower_levels]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def run_iterations(
    name: str, device: str = "cpu", iterations: int = 6, like_a_gpu: bool = False
) -> Run:
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)
    # The two sides differ in size, because draws depend on it.
    clients = [
        fb.ClientData(client.train, tuple(tensor[:5] for tensor in client.val))
        for client in task.clients
    ]
    environment = fb.Environment(local_steps=(1, 4), batch_size=3, participation=4)
    fed = fb.simulated_federation(task.problem.to(device), clients, environment, device=device)
    if like_a_gpu:
        imitate_gpu(fed)
    run = Run(algorithms.get(name)(), fed, {"rounds": 10**6})
    for _ in range(iterations):
        run.advance()
    return run


@pytest.mark.parametrize(
    "name", ["simfbo", "asfbo", "fednest", "fedbioacc", "adafbio", "afbo", "rabo"]
)
def test_a_stack_of_constant_size_computes_the_same_as_one_that_shrinks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable_capture(monkeypatch)
    check_same_run(run_iterations(name), run_iterations(name, like_a_gpu=True))


def test_a_compiled_task_draws_and_sums_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace stands in for the compiler."""

    def run_capturing(
        self: CudaGraphs, _: str, __: Any, program: Any, leaves: Any, spec: Any
    ) -> Any:
        self.capturing = True
        try:
            return program(pytree.tree_unflatten(leaves, spec))
        finally:
            self.capturing = False

    defer_checks(monkeypatch)
    monkeypatch.setattr(CudaGraphs, "run", run_capturing)
    monkeypatch.setattr(steps, "compile_trace", trace)
    compiled = run_iterations("simfbo", iterations=0, like_a_gpu=True)
    step_runner = compiled.fed.transport.executor.step_runner  # type: ignore[attr-defined]
    step_runner.compile = True
    for _ in range(6):
        compiled.advance()
    compiled.fed.check_pending()
    check_same_run(run_iterations("simfbo"), compiled)
    # Keys, indices and sums are compiled; they take no gradient, steps do.
    without_gradients = [
        traced for traced in step_runner.traces.values() if traced and traced.gradients == 0
    ]
    assert len(without_gradients) >= 3


def test_features_belong_to_their_clients_even_if_the_pool_is_full() -> None:
    problem, clients = network_problem(clients=6, hidden=8)
    x, y = problem.start
    cpu = fb.simulated_federation(problem, clients)
    gpu = fb.simulated_federation(problem, clients)
    imitate_gpu(gpu)
    gpu.transport.executor.sample_store.pools = Pools(0, "cpu")  # type: ignore[attr-defined]
    for cohort in ([0, 1, 2], [2, 3, 4]):
        expected, actual = (
            flatten(fed.ask(LowerGradient(full=True), cohort, x=x, y=y).mean("q"))
            for fed in (cpu, gpu)
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "conditions"),
    [
        ("simfbo", {"faults": Faults(drop=0.3)}),
        ("simfbo", {"faults": Faults(corrupt=0.3)}),
        ("fedbioacc", {}),
    ],
    ids=["lost", "corrupted", "remembers"],
)
def test_lost_corrupted_and_remembered_replies_are_the_same(
    name: str, conditions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    defer_checks(monkeypatch)
    problem, clients = network_problem(clients=5, hidden=8)
    environment = fb.Environment(batch_size=4, participation=4, **conditions)
    runs = []
    for like_a_gpu in (False, True):
        fed = fb.simulated_federation(problem, clients, environment)
        if like_a_gpu:
            imitate_gpu(fed)
        run = Run(algorithms.get(name)(), fed, {"rounds": 4})
        assert list(run)
        runs.append(run)
    cpu, gpu = runs
    check_same_run(cpu, gpu)
    assert cpu.fed.ledger.refused_replies == gpu.fed.ledger.refused_replies


def test_compiling_on_a_cpu_is_refused() -> None:
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match="compile is True, but device is 'cpu'"):
        fb.simulated_federation(task.problem, task.clients, compile=True)


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_numbers_of_a_cpu(name: str) -> None:
    """Tasks are captured from their third use on. Peak memory differs with the kernels."""
    cpu = run_iterations(name, iterations=12)
    gpu = run_iterations(name, "cuda", iterations=12)
    for field in cpu.state._fields:
        expected = getattr(cpu.state, field)
        actual = getattr(gpu.state, field)
        if hasattr(expected, "map"):
            close = torch.allclose(flatten(expected), flatten(actual).cpu(), rtol=1e-8, atol=1e-10)
            assert close, field
    for phase, cost in cpu.fed.ledger.phases.items():
        assert replace(gpu.fed.ledger.phases[phase], peak_bytes=0) == replace(cost, peak_bytes=0)
    captured = gpu.fed.transport.executor.graphs.captured  # type: ignore[attr-defined]
    assert any(captured.values()), "no task was captured"


@needs_gpu
def test_a_compiled_task_with_dropout_gives_the_numbers_of_a_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "fedbilevel")
    problem, clients = network_problem(clients=4, hidden=16, dropout=0.5)
    environment = fb.Environment(local_steps=3, batch_size=8)
    states = []
    for device in ("cpu", "cuda"):
        fed = fb.simulated_federation(
            problem.to(device),
            clients,
            environment,
            device=device,
            compile=device == "cuda",
        )
        run = Run(algorithms.get("simfbo")(), fed, {"rounds": 10**6})
        for _ in range(6):
            run.advance()
        states.append(torch.cat([flatten(tree).cpu() for tree in run.state]))
    executor = fed.transport.executor  # type: ignore[attr-defined]
    assert executor.graphs.captured
    assert all(executor.graphs.captured.values())
    assert executor.step_runner.traces
    logged = [record.getMessage() for record in caplog.records if record.name == "fedbilevel"]
    assert all(executor.step_runner.traces.values()), logged
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)
