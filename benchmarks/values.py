"""What `fb.value` costs, over leaving out one site after the other with the same solver."""

from __future__ import annotations

import torch

import fedbilevel as fb
from benchmarks.measure import Row, seconds
from fedbilevel.diagnostics import value as values

LEFT_OUT = 3  # of a hundred sites; the time of all is in proportion


def rows() -> list[Row]:
    """Compare at the six sites of the RAND experiment, and with its records at a hundred sites."""
    task = fb.tasks.load("sites", trusted=0.15)
    return [
        compare(task.plain, task.baselines["FedAvg, all sites"], 6, "at most 0.33"),
        compare(task.plain, hundred(task), LEFT_OUT, "at most 0.04"),
    ]


def hundred(task: fb.tasks.Task) -> list[fb.ClientData]:
    """The records of all sites, shuffled and dealt to a hundred."""
    sides = []
    for side in ("train", "val"):
        parts = [getattr(client, side) for client in task.clients]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        count = len(joined["label"])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        pieces = order.tensor_split(100)
        sides.append([{name: v[piece] for name, v in joined.items()} for piece in pieces])
    return [fb.ClientData(train=train, val=val) for train, val in zip(*sides, strict=True)]


def compare(problem: fb.Problem, clients: list[fb.ClientData], left_out: int, limit: str) -> Row:
    """The time of all values over that of leaving out every client."""
    federation = fb.simulated_federation(problem, clients, weights="samples", mode="loop")
    everyone = list(range(len(clients)))
    x, start = problem.start

    def value() -> None:
        fb.value(problem, federation=federation, groups="person")

    def solve() -> None:
        values._solve(federation, x, start, everyone)

    y, _ = values._solve(federation, x, start, everyone)

    def leave_out() -> None:
        for client in everyone[:left_out]:
            others = [other for other in everyone if other != client]
            without, _ = values._solve(federation, x, y, others)
            values._ask(federation, values.UpperLoss(full=True), everyone, x=x, y=without)

    times = seconds({"value": value, "solve": solve, "leave out": leave_out}, repeats=3, warm_up=1)
    all_left_out = times["solve"] + times["leave out"] * len(clients) / left_out
    name = f"fb.value / leaving out one after the other, {len(clients)} sites"
    detail = f"{times['value']:.2f} s / {all_left_out:.2f} s"
    return Row(name, times["value"] / all_left_out, limit, detail)
