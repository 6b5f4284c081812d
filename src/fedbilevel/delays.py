"""How long a client takes for a task, in virtual seconds, and what else may happen to it."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedbilevel import checks
from fedbilevel.rng import fold_in, integers, normal, uniform


class Delay(Protocol):
    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration a client, one key each."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always `mean` seconds."""

    mean: float = 1.0

    def __post_init__(self) -> None:
        checks.positive("mean", self.mean)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        return [self.mean] * len(clients)


@dataclass(frozen=True)
class LogNormal:
    """`mean` exp(sigma N - sigma^2 / 2), N standard normal: heavy-tailed, with this mean."""

    mean: float = 1.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        checks.positive("mean", self.mean)
        checks.positive("sigma", self.sigma)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        drawn = normal(keys, (), torch.float64)
        return (self.mean * torch.exp(self.sigma * drawn - self.sigma**2 / 2)).tolist()


@dataclass(frozen=True)
class Pareto:
    """least U^(-1/shape), U uniform: a power law; `least` = mean (shape - 1) / shape gives it this mean."""

    mean: float = 1.0
    shape: float = 2.5

    def __post_init__(self) -> None:
        checks.positive("mean", self.mean)
        if checks.number("shape", self.shape) <= 1:
            raise ValueError(f"shape is {self.shape}; it must be above 1, or there is no mean")

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        least = self.mean * (self.shape - 1) / self.shape
        return (least * (1 - uniform(keys, (), torch.float64)) ** (-1 / self.shape)).tolist()


@dataclass(frozen=True)
class Trace:
    """Measured durations: a CSV file of seconds, or of client,seconds; a task draws one (of its client's) uniformly."""

    path: str

    @cached_property
    def rows(self) -> dict[int | None, list[float]]:
        rows: dict[int | None, list[float]] = defaultdict(list)
        with Path(self.path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                try:
                    *client, seconds = row
                    rows[int(client[0]) if client else None].append(checks.positive("seconds", float(seconds)))
                except (ValueError, IndexError):
                    raise ValueError(
                        f"{self.path}, line {number} is {','.join(row)!r}; it must be seconds, or client,seconds"
                    ) from None
        if not rows:
            raise ValueError(f"{self.path} is empty; it must hold a duration a line")
        return dict(rows)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        found = []
        for key, client in zip(keys, clients, strict=True):
            own = self.rows.get(client) or self.rows.get(None)
            if own is None:
                raise ValueError(f"{self.path} holds no duration of client {client}")
            found.append(own[int(integers(key, 0, len(own) - 1))])
        return found


@dataclass(frozen=True)
class Stragglers:
    """So many clients, the same ones throughout a run, take `slowdown` times as long."""

    clients: int
    slowdown: float = 5.0

    def __post_init__(self) -> None:
        checks.integer("clients", self.clients, least=1)
        if checks.number("slowdown", self.slowdown) < 1:
            raise ValueError(f"slowdown is {self.slowdown}; it must be at least 1")


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as probabilities a task.

    drop: the reply is never sent; the server learns of it when it would have come. duplicate: it is sent twice, and the
    second is refused. corrupt: it is nonsense (not finite, or of another shape) and refused. leave: after the task the
    client is away for `away_s` virtual seconds; what it is sent in the meantime it begins when it is back.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    leave: float = 0.0
    away_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "corrupt", "leave"):
            if not 0 <= checks.number(name, getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1]")
        checks.positive("away_s", self.away_s)
        if math.isclose(self.drop + self.corrupt, 1) or self.drop + self.corrupt > 1:
            raise ValueError(f"drop is {self.drop} and corrupt is {self.corrupt}; some replies must get through")

    def happen(self, keys: Tensor, name: str) -> list[bool]:
        """Whether this befalls each task, one key each."""
        place = ("drop", "duplicate", "corrupt", "leave").index(name)
        chance = getattr(self, name)
        return (uniform(fold_in(keys, place), (), torch.float64) < chance).tolist()  # type: ignore[no-any-return]


MODELS = {"constant": Constant, "lognormal": LogNormal, "pareto": Pareto, "trace": Trace}
