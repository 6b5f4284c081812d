"""Delays, stragglers and faults: how long a simulated task takes, and what may go wrong with it.

A delay model draws a duration in virtual seconds for every task. `transports/_outcomes.py` applies
what is declared here to the tasks of a simulation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedbilevel.core import checks, settings
from fedbilevel.core.rng import fold_in, integers, normal, uniform
from fedbilevel.core.settings import Count, Positive, Probability, Rule, within

__all__ = ["Constant", "Delay", "Faults", "LogNormal", "Pareto", "Stragglers", "Trace"]

AboveOne = Annotated[float, within("above 1, or there is no mean", lambda value: value > 1)]
AtLeastOne = Annotated[float, within("at least 1", lambda value: value >= 1)]
ANY_CLIENT = -1  # in a trace: durations of the clients that have no lines themselves
FAULTS = ("drop", "duplicate", "corrupt", "leave")  # the order is part of the keys of their draws


@runtime_checkable
class Delay(Protocol):
    """A model of how long tasks take: any class with this method.

    Examples:
        A model in which every client is slower than the one before it:

        >>> import fedbilevel as fb
        >>> class Staircase:
        ...     def seconds(self, keys, clients):
        ...         return [1.0 + client for client in clients]
        >>> fb.Environment(delay=Staircase()).delay.seconds(None, [0, 3])
        [1.0, 4.0]
    """

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """Draw the durations of tasks.

        Args:
            keys: The key of each task's draws; equal keys must give equal durations.
            clients: The client of each task.

        Returns:
            One duration per task, in virtual seconds.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """Every task takes the same time.

    Args:
        mean: The duration in seconds, above 0.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> fb.delays.Constant(2.0).seconds(torch.arange(3), [0, 1, 2])
        [2.0, 2.0, 2.0]
    """

    mean: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration per task; see `Delay.seconds`."""
        return [self.mean] * len(clients)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal durations: moderately heavy-tailed.

    mean exp(sigma N - sigma^2 / 2), where N is standard normal.

    Args:
        mean: The mean duration in seconds, above 0.
        sigma: The standard deviation of the logarithm, above 0.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> seconds = fb.delays.LogNormal(mean=2.0).seconds(torch.arange(1000), range(1000))
        >>> 1.9 < sum(seconds) / 1000 < 2.1
        True
    """

    mean: Positive = 1.0
    sigma: Positive = 0.5

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration per task; see `Delay.seconds`."""
        drawn = normal(keys, (), torch.float64)
        return (self.mean * torch.exp(self.sigma * drawn - self.sigma**2 / 2)).tolist()


@dataclass(frozen=True)
class Pareto:
    """Pareto durations, a power law: P(duration > s) = (minimum / s)^shape.

    The minimum is mean (shape - 1) / shape, which gives the stated mean.

    Args:
        mean: The mean duration in seconds, above 0.
        shape: The exponent of the tail, above 1; the variance is infinite up to 2.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> seconds = fb.delays.Pareto(mean=3.0, shape=1.5).seconds(torch.arange(1000), range(1000))
        >>> min(seconds) >= 1.0
        True
    """

    mean: Positive = 1.0
    shape: AboveOne = 2.5

    def __post_init__(self) -> None:
        settings.check(self)

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration per task; see `Delay.seconds`."""
        minimum = self.mean * (self.shape - 1) / self.shape
        drawn = uniform(keys, (), torch.float64)
        return (minimum * (1 - drawn) ** (-1 / self.shape)).tolist()


