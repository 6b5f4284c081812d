"""Rounds on a GPU: `python -m benchmarks.gpu` prints the same table as `make bench`, written to bench-gpu.json.

SimFBO, MLP 784-200-10, 10 local steps of batch 64. The floor is the arithmetic of two plain gradients a step: the four
matrix products of every client's backbone, as batched products of the library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from benchmarks.measure import Row, show
from fedbilevel import nets
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.core.schedules import Cosine
from fedbilevel.core.tree import Tree, dot, flatten
from fedbilevel.runs.run import Run

TAU, BATCH = 10, 64
LIMITS = {10: 3.0, 100: 6.0, 1000: 25.0}  # milliseconds a round


def run(
    clients: int,
    device: str,
    precision: str = "fp32",
    compile: bool = False,
    schedule: bool = False,
) -> Run:
    net = nets.mlp(784, 200, 10)
    _, x, y = fb.split_module(net, lower="head.")
    below, above = nets.stem(net)

    def embed(x: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(above({**x, **y}, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.5e-3 * dot(y, y)

    draw = torch.Generator().manual_seed(0)

    def side(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 1, 28, 28, generator=draw), torch.randint(
            10, (samples,), generator=draw
        )

    held = [fb.ClientData(train=side(450), val=side(150)) for _ in range(min(clients, 100))]
    data = [held[i % len(held)] for i in range(clients)]
    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=embed).to(device)
    environment = fb.Environment(local_steps=TAU, batch_size=BATCH)
    parts: Any = {"device": device, "precision": precision, "compile": compile}
    fed = fb.simulated_federation(problem, data, environment, **parts)
    method = SimFBO()
    if schedule:
        steps = {
            name: Cosine(getattr(method, name), 0.01, 1000) for name in ("lr_x", "lr_y", "lr_z")
        }
        method = SimFBO(**steps)
    return Run(method, fed, {"rounds": 10**9})


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def floor(clients: int) -> float:
    """Milliseconds of the products of a round's two gradients, both batches at once."""
    a, d = (torch.randn(clients, 2 * BATCH, size, device="cuda") for size in (784, 200))
    w = torch.randn(clients, 200, 784, device="cuda")

    def products() -> None:
        for _ in range(TAU):
            torch.bmm(a, w.transpose(1, 2))
            torch.bmm(d.transpose(1, 2), a)

    milliseconds(products, 3)
    return milliseconds(products, 10)


def ten(run: Run) -> None:
    """Rounds as they follow each other between two evaluations: the host goes on while the GPU computes."""
    with relaxed_garbage_collection():
        for _ in range(10):
            run.fed.mark()
            run.advance()


def row(clients: int, precision: str, compile: bool, schedule: bool) -> Row:
    on_gpu = run(clients, "cuda", precision, compile, schedule)
    on_cpu = run(clients, "cpu", precision, schedule=schedule) if clients <= 10 else None
    started = time.perf_counter()
    for _ in range(4):
        on_gpu.advance()
    first = time.perf_counter() - started
    agreement = ""
    if on_cpu:
        for _ in range(4):
            on_cpu.advance()
        x, there = flatten(on_cpu.state.x), flatten(on_gpu.state.x).cpu()
        agreement = (
            f", x after 4 rounds as on the CPU to {float((x - there).norm() / x.norm()):.0e}"
        )
    each, least = milliseconds(lambda: ten(on_gpu), 5) / 10, floor(clients)
    detail = f"{each:.2f} ms a round, products alone {least:.2f} ms, the first 4 rounds {first:.1f} s{agreement}"
    words = [
        f"{clients:,} clients",
        precision,
        *["compiled"] * compile,
        *["under a schedule"] * schedule,
    ]
    title = f"a round / its matrix products in fp32, {', '.join(words)}"
    torch.cuda.empty_cache()
    return Row(title, each / least, f"{LIMITS[clients]:g} ms", detail)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that PyTorch can use")
    kinds = [
        ("fp32", False, False),
        ("fp32", True, False),
        ("fp32", True, True),
        ("bf16", True, False),
    ]
    found = [row(clients, *kind) for clients in LIMITS for kind in kinds]
    show(found, Path("bench-gpu.json"))
