"""Rounds on a GPU: `python -m benchmarks.gpu` prints a table and writes it to bench-gpu.json.

- SimFBO on an MLP 784-200-10, with 10 local steps of batch 64, for 10, 100 and 1,000 clients. The
  floor is the arithmetic of two plain gradients per step: the four matrix products of every
  client's backbone, as batched products.
- SimFBO on LeNet-5 with images of 32 x 32 pixels in 3 colours, 10 clients, as many steps.
- RABO on few-shot episodes with ResNet-12 (5 ways, 5 shots, 28 x 28 pixels), 10 clients with the
  whole network, a quarter of its width, or the five widths of the paper.

Every row also has the seconds to the tenth round, with everything that is measured, captured or
compiled on the way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedbilevel as fb
from benchmarks.fused import network_problem
from benchmarks.measure import Row, show
from fedbilevel.core.precision import Precision
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.core.schedules import Cosine
from fedbilevel.core.tree import flatten, zeros_like
from fedbilevel.runs.run import Run
from fedbilevel.tasks.few_shot import Learner

LOCAL_STEPS = 10
BATCH = 64
WIDTHS = [1.0, 0.5, 0.25, 0.125, 0.0625]


class Variant(NamedTuple):
    """How a round is computed."""

    precision: Precision = "fp32"
    compile: bool = False
    schedule: bool = False

    def __str__(self) -> str:
        words: list[str] = [self.precision]
        if self.compile:
            words.append("compiled")
        if self.schedule:
            words.append("under a schedule")
        return ", ".join(words)


MakeRun = Callable[[str, Variant], Run]  # (device, variant) -> a new run


class Case(NamedTuple):
    """A row: a run, and the milliseconds per round that it should keep to, if any."""

    name: str
    make: MakeRun
    variant: Variant
    limit_ms: float | None = None


def images(count: int, *shape: int, seed: int = 0) -> Tensor:
    """Random images."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def clients_with_labels(count: int, *shape: int) -> list[fb.ClientData]:
    """Clients with 450 training and 150 validation images; at most 100 of them differ."""

    def side(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        labels = images(samples, seed=seed).mul(5).long().abs().clamp(max=9)
        return images(samples, *shape, seed=seed), labels

    distinct = [
        fb.ClientData(train=side(450, 2 * i), val=side(150, 2 * i + 1))
        for i in range(min(count, 100))
    ]
    return [distinct[i % len(distinct)] for i in range(count)]


def simfbo_run(
    net: torch.nn.Module, data: list[fb.ClientData], device: str, variant: Variant
) -> Run:
    """A run of SimFBO in which all clients take part."""
    fed = fb.simulated_federation(
        network_problem(net).to(device),
        data,
        fb.Environment(local_steps=LOCAL_STEPS, batch_size=BATCH),
        device=device,
        precision=variant.precision,
        compile=variant.compile and device != "cpu",
    )
    method = fb.algorithms.SimFBO()
    if variant.schedule:
        names = ("lr_x", "lr_y", "lr_z")
        cosines: dict[str, Any] = {n: Cosine(getattr(method, n), 0.01, 1000) for n in names}
        method = fb.algorithms.SimFBO(**cosines)
    return Run(method, fed, {"rounds": 10**9})


def mlp(clients: int, device: str, variant: Variant) -> Run:
    """SimFBO on an MLP."""
    net = fb.nets.mlp(784, 200, 10)
    return simfbo_run(net, clients_with_labels(clients, 1, 28, 28), device, variant)


def lenet(device: str, variant: Variant) -> Run:
    """SimFBO on LeNet-5."""
    net = fb.nets.lenet(3, 32, 10)
    return simfbo_run(net, clients_with_labels(10, 3, 32, 32), device, variant)


def few_shot(capacity: float | list[float], device: str, variant: Variant) -> Run:
    """RABO on episodes of random images, with ResNet-12."""
    net = fb.nets.resnet12(1, 28, 5)
    learner = Learner(net, ways=5, shots=5, ridge=0.1, steps=10, lr=0.5)
    _, x, y = fb.split_module(net, lower="head.")
    problem = fb.Problem(
        upper=learner.upper,
        lower=learner.lower,
        x=x,
        y=zeros_like(y),
        lower_level="private",
        embed=learner.embed,
        axes=fb.nets.axes(net),
    )
    data = []
    for client in range(10):
        characters = images(96, 20, 1, 28, 28, seed=client)
        data.append(fb.ClientData(train={"support": characters}, val={"query": characters}))
    fed = fb.simulated_federation(
        problem.to(device),
        data,
        fb.Environment(batch_size=5, local_steps=1, capacity=capacity),
        device=device,
        precision=variant.precision,
        compile=variant.compile and device != "cpu",
    )
    method = fb.algorithms.RABO(lr_x=1.0, lr_y=0.5, lower_steps=5, neumann_lr=0.5, neumann_steps=5)
    return Run(method, fed, {"rounds": 10**9})


def cases() -> list[Case]:
    """The rows, in the order of the table; the first one also loads PyTorch's kernels."""
    exact = Variant()
    compiled = Variant(compile=True)
    convolution_variants = [exact, Variant(precision="tf32"), Variant(precision="bf16")]
    rows = []
    for name, capacity, limit_ms in (
        ("five widths", WIDTHS, 30.0),
        ("width 1/4", 0.25, 15.0),
        ("full width", 1.0, None),
    ):
        for variant in convolution_variants:
            make = partial(few_shot, capacity)
            rows.append(Case(f"ResNet-12, 5-way 5-shot, {name}", make, variant, limit_ms))
    for variant in [*convolution_variants, Variant(precision="bf16", compile=True)]:
        rows.append(Case("LeNet-5, 10 clients", lenet, variant, 10.0))
    limits_ms = {10: (2.1, 1.5), 100: (5.7, 4.0), 1000: (44.0, 18.0)}
    for clients, (exact_ms, fastest_ms) in limits_ms.items():
        name = f"MLP, {clients:,} clients"
        make = partial(mlp, clients)
        rows.append(Case(name, make, exact))
        rows.append(Case(name, make, compiled, exact_ms))
        rows.append(Case(name, make, Variant(precision="bf16", compile=True), fastest_ms))
        rows.append(Case(name, make, Variant(precision="bf16-all", compile=True), fastest_ms))
    rows.append(Case("MLP, 10 clients", partial(mlp, 10), Variant(compile=True, schedule=True)))
    return rows


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of a function, until the GPU has finished."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def floor_milliseconds(clients: int) -> float:
    """Return the milliseconds of the matrix products of a round, both batches at once."""
    inputs = torch.randn(clients, 2 * BATCH, 784, device="cuda")
    gradients = torch.randn(clients, 2 * BATCH, 200, device="cuda")
    weights = torch.randn(clients, 200, 784, device="cuda")

    def products() -> None:
        for _ in range(LOCAL_STEPS):
            torch.bmm(inputs, weights.transpose(1, 2))
            torch.bmm(gradients.transpose(1, 2), inputs)

    milliseconds(products, 3)
    return milliseconds(products, 10)


def advance(run: Run, rounds: int = 10) -> None:
    """Advance as between two evaluations: the host continues while the GPU computes."""
    with relaxed_garbage_collection():
        for _ in range(rounds):
            run.fed.mark()
            run.advance()


def disagreement(make: MakeRun) -> float:
    """Return the relative distance of x from that on a CPU after one round, in float32.

    After more rounds, the rounding of each has been amplified by the dynamics of the method.
    """
    finals = []
    for device in ("cuda", "cpu"):
        run = make(device, Variant())
        run.advance()
        finals.append(flatten(run.state.x).double().cpu())
    on_gpu, on_cpu = finals
    return float((on_gpu - on_cpu).norm() / on_cpu.norm())


def row(case: Case) -> Row:
    """Measure one case."""
    run = case.make("cuda", case.variant)
    torch.cuda.synchronize()
    started = time.perf_counter()
    advance(run)
    torch.cuda.synchronize()
    tenth_s = time.perf_counter() - started
    round_ms = milliseconds(lambda: advance(run), 5) / 10
    detail = f"{round_ms:.2f} ms per round, {tenth_s:.1f} s to the tenth round"
    limit = ""
    ratio = 0.0
    if case.limit_ms is not None:
        limit = f"at most 1 ({case.limit_ms:g} ms)"
        ratio = round_ms / case.limit_ms
    torch.cuda.empty_cache()
    result = Row(f"a round / its limit, {case.name}, {case.variant}", ratio, limit, detail)
    print(result, flush=True)
    return result


def main() -> None:
    """Measure all cases."""
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that PyTorch can use")
    rows = [row(case) for case in cases()]
    for clients in (10, 100, 1000):
        floor_ms = floor_milliseconds(clients)
        detail = f"{floor_ms:.2f} ms per round"
        rows.append(Row(f"matrix products of a round in fp32, {clients} clients", 0.0, "", detail))
    for name, make in (("MLP", partial(mlp, 10)), ("LeNet-5", lenet)):
        detail = f"{disagreement(make):.1e}"
        rows.append(Row(f"distance of x from that on a CPU, one round, {name}", 0.0, "", detail))
    show(rows, Path("bench-gpu.json"))


if __name__ == "__main__":
    main()
