"""Rounds on a GPU: `python -m benchmarks.gpu` prints a table and writes it to bench-gpu.json.

SimFBO on an MLP 784-200-10, with 10 local steps of batch 64. The floor is the arithmetic of two
plain gradients per step: the four matrix products of every client's backbone, as batched products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import fedbilevel as fb
from benchmarks.fused import network_problem
from benchmarks.measure import Row, show
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.core.schedules import Cosine
from fedbilevel.core.tree import flatten
from fedbilevel.runs.run import Run

LOCAL_STEPS = 10
BATCH = 64
LIMITS = {10: 3.0, 100: 6.0, 1000: 25.0}  # milliseconds per round, by number of clients


class Variant(NamedTuple):
    """How a round is computed."""

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    schedule: bool = False


VARIANTS = [
    Variant(),
    Variant(compile=True),
    Variant(compile=True, schedule=True),
    Variant(precision="bf16", compile=True),
]


def new_run(clients: int, device: str, variant: Variant) -> Run:
    """A run of SimFBO in which all clients take part."""
    generator = torch.Generator().manual_seed(0)

    def side(samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(samples, 1, 28, 28, generator=generator)
        return images, torch.randint(10, (samples,), generator=generator)

    data = [fb.ClientData(train=side(450), val=side(150)) for _ in range(min(clients, 100))]
    problem = network_problem(fb.nets.mlp(784, 200, 10)).to(device)
    fed = fb.simulated_federation(
        problem,
        [data[i % len(data)] for i in range(clients)],
        fb.Environment(local_steps=LOCAL_STEPS, batch_size=BATCH),
        device=device,
        precision=variant.precision,
        compile=variant.compile and device != "cpu",
    )
    method = SimFBO()
    if variant.schedule:
        names = ("lr_x", "lr_y", "lr_z")
        method = SimFBO(**{name: Cosine(getattr(method, name), 0.01, 1000) for name in names})
    return Run(method, fed, {"rounds": 10**9})


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


def advance_ten_rounds(run: Run) -> None:
    """Advance as between two evaluations: the host continues while the GPU computes."""
    with relaxed_garbage_collection():
        for _ in range(10):
            run.fed.mark()
            run.advance()


def agreement(run: Run, clients: int, variant: Variant) -> str:
    """Compare x after 4 rounds with that on a CPU, if there are few clients."""
    if clients > 10:
        return ""
    on_cpu = new_run(clients, "cpu", variant)
    for _ in range(4):
        on_cpu.advance()
    expected = flatten(on_cpu.state.x)
    error = float((expected - flatten(run.state.x).cpu()).norm() / expected.norm())
    return f", x after 4 rounds as on the CPU to {error:.0e}"


def row(clients: int, variant: Variant) -> Row:
    """Measure one variant with so many clients."""
    run = new_run(clients, "cuda", variant)
    started = time.perf_counter()
    for _ in range(4):
        run.advance()
    first_s = time.perf_counter() - started
    agrees = agreement(run, clients, variant)
    round_ms = milliseconds(lambda: advance_ten_rounds(run), 5) / 10
    floor_ms = floor_milliseconds(clients)
    detail = (
        f"{round_ms:.2f} ms per round, products alone {floor_ms:.2f} ms, "
        f"the first 4 rounds {first_s:.1f} s{agrees}"
    )
    words = [f"{clients:,} clients", variant.precision]
    if variant.compile:
        words.append("compiled")
    if variant.schedule:
        words.append("under a schedule")
    title = f"a round / its matrix products in fp32, {', '.join(words)}"
    torch.cuda.empty_cache()
    return Row(title, round_ms / floor_ms, f"{LIMITS[clients]:g} ms", detail)


def main() -> None:
    """Measure all variants."""
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that PyTorch can use")
    rows = []
    for clients in LIMITS:
        rows += [row(clients, variant) for variant in VARIANTS]
    show(rows, Path("bench-gpu.json"))


if __name__ == "__main__":
    main()
