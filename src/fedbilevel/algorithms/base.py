"""What an algorithm is: frozen settings, `init`, and `iterate`, which asks clients to run phases."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Protocol, Self

from fedbilevel.core import schedules, settings
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment


class State(Protocol):
    """The server's state: a NamedTuple of trees and numbers, among them x and y."""

    @property
    def x(self) -> Tree: ...

    @property
    def y(self) -> Tree: ...


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
        settings.check(self)

    def at(self, t: int) -> Self:
        """The settings in force at iteration t: schedules become numbers."""
        values = {name: getattr(self, name) for name in schedules.step_fields(type(self))}
        moving = {name: value(t) for name, value in values.items() if callable(value)}
        return dataclasses.replace(self, **moving) if moving else self

    def check(self, problem: Problem, environment: Environment) -> None:
        """Refuse a problem that this method does not solve, or conditions that it cannot meet."""
        if problem.lower_level not in self.lower_levels:
            raise ValueError(
                f"{self.name} is for a {self.lower_levels[0]} lower level; this problem's is {problem.lower_level}"
            )
        if environment.submodels and not self.submodels:
            raise ValueError(
                f"capacity is {environment.capacity}, but {self.name} trains whole models; it must be 1"
            )
        if environment.submodels and not problem.axes:
            raise ValueError(
                f"capacity is {environment.capacity}, but this problem names no axes to cut; it must be 1"
            )

    @abstractmethod
    def init(self, problem: Problem) -> Any:
        """The state before the first iteration."""

    @abstractmethod
    def iterate(self, s: Any, fed: Federation) -> Any:
        """One outer iteration: the server's program."""
