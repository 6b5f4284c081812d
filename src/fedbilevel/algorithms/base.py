"""What an algorithm is: frozen settings, `init`, and `iterate`, the server's program.

`Algorithm.at` turns step sizes that follow a schedule into the numbers of one iteration.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from fedbilevel.core import schedules, settings
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment

ClientLevels = tuple[Literal["x", "y"], ...]
takers: dict[str, list[str]] = {"x": [], "y": []}  # the methods for a client's own x and y
without_server: list[str] = []  # the methods whose clients exchange values along links


class State(Protocol):
    """The server's state between two iterations.

    Each algorithm has its own: a `NamedTuple` of trees, tensors, numbers, and lists, tuples and
    dicts of them, so that a checkpoint can hold it. It has at least `x` and `y`.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fb.algorithms.SimFBO().init(task.problem)._fields
        ('x', 'y', 'z')
    """

    @property
    def x(self) -> Tree:
        """The upper variable."""
        ...

    @property
    def y(self) -> Tree:
        """The lower variable."""
        ...


class Point(NamedTuple):
    """The `State` of a method whose server keeps x and y alone.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fb.algorithms.FedNest().init(task.problem)._fields
        ('x', 'y')
    """

    x: Tree
    y: Tree


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC):
    """A method for federated bilevel problems: base class of all algorithms.

    A subclass is a frozen dataclass. Its fields are its settings: their annotations say what is
    allowed, and the constructor checks them. It defines `iterate`, which asks clients to run phases
    and moves x and y by their replies, and, where its state is more than x and y, `init`, the state
    before the first iteration.

    Where a step size comes from: it is a setting annotated `Step`, a number or a schedule. Before
    iteration t the run calls `at(t)`, which replaces schedules by their values at t, and calls
    `iterate` on the result. `iterate` uses `self.server_lr_x` and the like as plain numbers, and
    passes `lr_x` and the like to its phases, which use them on the clients.

    Attributes:
        name: The name under which `register` has made the class known.
        solves: "global" if it follows the hypergradient of all clients together; "local" if it
            averages hypergradients of single clients, which on heterogeneous clients solves another
            problem; "single" for a single-level baseline.
        lower_levels: The kinds of lower levels it can solve, see `Problem.lower_level`.
        submodels: Whether clients may hold parts of the model, see `Environment.capacity`.
        client_levels: The levels, "x" and "y", of which it allows variables that belong to the
            clients, see `Problem.owner`.
        second_derivatives: Whether it needs second derivatives of the lower loss.
        has_server: Whether messages go through a server; if not, clients send each other values
            along the links of `Environment.topology`.

    Examples:
        >>> import fedbilevel as fb
        >>> method = fb.algorithms.SimFBO(lr_x=fb.schedules.Power(0.1, power=0.5))
        >>> method.at(0).lr_x, method.at(3).lr_x
        (0.1, 0.05)
    """

    name: ClassVar[str]
    solves: ClassVar[Literal["global", "local", "single"]] = "global"
    lower_levels: ClassVar[tuple[Literal["shared", "private"], ...]] = ("shared",)
    submodels: ClassVar[bool] = False
    client_levels: ClassVar[ClientLevels] = ()
    second_derivatives: ClassVar[bool] = True
    has_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        settings.check(self)

    def check_whole_y(self, problem: Problem) -> None:
        """Refuse a problem of whose y the clients own a part; for methods that need all or none.

        Args:
            problem: The problem to solve.

        Raises:
            ValueError: The server and the clients own parts of y.
        """
        names = problem.y.keys()
        owned = problem.client_names & names
        if owned and owned != names:
            raise ValueError(
                f"{self.name} needs all of y with the clients or none of it, but this problem's "
                f"owner leaves {min(names - owned)!r} to the server; simfbo takes both"
            )

    def check_own_y(self, problem: Problem) -> None:
        """Refuse a problem whose y does not belong to the clients.

        Args:
            problem: The problem to solve.

        Raises:
            ValueError: The server owns y or a part of it.
        """
        if not problem.client_names >= problem.y.keys():
            shared = min(problem.y.keys() - problem.client_names)
            raise ValueError(
                f"{self.name} learns a y for every client, but this problem's owner leaves "
                f"{shared!r} to the server; all of y must belong to the clients"
            )

    def init(self, problem: Problem) -> Any:
        """Return the state before the first iteration, by default the `Point` of the problem.

        Args:
            problem: The problem to solve; its `start` holds the first x and y.

        Returns:
            A `State` of this algorithm.
        """
        return Point(*problem.start)

    @abstractmethod
    def iterate(self, s: Any, fed: Federation) -> Any:
        """Run one iteration: the server's program.

        Args:
            s: The state that `init` or the previous iteration returned; it must not be changed.
            fed: The federation; every exchange with clients is an `ask` or a `collect` of it.

        Returns:
            The next state.
        """

    def at(self, t: int) -> Self:
        """Return the settings in force at iteration t, with numbers in place of schedules.

        Args:
            t: The iteration, counted from 0.

        Returns:
            This algorithm itself if no step size follows a schedule, else a copy.
        """
        values = {name: getattr(self, name) for name in schedules.step_fields(type(self))}
        scheduled = {name: value(t) for name, value in values.items() if callable(value)}
        if not scheduled:
            return self
        return dataclasses.replace(self, **scheduled)

    def check(self, problem: Problem, environment: Environment) -> None:
        """Check that this method can solve a problem under the conditions of an environment.

        Args:
            problem: The problem to solve.
            environment: The conditions under which clients take part.

        Raises:
            ValueError: If the problem's lower level is of another kind than this method is for, if
                clients own variables that it needs on the server, if clients hold submodels and the
                method or the problem does not provide for them, or if the environment has a
                condition without a meaning for a method with, or without, a server.
        """
        for level in problem.client_levels:
            if level not in self.client_levels:
                raise ValueError(
                    f"{self.name} needs {level} on the server, but this problem's owner gives "
                    f"{min(problem.client_names & vars(problem)[level].keys())!r} to the clients; "
                    f"methods for a client's own {level} are {', '.join(takers[level])}"
                )
        if self.has_server and environment.topology is not None:
            raise ValueError(
                f"topology is {environment.topology!s:.40}, but {self.name} has a server; "
                f"methods that exchange values along links are {', '.join(without_server)}"
            )
        if not self.has_server:
            self._check_without_server(environment)
        if problem.client_names and environment.uses_submodels:
            raise ValueError(
                f"capacity is {environment.capacity}, and owner gives variables to the clients; "
                "one of the two must be left out"
            )
        if problem.lower_level not in self.lower_levels:
            raise ValueError(
                f"{self.name} is for a {self.lower_levels[0]} lower level; "
                f"this problem's is {problem.lower_level}"
            )
        if environment.uses_submodels and not self.submodels:
            raise ValueError(
                f"capacity is {environment.capacity}, but {self.name} trains whole models; "
                "it must be 1"
            )
        if environment.uses_submodels and not problem.axes:
            raise ValueError(
                f"capacity is {environment.capacity}, but this problem names no axes to cut; "
                "it must be 1"
            )

    def _check_without_server(self, environment: Environment) -> None:
        """Refuse conditions that only a server can deal with."""
        for name in ("deadline", "faults", "stages", "norm_factor"):
            value = getattr(environment, name)
            if value not in (None, ()):
                raise ValueError(
                    f"{name} is {value}, but {self.name} has no server, and its clients wait for "
                    "each other; it must be left out"
                )
