"""The conditions a method meets: who takes part, how long each client works, on how much data at a time, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from fedbilevel.core import checks, settings
from fedbilevel.core.rng import fold_in, integers
from fedbilevel.core.settings import Count, Fraction, Positive, Rule
from fedbilevel.federation.delays import DelayModel, Faults, Stragglers, Trace
from fedbilevel.federation.stages import Stages


def _check_local_steps(name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)):
        return checks.integer(name, value, least=1)
    for steps in value:
        checks.integer(name, steps, least=1)
    if isinstance(value, tuple) and not (len(value) == 2 and value[0] <= value[1]):
        raise ValueError(f"{name} is {value}; a tuple must be (low, high) with low <= high")
    return value


def _read_local_steps(key: str, value: Any) -> Any:
    """In TOML an array of two is a range, and {clients = [...]} has one entry per client."""
    if isinstance(value, list) and len(value) == 2:
        value = tuple(value)
    elif isinstance(value, dict) and isinstance(value.get("clients"), list) and len(value) == 1:
        value = value["clients"]
    elif isinstance(value, (list, dict)):
        allowed = "a number, [low, high] or {clients = [...]}"
        raise ValueError(f"{key} is {value}; it must be {allowed}")
    return _check_local_steps(key, value)


def _check_capacity(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return checks.fraction(name, value)
    if not value:
        raise ValueError(f"{name} is an empty list; it must hold ratios in (0, 1]")
    return [checks.fraction(name, ratio) for ratio in value]


def _read_batch_size(key: str, value: Any) -> Any:
    """TOML has no None: the full batch is called "full"."""
    return None if value == "full" else _BATCH_SIZE.read(key, value)


_BATCH_SIZE = settings.rule(Count | None)
BatchSize = Annotated[int | None, Rule(_BATCH_SIZE.text, _BATCH_SIZE.check, _read_batch_size)]
LocalSteps = Annotated[
    int | tuple[int, int] | list[int],
    Rule(
        "whole number, at least 1, or (low, high), or a list with one entry per client",
        _check_local_steps,
        _read_local_steps,
    ),
]
Capacity = Annotated[
    float | list[float],
    Rule("number in (0, 1], or a list of such numbers", _check_capacity),
]


@dataclass(frozen=True)
class Environment:
    """Participation, local steps and batch size; in simulations also delays, stragglers and faults.

    participation: clients a round as a whole number, or a fraction in (0, 1]; 1.0 is everyone. Without a barrier: how
    many arrivals a `collect` waits for.
    local_steps: a number, a tuple (low, high) drawn for each client each round, or a list, one entry a client.
    batch_size: samples a mini-batch, drawn without replacement; None is the full batch.
    min_replies: an `ask` with fewer accepted replies ends the run.
    delay: how long a task takes in virtual seconds, whatever its steps (`fedbilevel.delays`); None is no time.
    stragglers: clients that take longer. deadline: an `ask` waits no longer, and later replies are lost. faults: what
    goes wrong.
    capacity: how wide a submodel a client can hold, as a ratio in (0, 1]; a list is dealt to the clients in turn.
    capacity_y: the same for what is in y alone, where it differs.
    stages: what messages and replies go through on their way (`fedbilevel.stages`).
    """

    participation: Count | Fraction = 1.0
    local_steps: LocalSteps = 1
    batch_size: BatchSize = None
    min_replies: Count = 1
    delay: DelayModel | None = None
    stragglers: Stragglers | None = None
    deadline: Positive | None = None
    faults: Faults | None = None
    capacity: Capacity = 1.0
    capacity_y: Capacity | None = None
    stages: Stages = ()

    def __post_init__(self) -> None:
        settings.check(self)
        for stage in self.stages:
            if stage.remembers and self.submodels:
                raise ValueError(
                    f"stages holds {stage}, which remembers, and capacity is {self.capacity}; what it remembers would "
                    "belong to other units of the next submodel: capacity must be 1"
                )
        if self.delay is None:
            self._check_without_delay()

    def _check_without_delay(self) -> None:
        for name, value in (("stragglers", self.stragglers), ("deadline", self.deadline)):
            if value is not None:
                reason = "without delays there are none"
                raise ValueError(f"{name} is {value} but delay is None; {reason}")
        if self.faults and self.faults.leave:
            raise ValueError(
                f"faults.leave is {self.faults.leave} but delay is None; without delays no time passes"
            )

    def check(self, clients: int) -> None:
        """What can only be known with the clients at hand."""
        if isinstance(self.participation, int) and self.participation > clients:
            raise ValueError(
                f"participation is {self.participation}; there are only {clients} clients"
            )
        if self.min_replies > self.cohort(clients):
            raise ValueError(
                f"min_replies is {self.min_replies}; only {self.cohort(clients)} clients are asked a round"
            )
        if self.stragglers is not None and self.stragglers.clients > clients:
            raise ValueError(
                f"stragglers.clients is {self.stragglers.clients}; there are only {clients} clients"
            )
        if isinstance(self.delay, Trace):
            self.delay.check(clients)
        if isinstance(self.local_steps, list) and len(self.local_steps) != clients:
            raise ValueError(
                f"local_steps is a list of {len(self.local_steps)} entries; there are {clients} clients"
            )

    def cohort(self, clients: int) -> int:
        """How many clients a round has."""
        if isinstance(self.participation, int):
            return self.participation
        return max(1, round(self.participation * clients))

    @property
    def submodels(self) -> bool:
        """Whether some clients hold less than the whole model."""
        return any(
            ratio < 1 for turn in (self.capacity, self.capacity_y or 1.0) for ratio in _list(turn)
        )

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        """The ratios of these clients, for x and for what is in y alone."""
        both = (
            _list(self.capacity),
            _list(self.capacity if self.capacity_y is None else self.capacity_y),
        )
        return [
            (both[0][client % len(both[0])], both[1][client % len(both[1])]) for client in clients
        ]

    def steps(self, keys: torch.Tensor, clients: Sequence[int]) -> list[int]:
        """tau_i of these clients, one key each."""
        if isinstance(self.local_steps, list):
            return [self.local_steps[client] for client in clients]
        if isinstance(self.local_steps, tuple):
            return integers(fold_in(keys, 0), *self.local_steps).tolist()
        return [self.local_steps] * len(clients)


def _list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]
