"""A problem with a backbone, whose calls are recorded."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

import fedbilevel as fb


class Problems(NamedTuple):
    """A problem with a backbone, and the same problem with the backbone inside its losses."""

    embedding: fb.Problem
    plain: fb.Problem
    clients: list[fb.ClientData]
    calls: list[int]  # the samples of every call of the backbone


def digits(dropout: float) -> Problems:
    """Hyper-representation on the digits, in float64."""
    task = fb.tasks.load(
        "hyper-representation", data="digits", clients=6, hidden=12, dropout=dropout, samples=240
    )
    calls: list[int] = []

    def embed(x: fb.Tree, data: tuple[Tensor, Tensor]) -> Any:
        calls.append(len(data[0]))
        return task.problem.embed(x, (data[0].double(), data[1]), ())  # type: ignore[misc]

    def with_backbone(loss: Any) -> Any:
        return lambda x, y, data, rng: loss(x, y, embed(x, data), rng)

    embedding = dataclasses.replace(
        task.problem,
        x={name: tensor.double() for name, tensor in task.problem.x.items()},
        y={name: tensor.double() for name, tensor in task.problem.y.items()},
        embed=embed,
    )
    plain = dataclasses.replace(
        embedding,
        embed=None,
        upper=with_backbone(embedding.upper),
        lower=with_backbone(embedding.lower),
    )
    return Problems(embedding, plain, list(task.clients), calls)
