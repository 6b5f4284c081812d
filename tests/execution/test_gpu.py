"""What is different on a GPU: imitated on a CPU where possible, run on a GPU where there is one.

This file needs PyTorch, NumPy, pytest and the core of the package, and nothing else, so that it
runs on a machine that has only these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.algorithms.shared import LowerGradient
from fedbilevel.core.nests import flatten as flatten_nest
from fedbilevel.core.nests import unflatten
from fedbilevel.core.precision import products_in
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import flatten
from fedbilevel.execution.stacked import _convolutions as convolutions
from fedbilevel.execution.stacked import _steps as steps
from fedbilevel.execution.stacked import executor as stacked_executor
from fedbilevel.execution.stacked._convolutions import (
    FORWARD,
    TO_INPUTS,
    TO_WEIGHTS,
    Convolutions,
    Geometry,
)
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs
from fedbilevel.execution.stacked._pools import Pools
from fedbilevel.execution.stacked._trace import trace
from fedbilevel.federation.delays import Faults
from fedbilevel.runs.run import Run
from fedbilevel.tasks.quadratic import quadratic
from tests.support.conformance import OWN_HEADS
from tests.support.gpu import (
    check_same_run,
    defer_checks,
    disable_capture,
    imitate_gpu,
    network_problem,
)
from tests.support.ridge import rounding_errors
from tests.support.small_net import small_net

METHODS = [name for name in algorithms.names() if "shared" in algorithms.get(name).lower_levels]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def run_iterations(
    name: str,
    device: str = "cpu",
    iterations: int = 6,
    like_a_gpu: bool = False,
    own_y: bool = False,
) -> Run:
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)
    problem = task.problem
    if own_y or name in OWN_HEADS:
        problem = replace(problem, owner={"y": "client"})
    # The two sides differ in size, because draws depend on it.
    clients = [
        fb.ClientData(client.train, tuple(tensor[:5] for tensor in client.val))
        for client in task.clients
    ]
    environment = fb.Environment(local_steps=(1, 4), batch_size=3, participation=4)
    fed = fb.simulated_federation(problem.to(device), clients, environment, device=device)
    if like_a_gpu:
        imitate_gpu(fed)
    run = Run(algorithms.get(name)(), fed, {"rounds": 10**6})
    for _ in range(iterations):
        run.advance()
    return run


SUBMODEL_METHODS = {
    "importance": algorithms.get("rabo")(),
    "rolling": algorithms.get("fedrolex")(),
    # Clients 1 and 4 hold halves of the same shapes with different units.
    "segments": algorithms.get("rabo")(policy="segments", segments=(0, 0, 0, 0, 1)),
}


def submodel_run(policy: str, device: str = "cpu") -> Run:
    """A run on a Conv-4 in float64, whose clients hold all, a half or a quarter of it."""
    problem, clients, _ = small_net(clients=6)
    environment = fb.Environment(capacity=[1.0, 0.5, 0.25], batch_size=4, local_steps=2)
    fed = fb.simulated_federation(problem.to(device), clients, environment, device=device)
    return Run(SUBMODEL_METHODS[policy], fed, {"rounds": 10**6})


@pytest.mark.parametrize(
    "name", ["simfbo", "asfbo", "fednest", "fedbioacc", "adafbio", "afbo", "rabo"]
)
def test_a_stack_of_constant_size_computes_the_same_as_one_that_shrinks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable_capture(monkeypatch)
    check_same_run(run_iterations(name), run_iterations(name, like_a_gpu=True))


def imitate_capture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Capture by calling, with a trace in the place of the compiler; return the versions called."""
    versions = []

    def run_capturing(
        self: CudaGraphs, _: str, version: str, __: Any, program: Any, leaves: Any, form: Any
    ) -> Any:
        versions.append(version)
        self.capturing = True
        try:
            return program(unflatten(leaves, form))
        finally:
            self.capturing = False

    defer_checks(monkeypatch)
    monkeypatch.setattr(CudaGraphs, "run", run_capturing)
    monkeypatch.setattr(steps, "compile_trace", trace)
    return versions


def test_a_task_is_compiled_once_it_has_run_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = imitate_capture(monkeypatch)
    task = quadratic(clients=3, dim_x=5, dim_y=7)
    fed = fb.simulated_federation(task.problem, task.clients, fb.Environment(local_steps=2))
    imitate_gpu(fed)
    bytes_per_use = 2 * 3 * 8 * (5 + 7 + 7)  # local steps, clients, and x, y, z in float64
    monkeypatch.setattr(stacked_executor, "COMPILE_AFTER", 4.5 * bytes_per_use)
    run = Run(algorithms.get("simfbo")(), fed, {"rounds": 10**6})
    for _ in range(6):
        run.advance()
    assert versions == ["", "", "compiled", "compiled"]  # of the third to the sixth use


