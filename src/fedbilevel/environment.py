"""The conditions a method meets: who takes part, how long each client works, on how much data at a time, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedbilevel import checks
from fedbilevel.delays import Delay, Faults, Stragglers, Trace
from fedbilevel.rng import fold_in, integers


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
    """

    participation: int | float = 1.0
    local_steps: int | tuple[int, int] | list[int] = 1
    batch_size: int | None = None
    min_replies: int = 1
    delay: Delay | None = None
    stragglers: Stragglers | None = None
    deadline: float | None = None
    faults: Faults | None = None
    capacity: float | list[float] = 1.0
    capacity_y: float | list[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.participation, float):
            checks.fraction("participation", self.participation)
        else:
            checks.integer("participation", self.participation, least=1)
        if isinstance(self.local_steps, (tuple, list)):
            for steps in self.local_steps:
                checks.integer("local_steps", steps, least=1)
            if isinstance(self.local_steps, tuple) and not (
                len(self.local_steps) == 2 and self.local_steps[0] <= self.local_steps[1]
            ):
                raise ValueError(f"local_steps is {self.local_steps}; a tuple must be (low, high) with low <= high")
        else:
            checks.integer("local_steps", self.local_steps, least=1)
        if self.batch_size is not None:
            checks.integer("batch_size", self.batch_size, least=1)
        checks.integer("min_replies", self.min_replies, least=1)
        for name, kind in (("delay", Delay), ("stragglers", Stragglers), ("faults", Faults)):
            if not isinstance(getattr(self, name), kind | None):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be one of fedbilevel.delays, or None")
        for name, value in (("stragglers", self.stragglers), ("deadline", self.deadline)):
            if value is not None and self.delay is None:
                raise ValueError(f"{name} is {value} but delay is None; without delays there are none")
        if self.faults and self.faults.leave and self.delay is None:
            raise ValueError(f"faults.leave is {self.faults.leave} but delay is None; without delays no time passes")
        if self.deadline is not None:
            checks.positive("deadline", self.deadline)
        for name in ("capacity", "capacity_y"):
            value = getattr(self, name)
            if isinstance(value, list) and not value:
                raise ValueError(f"{name} is an empty list; it must hold ratios in (0, 1]")
            for ratio in value if isinstance(value, list) else [] if value is None else [value]:
                checks.fraction(name, ratio)

    def check(self, clients: int) -> None:
        """What can only be known with the clients at hand."""
        if isinstance(self.participation, int) and self.participation > clients:
            raise ValueError(f"participation is {self.participation}; there are only {clients} clients")
        if self.min_replies > self.cohort(clients):
            raise ValueError(
                f"min_replies is {self.min_replies}; only {self.cohort(clients)} clients are asked a round"
            )
        if self.stragglers is not None and self.stragglers.clients > clients:
            raise ValueError(f"stragglers.clients is {self.stragglers.clients}; there are only {clients} clients")
        if isinstance(self.delay, Trace):
            self.delay.check(clients)
        if isinstance(self.local_steps, list) and len(self.local_steps) != clients:
            raise ValueError(f"local_steps is a list of {len(self.local_steps)} entries; there are {clients} clients")

    def cohort(self, clients: int) -> int:
        """How many clients a round has."""
        if isinstance(self.participation, int):
            return self.participation
        return max(1, round(self.participation * clients))

    @property
    def submodels(self) -> bool:
        """Whether some clients hold less than the whole model."""
        return any(ratio < 1 for turn in (self.capacity, self.capacity_y or 1.0) for ratio in _list(turn))

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        """The ratios of these clients, for x and for what is in y alone."""
        both = _list(self.capacity), _list(self.capacity if self.capacity_y is None else self.capacity_y)
        return [(both[0][client % len(both[0])], both[1][client % len(both[1])]) for client in clients]

    def steps(self, keys: torch.Tensor, clients: Sequence[int]) -> list[int]:
        """tau_i of these clients, one key each."""
        if isinstance(self.local_steps, list):
            return [self.local_steps[client] for client in clients]
        if isinstance(self.local_steps, tuple):
            return integers(fold_in(keys, 0), *self.local_steps).tolist()
        return [self.local_steps] * len(clients)


def _list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]
