"""How long a client takes for a task, in virtual seconds, and what else may happen to it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbilevel.core import checks, settings
from fedbilevel.core.rng import fold_in, integers, normal, uniform
from fedbilevel.core.settings import Count, Positive, Probability, Rule, within

AboveOne = Annotated[float, within("above 1, or there is no mean", lambda value: value > 1)]
AtLeastOne = Annotated[float, within("at least 1", lambda value: value >= 1)]


@runtime_checkable
class Delay(Protocol):
    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration a client, one key each."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always `mean` seconds."""

    mean: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        return [self.mean] * len(clients)


@dataclass(frozen=True)
class LogNormal:
    """`mean` exp(sigma N - sigma^2 / 2), N standard normal: heavy-tailed, with this mean."""

    mean: Positive = 1.0
    sigma: Positive = 0.5

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        drawn = normal(keys, (), torch.float64)
        return (self.mean * torch.exp(self.sigma * drawn - self.sigma**2 / 2)).tolist()


@dataclass(frozen=True)
class Pareto:
    """least U^(-1/shape), U uniform: a power law; `least` = mean (shape - 1) / shape gives it this mean."""

    mean: Positive = 1.0
    shape: AboveOne = 2.5

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        least = self.mean * (self.shape - 1) / self.shape
        return (least * (1 - uniform(keys, (), torch.float64)) ** (-1 / self.shape)).tolist()


@dataclass(frozen=True)
class Trace:
    """Measured durations: a CSV file of seconds, or of client,seconds; a task draws one (of its client's) uniformly."""

    path: str

    def __post_init__(self) -> None:
        settings.check(self)
        self.rows  # noqa: B018  (a wrong file is refused at once)

    @cached_property
    def rows(self) -> dict[int, list[float]]:
        """The durations of each client; those of -1 are of clients that have none of their own."""
        rows: dict[int, list[float]] = defaultdict(list)
        try:
            text = Path(self.path).read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.path} is not UTF-8 text; it must hold a duration a line"
            ) from None
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                *client, seconds = line.split(",")
                place = checks.integer("client", int(",".join(client)), least=0) if client else -1
                rows[place].append(checks.positive("seconds", float(seconds)))
            except ValueError:
                raise ValueError(
                    f"{self.path}, line {number} is {line!r:.100}; it must be seconds, or client,seconds"
                ) from None
        if not rows:
            raise ValueError(f"{self.path} is empty; it must hold a duration a line")
        return dict(rows)

    def check(self, clients: int) -> None:
        for client in range(clients if -1 not in self.rows else 0):
            if client not in self.rows:
                raise ValueError(f"{self.path} holds no duration of client {client}")

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        own = [self.rows.get(client) or self.rows[-1] for client in clients]
        drawn = integers(keys, 0, torch.tensor([len(rows) - 1 for rows in own]))
        return [rows[place] for rows, place in zip(own, drawn.tolist(), strict=True)]


@dataclass(frozen=True)
class Stragglers:
    """So many clients, the same ones throughout a run, take `slowdown` times as long."""

    clients: Count
    slowdown: AtLeastOne = 5.0

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as probabilities a task.

    drop: the reply is lost on the way; the server learns of it when it would have come. duplicate: it is sent twice,
    and the second is refused. corrupt: it is nonsense (not finite, or of another shape) and refused. leave: after the
    task the client is away for `away_s` virtual seconds; what it is sent in the meantime it begins when it is back.
    """

    drop: Probability = 0.0
    duplicate: Probability = 0.0
    corrupt: Probability = 0.0
    leave: Probability = 0.0
    away_s: Positive = 10.0

    def __post_init__(self) -> None:
        settings.check(self)
        if math.isclose(self.drop + self.corrupt, 1) or self.drop + self.corrupt > 1:
            raise ValueError(
                f"drop is {self.drop} and corrupt is {self.corrupt}; some replies must get through"
            )

    def happen(self, keys: Tensor, name: str) -> list[bool]:
        """Whether this befalls each task, one key each."""
        place = ("drop", "duplicate", "corrupt", "leave").index(name)
        chance = getattr(self, name)
        return (uniform(fold_in(keys, place), (), torch.float64) < chance).tolist()  # type: ignore[no-any-return]


MODELS = {"constant": Constant, "lognormal": LogNormal, "pareto": Pareto, "trace": Trace}


def _check(name: str, value: Any) -> Any:
    if not isinstance(value, Delay):
        raise TypeError(f"{name} is {value!r}; it must be one of fedbilevel.delays, or None")
    return value


_read = partial(settings.read_kind, "model", MODELS)
DelayModel = Annotated[Delay, Rule("one of fedbilevel.delays", _check, _read)]