@dataclass(frozen=True)
class Trace:
    """Measured durations, read from a CSV file.

    A line of the file is `seconds`, or `client,seconds`. A task draws uniformly from the lines of
    its client or, if there are none, from the lines without a client.

    Args:
        path: The file.

    Raises:
        ValueError: The file is empty, not UTF-8 text, or a line of it is wrong.
        OSError: The file cannot be read.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> import fedbilevel as fb
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("7.0\\n1,3.0\\n")
        ...     file.flush()
        ...     trace = fb.delays.Trace(file.name)
        >>> trace.seconds(torch.arange(3), [0, 1, 2])
        [7.0, 3.0, 7.0]
    """

    path: str

    def __post_init__(self) -> None:
        settings.check(self)
        self.durations  # noqa: B018  (a wrong file is refused at once)

    @cached_property
    def durations(self) -> dict[int, list[float]]:
        """The durations of each client; those under `ANY_CLIENT` are for all other clients."""
        durations: dict[int, list[float]] = defaultdict(list)
        try:
            text = Path(self.path).read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.path} is not UTF-8 text; it must hold one duration per line"
            ) from None
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                client, seconds = _read_line(line)
            except ValueError:
                where = f"{self.path}, line {number}"
                raise ValueError(
                    f"{where} is {line!r:.100}; it must be seconds, or client,seconds"
                ) from None
            durations[client].append(seconds)
        if not durations:
            raise ValueError(f"{self.path} is empty; it must hold one duration per line")
        return dict(durations)

    def check(self, clients: int) -> None:
        """Check that there is a duration for each of `clients` clients.

        Raises:
            ValueError: A client has none.
        """
        if ANY_CLIENT in self.durations:
            return
        for client in range(clients):
            if client not in self.durations:
                raise ValueError(f"{self.path} holds no duration of client {client}")

    def seconds(self, keys: Tensor, clients: Sequence[int]) -> list[float]:
        """One duration per task; see `Delay.seconds`."""
        choices = []
        for client in clients:
            choices.append(self.durations.get(client) or self.durations[ANY_CLIENT])
        drawn = integers(keys, 0, torch.tensor([len(choice) - 1 for choice in choices]))
        return [choice[index] for choice, index in zip(choices, drawn.tolist(), strict=True)]


def _read_line(line: str) -> tuple[int, float]:
    """The client and the duration on a line of a trace."""
    before, comma, seconds = line.rpartition(",")
    client = ANY_CLIENT
    if comma:
        client = checks.integer("client", int(before), least=0)
    return client, checks.positive("seconds", float(seconds))


@dataclass(frozen=True)
class Stragglers:
    """Slow clients: the same ones throughout a run, drawn at its start.

    Args:
        clients: How many clients are slow.
        slowdown: Their tasks take this many times as long, at least 1.

    Examples:
        >>> import fedbilevel as fb
        >>> stragglers = fb.delays.Stragglers(clients=2, slowdown=10.0)
        >>> environment = fb.Environment(delay=fb.delays.Constant(), stragglers=stragglers)
    """

    clients: Count
    slowdown: AtLeastOne = 5.0

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True)
class Faults:
    """What goes wrong, as probabilities per task.

    Args:
        drop: The reply is lost on the way. The server notices when it would have arrived.
        duplicate: The reply arrives twice, and the second copy is refused.
        corrupt: The reply is nonsense (not finite, or of a wrong shape) and is refused.
        leave: After the task the client is away for `away_s` virtual seconds. A task that it is
            sent in the meantime begins when it has returned.
        away_s: How long a client that leaves is away, above 0.

    Raises:
        ValueError: A probability is not in [0, 1], or `drop` and `corrupt` add up to 1 or more, so
            that no reply would get through.

    Examples:
        >>> import fedbilevel as fb
        >>> environment = fb.Environment(faults=fb.delays.Faults(drop=0.1, corrupt=0.05))
        >>> fb.delays.Faults(drop=1.5)
        Traceback (most recent call last):
        ValueError: drop is 1.5; it must be in [0, 1]
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

    def draw(self, keys: Tensor, fault: str) -> list[bool]:
        """Draw whether a fault happens to each task.

        Args:
            keys: The key of each task's draws.
            fault: "drop", "duplicate", "corrupt" or "leave".

        Returns:
            One truth value per task.
        """
        drawn = uniform(fold_in(keys, FAULTS.index(fault)), (), torch.float64)
        return (drawn < getattr(self, fault)).tolist()  # type: ignore[no-any-return]


MODELS = {"constant": Constant, "lognormal": LogNormal, "pareto": Pareto, "trace": Trace}


def _check_delay(name: str, value: object) -> object:
    if not isinstance(value, Delay):
        raise TypeError(f"{name} is {value!r}; it must be one of fedbilevel.delays, or None")
    return value


_read_delay = partial(settings.build_variant, "model", MODELS)
DelayModel = Annotated[Delay, Rule("one of fedbilevel.delays", _check_delay, _read_delay)]
