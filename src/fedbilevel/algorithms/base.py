"""What an algorithm is: frozen settings, `init`, and `iterate`, which asks clients to run phases."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

from fedbilevel import checks
from fedbilevel.environment import Environment
from fedbilevel.federation import Federation
from fedbilevel.problem import Problem
from fedbilevel.tree import Tree


class State(Protocol):
    """The server's state: a NamedTuple of trees and numbers, among them x and y."""

    @property
    def x(self) -> Tree: ...

    @property
    def y(self) -> Tree: ...


def _decay(name: str, value: Any) -> None:
    if not 0 <= checks.number(name, value) < 1:
        raise ValueError(f"{name} is {value}; it must be in [0, 1)")


def _local_steps(name: str, value: Any) -> None:
    if isinstance(value, str):
        count, _, unit = value.partition(" ")
        if not count.isdigit() or int(count) < 1 or unit not in ("epoch", "epochs"):
            raise ValueError(
                f"{name} is {value!r}; it must be a whole number, 'N epochs', or None for the environment's"
            )
    elif value is not None:
        checks.integer(name, value, least=1)


COMMON: Mapping[str, Callable[[str, Any], Any]] = {  # settings that mean the same in every method
    "radius": checks.positive,
    "damping": checks.non_negative,
    "momentum_weight": checks.fraction,
    "norm_decay": _decay,
    "norm_floor": checks.positive,
    "neumann_lr": checks.positive,
    "neumann_steps": functools.partial(checks.integer, least=1),
    "inner_rounds": functools.partial(checks.integer, least=1),
    "lower": functools.partial(checks.one_of, allowed=("svrg", "sgd")),
    "truncation": functools.partial(checks.one_of, allowed=("sum", "random")),
    "core": checks.fraction,
    "lower_steps": _local_steps,
    "upper_steps": _local_steps,
}


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC):
    """One method. Settings are fields, checked at construction; a step size is a float or a schedule.

    solves: "global" (the true hypergradient), "local" (averages local hypergradients: biased on heterogeneous clients)
    or "single" (a single-level baseline). lower_levels: the kinds of problems it is for. submodels: whether clients may
    hold parts of the model.
    """

    name: ClassVar[str]
    solves: ClassVar[Literal["global", "local", "single"]] = "global"
    lower_levels: ClassVar[tuple[Literal["shared", "private"], ...]] = ("shared",)
    submodels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for step in self._steps():
            if not callable(value := getattr(self, step)):
                checks.positive(step, value)
        for setting in dataclasses.fields(self):
            if setting.name in COMMON:
                COMMON[setting.name](setting.name, getattr(self, setting.name))

    @classmethod
    def _steps(cls) -> list[str]:
        return [
            f.name
            for f in dataclasses.fields(cls)
            if f.name.startswith(("lr_", "server_lr_")) and "bounds" not in f.name
        ]

    def at(self, t: int) -> Self:
        """The settings in force at iteration t: schedules become numbers."""
        moving = {step: value(t) for step in self._steps() if callable(value := getattr(self, step))}
        return dataclasses.replace(self, **moving) if moving else self

    def check(self, problem: Problem, environment: Environment) -> None:
        """Refuse a problem that this method does not solve, or conditions that it cannot meet."""
        if problem.lower_level not in self.lower_levels:
            raise ValueError(
                f"{self.name} is for a {self.lower_levels[0]} lower level; this problem's is {problem.lower_level}"
            )
        if environment.submodels and not self.submodels:
            raise ValueError(f"capacity is {environment.capacity}, but {self.name} trains whole models; it must be 1")
        if environment.submodels and not problem.axes:
            raise ValueError(f"capacity is {environment.capacity}, but this problem names no axes to cut; it must be 1")

    @abstractmethod
    def init(self, problem: Problem) -> Any:
        """The state before the first iteration."""

    @abstractmethod
    def iterate(self, s: Any, fed: Federation) -> Any:
        """One outer iteration: the server's program."""
