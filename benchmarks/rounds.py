"""Whole rounds in the runtime: SimFBO's against the arithmetic of FedAvg's, FedNest's against a matrix product."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import fedbilevel as fb
from benchmarks.fused import problem
from benchmarks.measure import Row, describe, seconds
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.runs.run import Run

CLIENTS, COHORT, SAMPLES, BATCH = 40, 10, 300, 64
WARM_UP = 55  # iterations, after which every step is traced


def federation() -> list[fb.ClientData]:
    """Clients whose samples are parts of one tensor, as those of tasks are."""
    count = 2 * CLIENTS * SAMPLES
    images = normal(root(0, "bench"), (count, 1, 28, 28)).split(SAMPLES)
    sides = list(zip(images, (torch.arange(count) % 10).split(SAMPLES), strict=True))
    return [
        fb.ClientData(train=train, val=val)
        for train, val in zip(sides[::2], sides[1::2], strict=True)
    ]


def fedavg_arithmetic(steps: int) -> Callable[[], object]:
    """So many steps of gradient descent of a stack of MLPs, one plain gradient each, and the mean of where they end."""
    mlp = problem(fb.nets.mlp(784, 200, 10))
    start = [*mlp.x.values(), *mlp.y.values()]
    batches = [
        (
            normal(fold_in(root(0, "bench"), k), (COHORT, BATCH, 784)),
            torch.arange(COHORT * BATCH).view(COHORT, -1) % 10,
        )
        for k in range(steps)
    ]

    def train() -> list[Tensor]:
        w, c, v, e = (t.expand(COHORT, *t.shape).clone() for t in start)
        for a, labels in batches:
            h = torch.baddbmm(c.unsqueeze(1), a, w.transpose(1, 2))
            r = h.relu()
            p = torch.baddbmm(e.unsqueeze(1), r, v.transpose(1, 2)).softmax(-1)
            p.scatter_add_(2, labels.unsqueeze(-1), torch.full((*labels.shape, 1), -1.0))
            p /= BATCH
            dh = torch.bmm(p, v).mul_(h > 0)
            w.baddbmm_(dh.transpose(1, 2), a, alpha=-0.05)
            c.sub_(dh.sum(1), alpha=0.05)
            v.baddbmm_(p.transpose(1, 2), r, alpha=-0.05)
            e.sub_(p.sum(1), alpha=0.05)
        return [t.mean(0) for t in (w, c, v, e)]

    return train


def in_runtime(name: str, steps: int, **settings: object) -> Callable[[], None]:
    """A whole round: cohort, batches, local steps, acceptance, ledger, server's step."""
    environment = fb.Environment(participation=COHORT, local_steps=steps, batch_size=BATCH)
    mlp = problem(fb.nets.mlp(784, 200, 10))
    run = Run(
        fb.algorithms.get(name)(**settings),
        fb.simulated_federation(mlp, federation(), environment),
        {},
    )
    for _ in range(WARM_UP):
        run.advance()

    def round_() -> None:
        run.fed.mark()  # as `Run` does before every iteration
        run.advance()

    return round_


def against_fedavg(steps: int) -> list[Row]:
    """SimFBO's step is 3 gradients in the ledger. They come from one pass over two batches, so that two are compared as
    well: they would be the floor of anything that looks at both batches."""
    functions = {
        "simfbo": in_runtime("simfbo", steps),
        "three gradients": fedavg_arithmetic(3 * steps),
        "two gradients": fedavg_arithmetic(2 * steps),
        "fedavg in the runtime, three": in_runtime("fedavg", 3 * steps),
    }
    times = seconds(functions, 200 // steps)
    case = f"MLP, {COHORT} clients, batch {BATCH}, local steps: {steps}"
    return [
        Row(f"a simfbo round / {title}, {case}", times["simfbo"] / times[against], limit, detail)
        for title, against, limit, detail in (
            (
                "FedAvg's arithmetic for as many gradients",
                "three gradients",
                "at most 1.25",
                describe(times),
            ),
            ("FedAvg's arithmetic for two gradients a step", "two gradients", "", ""),
            ("a FedAvg round of as many gradients", "fedavg in the runtime, three", "", ""),
        )
    ]


def under_a_schedule(steps: int) -> list[Row]:
    """A schedule's step sizes are inputs of the traced step, so that a round under one costs as much as without."""
    cosine = fb.schedules.Cosine(start=0.05, end=0.01, iterations=1000)
    functions = {
        "constant": in_runtime("simfbo", steps),
        "cosine": in_runtime("simfbo", steps, lr_x=cosine, lr_y=cosine, lr_z=cosine),
    }
    times = seconds(functions, 200 // steps)
    name = f"a simfbo round under a cosine schedule / under constants, local steps: {steps}"
    return [Row(name, times["cosine"] / times["constant"], "at most 1.05", describe(times))]


def fednest(dropout: float, partition: str) -> Callable[[], None]:
    """An iteration of FedNest as its published code has it: 10 rounds. Nothing is skipped: the ledger's counts tell."""
    validation, steps = (0.5, 25) if partition == "iid" else (0.2, 40)  # 5 epochs of batch 64
    task = fb.tasks.load(
        "hyper-representation",
        data="mnist",
        partition=partition,
        clients=100,
        validation=validation,
        hidden=200,
        dropout=dropout,
        ridge=0.0,
        norm_penalty=0.1,
    )
    method = fb.algorithms.FedNest(
        compat="reference", inner_rounds=1, neumann_steps=5, lower_steps="5 epochs"
    )
    environment = fb.Environment(participation=10, batch_size=64)
    run = Run(method, fb.simulated_federation(task.problem, task.clients, environment), {})
    # q, 2 a lower step, v, 5 Hessian products, h; the one step on x is along h alone
    each = 10 * (1 + 2 * steps + 1 + 5 * 2 + 3)

    def ten_rounds() -> None:
        before = run.fed.ledger.totals()
        run.advance()
        after = run.fed.ledger.totals()
        assert (after["rounds"] - before["rounds"], after["gradients"] - before["gradients"]) == (
            10,
            each,
        )

    for _ in range(WARM_UP):
        ten_rounds()
    return ten_rounds


def against_a_product() -> list[Row]:
    """Seconds carry over between machines as multiples of a product of two 1024 x 1024 matrices (11.5 ms on two idle
    cores of an EPYC, where FedNest's published code takes 0.20 to 0.24 s a round)."""
    if not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        print("FedNest's rounds are measured on MNIST, which is not in $FEDBILEVEL_DATA: left out")
        return []
    square = torch.ones(1024, 1024)
    found = []
    for partition in ("iid", "shards"):
        functions: dict[str, Callable[[], object]] = {
            "with dropout": fednest(0.5, partition),
            "without": fednest(0.0, partition),
            "product": lambda: square @ square,
        }
        times = seconds(functions, 30)
        for name, limit in (("with dropout", 0.025), ("without", 0.013)):
            each = times[name] / 10
            bound = (
                f"at most {limit / 0.0115:.2f} ({limit} s on two idle cores)"
                if partition == "iid"
                else ""
            )
            title = f"a round of fednest as coded, {partition} MNIST, dropout {'.5' if 'with ' in name else 'off'}"
            detail = f"{each:.4f} s a round, product {times['product']:.4f} s"
            found.append(Row(f"{title} / a matrix product", each / times["product"], bound, detail))
    return found


def rows() -> list[Row]:
    return [
        *against_fedavg(1),
        *against_fedavg(10),
        *under_a_schedule(1),
        *under_a_schedule(10),
        *against_a_product(),
    ]
