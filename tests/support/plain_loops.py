"""FedRep and Ditto beside independent plain loops, on the same split: `python -m
tests.support.plain_loops DATA_DIR` compares them on MNIST.

`fedrep_plain.py` and `ditto_plain.py` were written from the papers alone, by somebody who had not
seen this package; nothing but their layout was changed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedbilevel as fb
from tests.support import ditto_plain, fedrep_plain

STEPS = 5  # local steps of every kind
LAMBDA = 0.1


def held_out(task: Any, client: int) -> tuple[Tensor, Tensor]:
    """The held-out samples of a client, as its evaluation sees them."""
    evaluate = task.evaluate_client
    cells = dict(zip(evaluate.__code__.co_freevars, evaluate.__closure__, strict=True))
    dataset = cells["dataset"].cell_contents
    indices = dataset.held_out[client]
    return dataset.inputs[indices], dataset.labels[indices]


def linear(start: Mapping[str, Tensor], name: str) -> nn.Linear:
    """A layer at the start of the package."""
    weight = start[f"{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": start[f"{name}.bias"]})
    return layer


def compare(
    name: str,
    *,
    rounds: int,
    participation: int,
    lr: float,
    batch_size: int,
    hidden: int,
    options: Mapping[str, Any],
    seed: int = 0,
) -> tuple[list[float], list[float], list[float]]:
    """The accuracies of the clients by the plain loop and by ours, and at the start."""
    owner = "client" if name == "fedrep" else "server"
    task = fb.tasks.load(
        "hyper-representation",
        partition="shards",
        hidden=hidden,
        ridge=0.0,
        owner=owner,
        seed=seed,
        **options,
    )
    train: list[Any] = [client.train for client in task.clients]
    test = [held_out(task, client) for client in range(len(train))]

    def body() -> nn.Module:
        layer = linear(task.problem.x, "backbone.1")
        return nn.Sequential(nn.Flatten(), layer, nn.ReLU())

    common: dict[str, Any] = {
        "body": body,
        "head": lambda: linear(task.problem.y, "head"),
        "rounds": rounds,
        "participation": participation,
        "seed": seed,
        "lr": lr,
        "batch_size": batch_size,
    }
    method: Any
    if name == "fedrep":
        plain = fedrep_plain.run(train, test, head_steps=STEPS, body_steps=STEPS, **common)
        method = fb.algorithms.FedRep(lr_x=lr, lr_y=lr, head_steps=STEPS, body_steps=STEPS)
    else:
        common |= {"lr_personal": lr, "lam": LAMBDA}
        plain = ditto_plain.run(train, test, global_steps=STEPS, personal_steps=STEPS, **common)
        method = fb.algorithms.Ditto(lr_x=lr, lr_y=lr, pull=LAMBDA)
    environment = fb.Environment(
        participation=participation, local_steps=STEPS, batch_size=batch_size
    )
    result = fb.solve(
        task.problem,
        task.clients,
        method,
        rounds=rounds,
        environment=environment,
        seed=seed,
        every=rounds,
    )
    ours = []
    starts = []
    whole = dataclasses.replace(task.problem, owner={})
    for client, data in enumerate(task.clients):
        model = result.personal(client)
        if name == "fedrep":  # the plain loop fits the heads to the last representation
            settings: dict[str, Any] = {"steps": STEPS, "lr": lr, "batch_size": batch_size}
            (model,) = fb.adapt(whole, [data], *model, **settings)
        ours.append(task.evaluate_client(*model, client)["test_accuracy"])
        starts.append(task.evaluate_client(*whole.start, client)["test_accuracy"])
    return plain, ours, starts


def main(data_dir: str) -> None:
    """Compare on MNIST: 100 clients with two labels each, 10 per round, 784-200-10."""
    torch.set_num_threads(1)
    options = {"data": "mnist", "data_dir": data_dir, "clients": 100, "held_out": 0.2}
    settings: dict[str, Any] = {"rounds": 150, "participation": 10, "lr": 0.1, "batch_size": 64}
    for name in ("fedrep", "ditto"):
        for seed in (0, 1, 2):
            plain, ours, _ = compare(name, hidden=200, options=options, seed=seed, **settings)
            print(f"{name}, seed {seed}: plain loop {describe(plain)}; ours {describe(ours)}")


def describe(accuracies: Sequence[float]) -> str:
    """The mean and the worst tenth."""
    return f"{fmean(accuracies):.2%}, worst tenth {np.quantile(accuracies, 0.1):.2%}"


if __name__ == "__main__":
    main(sys.argv[1])
