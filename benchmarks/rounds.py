"""Whole rounds in the runtime.

SimFBO's rounds are compared with the arithmetic of FedAvg, rounds under a schedule with rounds
under constants, and FedNest's rounds with a matrix product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import fedbilevel as fb
from benchmarks.fused import network_problem
from benchmarks.measure import Row, describe, seconds
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.runs.run import Run

CLIENTS = 40
COHORT = 10
SAMPLES = 300
BATCH = 64
WARM_UP = 55  # iterations, after which every step is traced

PRODUCT_S = 0.0115  # the matrix product below, on two idle cores of an EPYC


def clients_of_one_tensor() -> list[fb.ClientData]:
    """Clients whose samples are slices of one tensor, as those of learning tasks are."""
    count = 2 * CLIENTS * SAMPLES
    images = normal(root(0, "bench"), (count, 1, 28, 28)).split(SAMPLES)
    labels = (torch.arange(count) % 10).split(SAMPLES)
    sides = list(zip(images, labels, strict=True))
    pairs = zip(sides[::2], sides[1::2], strict=True)
    return [fb.ClientData(train=train, val=val) for train, val in pairs]


def fedavg_arithmetic(gradients: int) -> Callable[[], list[Tensor]]:
    """Gradient descent on a stack of MLPs, and the mean of where they end."""
    mlp = network_problem(fb.nets.mlp(784, 200, 10))
    start = [*mlp.x.values(), *mlp.y.values()]
    labels = torch.arange(COHORT * BATCH).view(COHORT, -1) % 10
    batches = []
    for step in range(gradients):
        key = fold_in(root(0, "bench"), step)
        batches.append(normal(key, (COHORT, BATCH, 784)))

    def train() -> list[Tensor]:
        w, c, v, e = (tensor.expand(COHORT, *tensor.shape).clone() for tensor in start)
        for a in batches:
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
        return [tensor.mean(0) for tensor in (w, c, v, e)]

    return train


def runtime_round(name: str, steps: int, **settings: object) -> Callable[[], None]:
    """A whole round: cohort, batches, local steps, checks of replies, ledger, server's step."""
    environment = fb.Environment(participation=COHORT, local_steps=steps, batch_size=BATCH)
    mlp = network_problem(fb.nets.mlp(784, 200, 10))
    fed = fb.simulated_federation(mlp, clients_of_one_tensor(), environment)
    run = Run(fb.algorithms.get(name)(**settings), fed, {})
    for _ in range(WARM_UP):
        run.advance()

    def advance() -> None:
        run.fed.mark()  # as a run does before every iteration
        run.advance()

    return advance


def against_fedavg(steps: int) -> list[Row]:
    """Compare a SimFBO round with FedAvg.

    A step of SimFBO counts as 3 gradients in the ledger. They come from one pass over two batches,
    so two gradients are compared as well: the floor of any method that looks at both batches.
    """
    functions: dict[str, Callable[[], object]] = {
        "simfbo": runtime_round("simfbo", steps),
        "three gradients": fedavg_arithmetic(3 * steps),
        "two gradients": fedavg_arithmetic(2 * steps),
        "fedavg in the runtime, three": runtime_round("fedavg", 3 * steps),
    }
    times = seconds(functions, 200 // steps)
    case = f"MLP, {COHORT} clients, batch {BATCH}, local steps: {steps}"

    def row(title: str, compared_with: str, limit: str = "", detail: str = "") -> Row:
        ratio = times["simfbo"] / times[compared_with]
        return Row(f"a simfbo round / {title}, {case}", ratio, limit, detail)

    return [
        row(
            "FedAvg's arithmetic for as many gradients",
            "three gradients",
            "at most 1.2",
            describe(times),
        ),
        row("FedAvg's arithmetic for two gradients per step", "two gradients"),
        row("a FedAvg round with as many gradients", "fedavg in the runtime, three"),
    ]


def under_a_schedule(steps: int) -> Row:
    """Compare a round under a schedule with one under constants.

    Step sizes are inputs of the traced step, so a round under a schedule should cost no more.
    """
    cosine = fb.schedules.Cosine(start=0.05, end=0.01, iterations=1000)
    functions: dict[str, Callable[[], object]] = {
        "constant": runtime_round("simfbo", steps),
        "cosine": runtime_round("simfbo", steps, lr_x=cosine, lr_y=cosine, lr_z=cosine),
    }
    times = seconds(functions, 200 // steps)
    name = f"a simfbo round under a cosine schedule / under constants, local steps: {steps}"
    return Row(name, times["cosine"] / times["constant"], "at most 1.05", describe(times))


def fednest_iteration(dropout: float, partition: str) -> Callable[[], None]:
    """An iteration of FedNest as in its published code: 10 rounds.

    The counts of the ledger are checked, so that nothing is skipped.
    """
    validation = 0.2
    lower_steps = 40  # 5 epochs of batch 64
    if partition == "iid":
        validation = 0.5
        lower_steps = 25
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
    # q, 2 per lower step, v, 5 Hessian products, h; the one step on x is along h alone.
    gradients = 10 * (1 + 2 * lower_steps + 1 + 5 * 2 + 3)

    def advance() -> None:
        before = run.fed.ledger.totals()
        run.advance()
        after = run.fed.ledger.totals()
        assert after["rounds"] - before["rounds"] == 10
        assert after["gradients"] - before["gradients"] == gradients

    for _ in range(WARM_UP):
        advance()
    return advance


def against_a_product() -> list[Row]:
    """Compare FedNest's rounds with a product of two 1024 x 1024 matrices.

    Seconds carry over between machines as multiples of that product, which takes 11.5 ms on two
    idle cores of an EPYC. FedNest's published code takes 0.20 to 0.24 s per round there.
    """
    if not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        print("left out: FedNest's rounds, because MNIST is not in $FEDBILEVEL_DATA")
        return []
    square = torch.ones(1024, 1024)
    rows = []
    for partition in ("iid", "shards"):
        functions: dict[str, Callable[[], object]] = {
            ".5": fednest_iteration(0.5, partition),
            "off": fednest_iteration(0.0, partition),
            "product": lambda: square @ square,
        }
        times = seconds(functions, 30)
        for dropout, limit_s in ((".5", 0.025), ("off", 0.013)):
            round_s = times[dropout] / 10
            limit = ""
            if partition == "iid":
                limit = f"at most {limit_s / PRODUCT_S:.2f} ({limit_s} s on two idle cores)"
            title = f"a round of fednest as coded, {partition} MNIST, dropout {dropout}"
            detail = f"{round_s:.4f} s per round, product {times['product']:.4f} s"
            ratio = round_s / times["product"]
            rows.append(Row(f"{title} / a matrix product", ratio, limit, detail))
    return rows


def rows() -> list[Row]:
    """Compare whole rounds with their arithmetic."""
    return [
        *against_fedavg(1),
        *against_fedavg(10),
        under_a_schedule(1),
        under_a_schedule(10),
        *against_a_product(),
    ]
