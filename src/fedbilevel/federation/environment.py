"""`Environment`: the conditions under which clients take part.

How many take part in a round, how many local steps each takes, on how much data at a time, how much
of the model it can hold, and, in simulations, delays and faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from fedbilevel.core import checks, settings
from fedbilevel.core.markup import html_table
from fedbilevel.core.rng import fold_in, integers
from fedbilevel.core.settings import Count, Factor, Fraction, Positive, Rule
from fedbilevel.federation.delays import DelayModel, Faults, Stragglers, Trace
from fedbilevel.federation.stages import Stages
from fedbilevel.federation.topology import Topology, check_size

# Conditions that only a simulation has; a delay may name a file.
SIMULATED = ("delay", "inner_delay", "stragglers", "deadline", "faults", "topology")


def _check_local_steps(name: str, value: object) -> object:
    if not isinstance(value, (tuple, list)):
        return checks.integer(name, value, least=1)
    for steps in value:
        checks.integer(name, steps, least=1)
    if isinstance(value, tuple) and not (len(value) == 2 and value[0] <= value[1]):
        raise ValueError(f"{name} is {value}; a tuple must be (low, high) with low <= high")
    return value


def _read_local_steps(key: str, value: object) -> object:
    """In TOML an array of two numbers is a range; {clients = [...]} has one entry per client."""
    if isinstance(value, list) and len(value) == 2:
        value = tuple(value)
    elif isinstance(value, dict) and isinstance(value.get("clients"), list) and len(value) == 1:
        value = value["clients"]
    elif isinstance(value, (list, dict)):
        allowed = "a number, [low, high] or {clients = [...]}"
        raise ValueError(f"{key} is {value}; it must be {allowed}")
    return _check_local_steps(key, value)


def _check_capacity(name: str, value: object) -> object:
    if isinstance(value, tuple):  # of two numbers it might be a range
        allowed = "a number in (0, 1], or a list of such numbers"
        raise TypeError(f"{name} is {value!r}; it must be {allowed}")
    if not isinstance(value, list):
        return checks.fraction(name, value)
    if not value:
        raise ValueError(f"{name} is an empty list; it must hold ratios in (0, 1]")
    return [checks.fraction(name, ratio) for ratio in value]


def _read_batch_size(key: str, value: object) -> object:
    """TOML has no None: the full batch is called "full"."""
    if value == "full":
        return None
    return _BATCH_SIZE.read(key, value)


_BATCH_SIZE = settings.rule_for(Count | None)
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
    """The conditions under which clients take part: the same for every algorithm.

    Args:
        participation: The size of a cohort: a whole number of clients, or a fraction of them in
            (0, 1]; 1.0 is everyone. For algorithms without a barrier, the number of arrivals that a
            `collect` waits for.
        local_steps: The steps that a client takes in a phase with local steps: one number for all,
            a tuple (low, high) from which a number is drawn uniformly for each client and round, or
            a list with one entry per client.
        batch_size: Samples per mini-batch, drawn without replacement; None is the full batch.
        min_replies: The quorum. An `ask` with fewer accepted replies ends the run, and `sample`
            waits until as many clients are available.
        delay: How long a task takes in virtual seconds, whatever its number of steps: one of
            `fedbilevel.delays`. None: tasks take no time. For simulations, as are the next four.
        inner_delay: How long a task of an inner loop takes: one whose reply has nothing that is
            shaped like x. None: as `delay` says.
        stragglers: Clients that take longer (`fedbilevel.delays.Stragglers`). None: no client does.
        deadline: The virtual seconds that an `ask` waits; a later reply is lost. None: it waits for
            everyone. Tasks that are posted have no deadline.
        faults: What goes wrong (`fedbilevel.delays.Faults`). None: nothing does.
        capacity: The fraction of the units of a model that a client can hold, in (0, 1]: one number
            for all, or a list that is dealt to the clients in turn.
        capacity_y: The same for the axes that only tensors of y have. None: `capacity`.
        stages: The transformations that messages and replies go through (`fedbilevel.stages`).
        norm_factor: A reply is refused if a value in it is this many times longer than the median
            of what clients have replied so far. None: no reply is too long; on Flower,
            `conduct.norm_factor`.
        strikes: How many replies of a client are refused before it is given no more tasks for the
            rest of the run. None: any number; on Flower, `conduct.strikes`.
        topology: Which clients have a link between them, for methods without a server: "ring",
            "grid", "complete", "erdos-renyi P" (each link with probability P), or a mixing matrix,
            symmetric and doubly stochastic. None: such methods take the complete graph. For
            simulations.

    Raises:
        ValueError: A value is out of its range, `inner_delay`, `stragglers`, `deadline` or
            `faults.leave` is given without a delay, or a stage that remembers is combined with
            submodels.
        TypeError: A value has a wrong type.

    Examples:
        >>> import fedbilevel as fb
        >>> environment = fb.Environment(participation=0.5, local_steps=(1, 5), batch_size=32)
        >>> environment.cohort_size(clients=10)
        5
        >>> slow = fb.Environment(delay=fb.delays.LogNormal(), deadline=3.0, min_replies=2)
        >>> fb.Environment(participation=1.5)
        Traceback (most recent call last):
        ValueError: participation is 1.5; it must be in (0, 1]
    """

    participation: Count | Fraction = 1.0
    local_steps: LocalSteps = 1
    batch_size: BatchSize = None
    min_replies: Count = 1
    delay: DelayModel | None = None
    inner_delay: DelayModel | None = None
    stragglers: Stragglers | None = None
    deadline: Positive | None = None
    faults: Faults | None = None
    capacity: Capacity = 1.0
    capacity_y: Capacity | None = None
    stages: Stages = ()
    norm_factor: Factor | None = None
    strikes: Count | None = None
    topology: Topology | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        for stage in self.stages:
            if stage.remembers and self.uses_submodels:
                raise ValueError(
                    f"stages holds {stage}, which remembers, and capacity is {self.capacity}; "
                    "the units of a submodel change, and its memory would belong to others: "
                    "capacity must be 1"
                )
        if self.delay is None:
            self._check_without_delay()

    def _repr_html_(self) -> str:
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_main = field.name in ("participation", "local_steps", "batch_size")
            if is_main or value != field.default:
                rows.append((field.name, value))
        return html_table(rows, caption="Environment")

    def _check_without_delay(self) -> None:
        for name in ("inner_delay", "stragglers", "deadline"):
            value = getattr(self, name)
            if value is not None:
                reason = "without delays there are none"
                raise ValueError(f"{name} is {value} but delay is None; {reason}")
        if self.faults and self.faults.leave:
            reason = "without delays no time passes"
            raise ValueError(f"faults.leave is {self.faults.leave} but delay is None; {reason}")

    def check(self, clients: int) -> None:
        """Check what depends on the number of clients.

        Args:
            clients: How many clients are registered.

        Raises:
            ValueError: A value does not fit that number.
        """
        if isinstance(self.participation, int) and self.participation > clients:
            raise ValueError(
                f"participation is {self.participation}; there are only {clients} clients"
            )
        cohort_size = self.cohort_size(clients)
        if self.min_replies > cohort_size:
            raise ValueError(
                f"min_replies is {self.min_replies}; only {cohort_size} clients are asked per round"
            )
        if self.stragglers is not None and self.stragglers.clients > clients:
            raise ValueError(
                f"stragglers.clients is {self.stragglers.clients}; there are only {clients} clients"
            )
        for delay in (self.delay, self.inner_delay):
            if isinstance(delay, Trace):
                delay.check(clients)
        check_size(self.topology, clients)
        if isinstance(self.local_steps, list) and len(self.local_steps) != clients:
            entries = len(self.local_steps)
            raise ValueError(
                f"local_steps is a list of {entries} entries; there are {clients} clients"
            )

    def cohort_size(self, clients: int) -> int:
        """How many of `clients` clients take part in a round: at least one."""
        if isinstance(self.participation, int):
            return self.participation
        return max(1, round(self.participation * clients))

    @property
    def uses_submodels(self) -> bool:
        """Whether some clients hold less than the whole model."""
        ratios = [*_as_list(self.capacity), *_as_list(self.capacity_y or 1.0)]
        return min(ratios) < 1

    def capacities(self, clients: Sequence[int]) -> list[tuple[float, float]]:
        """For each of these clients, its capacity for x and for what is in y alone."""
        for_x = _as_list(self.capacity)
        for_y = for_x
        if self.capacity_y is not None:
            for_y = _as_list(self.capacity_y)
        return [(for_x[client % len(for_x)], for_y[client % len(for_y)]) for client in clients]

    def draw_local_steps(self, keys: Sequence[int], clients: Sequence[int]) -> list[int]:
        """tau_i, the number of local steps, of each of these clients; one key per client's task."""
        if isinstance(self.local_steps, list):
            return [self.local_steps[client] for client in clients]
        if isinstance(self.local_steps, tuple):
            return integers(fold_in(torch.tensor(keys), 0, 0), *self.local_steps).tolist()
        return [self.local_steps] * len(clients)


def _as_list(value: float | list[float]) -> list[float]:
    if isinstance(value, list):
        return value
    return [value]
