"""A round of a first-order method over one of its counterpart with second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import fedbilevel as fb
from benchmarks.measure import Row, describe, seconds
from fedbilevel.tasks.mixture import Transformer

SYMBOLS = 64
WIDTH = 32
BATCH = 8
CLIENTS = 4


def rows() -> list[Row]:
    """Compare on one block of attention, for short and for long sequences."""
    return [row for length in (32, 256) for row in compare(length)]


def compare(length: int) -> list[Row]:
    """Time and peak memory of rounds of memfbo over those of simfbo and of FedAvg."""
    methods = {
        "memfbo": fb.algorithms.MemFBO(),
        "simfbo": fb.algorithms.SimFBO(),  # through unfused attention, where it must
        "fedavg": fb.algorithms.FedAvg(train="y"),
    }
    runs = {}
    for name, method in methods.items():
        environment = fb.Environment(batch_size=BATCH)
        federation = fb.simulated_federation(problem(length), clients(length), environment)
        runs[name] = fb.Run(method, federation, {})
    times = seconds({name: run.advance for name, run in runs.items()}, repeats=7)
    peaks = {name: run.fed.ledger.totals()["peak_bytes"] for name, run in runs.items()}
    what = f"memfbo / simfbo, one block of attention, {length} tokens"
    limits = ("", "") if length == 32 else ("at most 0.4", "at most 0.3")
    return [
        Row(f"a round of {what}", times["memfbo"] / times["simfbo"], limits[0], describe(times)),
        Row(
            f"peak memory of {what}",
            peaks["memfbo"] / peaks["simfbo"],
            limits[1],
            ", ".join(f"{name} {peak / 1e6:.1f} MB" for name, peak in peaks.items()),
        ),
        Row(
            f"a round of memfbo / of FedAvg, one block of attention, {length} tokens",
            times["memfbo"] / times["fedavg"],
            "at most 3.3",
            describe(times),
        ),
    ]


def problem(length: int) -> fb.Problem:
    """Y is a transformer of one block, x a weight per client."""
    torch.manual_seed(0)
    net = Transformer(WIDTH, depth=1, heads=4, context=length, symbols=SYMBOLS)

    def loss(y: fb.Tree, tokens: Tensor) -> Tensor:
        scores = functional_call(net, y, (tokens[:, :-1],))
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, number = batch
        return CLIENTS * x["weights"].gather(0, number[:1]).sum() * loss(y, tokens)

    return fb.Problem(
        lambda x, y, batch: loss(y, batch[0]),
        lower,
        x={"weights": torch.full((CLIENTS,), 1 / CLIENTS)},
        y={name: value.detach() for name, value in net.named_parameters()},
    )


def clients(length: int) -> list[fb.ClientData]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for number in range(CLIENTS):
        tokens = torch.randint(SYMBOLS, (2 * BATCH, length + 1), generator=generator)
        side = (tokens, torch.full((2 * BATCH,), number))
        data.append(fb.ClientData(side, side))
    return data