def test_a_compiler_that_fails_leaves_the_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no C compiler")

    imitate_capture(monkeypatch)
    monkeypatch.setattr(steps, "compile_trace", fail)
    monkeypatch.setattr(stacked_executor, "COMPILE_AFTER", 0)
    run = run_iterations("simfbo", like_a_gpu=True)
    run.fed.check_pending()
    assert "without PyTorch's compiler: no C compiler" in caplog.text
    check_same_run(run_iterations("simfbo"), run)


def test_a_compiled_task_draws_and_sums_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = imitate_capture(monkeypatch)
    monkeypatch.setattr(stacked_executor, "COMPILE_AFTER", 0)
    compiled = run_iterations("simfbo", like_a_gpu=True)
    compiled.fed.check_pending()
    assert set(versions) == {"compiled"}
    check_same_run(run_iterations("simfbo"), compiled)
    step_runner = compiled.fed.transport.executor.step_runner  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("policy", SUBMODEL_METHODS)
def test_replies_from_submodels_are_summed_on_the_device(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defer_checks(monkeypatch)
    runs = []
    for like_a_gpu in (False, True):
        run = submodel_run(policy)
        if like_a_gpu:
            imitate_gpu(run.fed)
        for _ in range(3):
            run.advance()
        run.fed.check_pending()
        runs.append(run)
    check_same_run(*runs)
    cpu, gpu = (run.fed.records() for run in runs)
    assert gpu == pytest.approx(cpu)
    assert "min_coverage_x" in cpu


def test_compiling_on_a_cpu_is_refused() -> None:
    task = quadratic(clients=2)
    with pytest.raises(ValueError, match="compile is True, but device is 'cpu'"):
        fb.simulated_federation(task.problem, task.clients, compile=True)


@needs_gpu
@pytest.mark.parametrize(
    ("name", "own_y"),
    [(name, False) for name in METHODS]
    + [
        (name, True) for name in ("simfbo", "fedbio", "afbo", "unifbo", "rabo", "aggitd", "fednest")
    ],
)
def test_a_gpu_gives_the_numbers_of_a_cpu(name: str, own_y: bool) -> None:
    """Tasks are captured from their third use on. Peak memory differs with the kernels."""
    cpu = run_iterations(name, iterations=12, own_y=own_y)
    gpu = run_iterations(name, "cuda", iterations=12, own_y=own_y)
    for client in range(5):
        expected = cpu.fed.personal(client, cpu.state.x, cpu.state.y)[1]
        actual = gpu.fed.personal(client, gpu.state.x, gpu.state.y)[1]
        assert torch.allclose(flatten(expected), flatten(actual).cpu(), rtol=1e-8, atol=1e-10)
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
def test_programs_that_run_at_the_same_time_share_no_workspace() -> None:
    """Products of long and thin matrices are split, and the parts are kept in a workspace."""
    graphs = CudaGraphs()
    pairs = [
        [normal(fold_in(root(0, "gpu"), 2 * pair + side), (64, 200_000)) for side in (0, 1)]
        for pair in range(4)
    ]
    leaves = [[matrix.bfloat16().cuda() for matrix in pair] for pair in pairs]
    _, form = flatten_nest(leaves[0])

    def product(inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        return [inputs[0] @ inputs[1].T], None

    def run(pair: int) -> torch.Tensor:
        return graphs.run(str(pair), "", None, product, leaves[pair], form)[0][0]

    alone = [run(pair) for pair in range(4)]
    for _ in range(20):
        with graphs.side_by_side():
            together = [run(pair) for pair in range(4)]
        for expected, actual in zip(alone, together, strict=True):
            assert torch.equal(expected, actual)
    assert len({program.stream for program in graphs.captured.values() if program}) == 4


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


@needs_gpu
@pytest.mark.parametrize("policy", SUBMODEL_METHODS)
def test_submodels_on_a_gpu_give_the_numbers_of_a_cpu(policy: str) -> None:
    weights = []
    for device in ("cpu", "cuda"):
        run = submodel_run(policy, device)
        for _ in range(6):
            run.advance()
        weights.append(torch.cat([flatten(run.state.x), flatten(run.state.y)]).cpu())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-8, atol=1e-10)


GEOMETRIES = {
    "plain": Geometry([1, 1], [0, 0], [1, 1], False, [0, 0], 4),
    "padded": Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "with steps": Geometry([2, 1], [1, 2], [1, 1], False, [0, 0], 2),
    "dilated": Geometry([1, 2], [2, 0], [2, 1], False, [0, 0], 2),
}


def convolution(geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the outputs, the inputs and the weights of a convolution, in float64."""
    inputs = normal(root(0, "inputs"), (5, 3 * geometry.groups, 11, 9), torch.float64)
    weights = normal(root(0, "weights"), (2 * geometry.groups, 3, 3, 2), torch.float64)
    outputs = FORWARD["grouped"](inputs, weights, geometry)
    return normal(root(0, "gradient"), tuple(outputs.shape), torch.float64), inputs, weights


@needs_gpu
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("way", FORWARD)
def test_every_way_of_a_convolution_gives_the_numbers_of_a_cpu(
    way: str, geometry: Geometry
) -> None:
    args = convolution(geometry)
    on_gpu = [tensor.cuda() for tensor in args]
    for ways, count in ((FORWARD, 2), (TO_INPUTS, 3), (TO_WEIGHTS, 3)):
        if way in ways:
            expected = ways["grouped"](*args[-count:], geometry)
            actual = ways[way](*on_gpu[-count:], geometry)
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-10, atol=1e-10)


@needs_gpu
def test_the_way_of_a_convolution_is_chosen_once_and_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = GEOMETRIES["padded"]
    _, inputs, weights = convolution(geometry)
    bias = normal(root(0, "bias"), (len(weights),), torch.float64)
    args = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    expected = torch.nn.functional.conv2d(inputs, weights, bias, *args)
    on_gpu = [tensor.cuda() for tensor in (inputs, weights, bias)]
    with Convolutions() as chosen:
        first = torch.nn.functional.conv2d(*on_gpu, *args)
    assert len(chosen.choices) == 1
    assert set(chosen.choices.values()) <= set(FORWARD)
    monkeypatch.delattr(convolutions, "_fastest")  # it would be missed if it were called again
    with chosen:
        second = torch.nn.functional.conv2d(*on_gpu, *args)
    for outputs in (first, second):
        torch.testing.assert_close(outputs.cpu(), expected, rtol=1e-10, atol=1e-10)


@needs_gpu
def test_the_choices_of_convolutions_are_marked_and_rolled_back() -> None:
    run = submodel_run("rolling", "cuda")
    executor = run.fed.transport.executor  # type: ignore[attr-defined]
    assert executor.mark()["convolutions"] == {}
    for _ in range(6):
        run.advance()
    choices = dict(executor.convolutions.choices)
    assert choices
    mark = executor.mark()
    executor.convolutions.choices.clear()
    assert mark["convolutions"] == choices, "a mark is a copy"
    executor.rollback(mark)
    assert executor.convolutions.choices == choices


@needs_gpu
def test_hypergradients_on_a_gpu_are_as_exact_as_the_precision() -> None:
    for mode in ("stack", "loop"):
        assert max(rounding_errors("fp32", "cuda", mode)) < 2e-6
        in_tf32 = rounding_errors("tf32", "cuda", mode)
        assert 2e-5 < in_tf32.product < 2e-3
        assert 2e-5 < in_tf32.hypergradient < 4e-3
        in_bfloat16 = rounding_errors("bf16-all", "cuda", mode)
        assert 5e-4 < in_bfloat16.product < 1e-2
        assert 5e-4 < in_bfloat16.hypergradient < 2e-2


@needs_gpu
def test_convolutions_in_float32_are_not_rounded_to_tf32() -> None:
    """PyTorch would let them be rounded."""
    images = normal(root(0, "images"), (8, 64, 16, 16), torch.float64)
    weights = normal(root(0, "filters"), (64, 64, 3, 3), torch.float64)
    expected = torch.nn.functional.conv2d(images, weights)
    with products_in("fp32", "cuda"):
        outputs = torch.nn.functional.conv2d(images.float().cuda(), weights.float().cuda())
    error = float((outputs.cpu().double() - expected).norm() / expected.norm())
    assert error < 2e-6


@needs_gpu
def test_records_may_mix_numbers_and_tensors_on_a_gpu() -> None:
    fed = submodel_run("importance", "cuda").fed
    for value in (2.0, torch.tensor(3.0, device="cuda"), torch.tensor(1.0), 2.5):
        fed.record(max_loss=value, min_loss=value)
    assert fed.records() == {"max_loss": 3.0, "min_loss": 1.0}
