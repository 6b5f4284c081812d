"""Phases: what one client does with a message.

An algorithm is a server step (`Algorithm.iterate`) and the phases that its clients run. A phase is
a value, a frozen dataclass written for one client; what crosses a wire is its registered name and
its fields, never its code.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import isabstract
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.settings import FrozenDataclass, Rule, build, parse_epochs
from fedbilevel.core.tree import Tree
from fedbilevel.federation.kinds import Kind

Side = Literal["train", "val"]
Sides = Literal["train", "val", "both"]
Carry = Any  # any nest of tuples, dicts and trees of tensors
StepBatch = Any  # a `Batch`, or a tuple of batches where `Phase.draws` is above 1


def _check_steps(name: str, value: object) -> object:
    if not isinstance(value, str):
        return checks.integer(name, value, least=1)
    if value != "local" and parse_epochs(value) is None:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 'local' or 'N epochs'")
    return value


Steps = Annotated[
    int | str, Rule("whole number, at least 1, or 'local', or 'N epochs'", _check_steps)
]


class StepInput:
    """Marks a field of a phase as an input of the compiled step, not a part of its code."""


Number = Annotated[float, StepInput(), Rule("number, at least 0", checks.non_negative)]
"""The annotation of a phase's field that may have another value in each iteration.

An example is a step size under a schedule. The value is a number that is at least 0. It is an input
of the compiled step, so that a new value needs no new compilation: a step may compute with it but
not branch on it.

Example:
    >>> class Descend(Phase):
    ...     name = "descend"
    ...     lr_x: Number
    ...     damping: float = 0.5
    >>> number_fields(Descend)
    ('lr_x',)
"""


class Message(SimpleNamespace):
    """What a client receives, as attributes.

    These are the values that `Federation.ask` or `post` was given for everyone and in `each` for
    this client, and `steps`, the number of steps that the client takes (a tensor). For a phase that
    remembers, `memory` is what the client's last such task left, `{}` if there is none.

    Raises:
        AttributeError: The message has no value of this name; the error lists those it has.

    Examples:
        >>> message = Message(x=1.0, steps=5)
        >>> message.x
        1.0
        >>> message.y
        Traceback (most recent call last):
        AttributeError: the message holds x, steps, not 'y'
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the message holds {', '.join(vars(self))}, not {name!r}")


_registry: dict[str, type[Phase]] = {}


class Phase(FrozenDataclass, ABC):
    """What one client does on receiving a message: `start`, `first`, `step` (repeated), `finish`.

    A subclass is a frozen dataclass (no decorator needed), written for one client. The executor
    owns the loop: it draws the batches, runs the steps for one client or for a stack of clients
    under `torch.func.vmap`, and counts costs:

        carry = phase.start(message)
        carry = phase.first(carry, oracle, batch)     # by default the same as `step`
        carry = phase.step(carry, oracle, batch)      # steps - 1 times, with a new batch each time
        reply = phase.finish(carry)

    All four methods are pure functions of their arguments and the fields, so that a step can be
    traced once and replayed.

    Fields say how the work is done: step sizes, numbers of steps, variants. A field annotated
    `Number` may have another value in each iteration (a schedule); while a step runs it is a float
    or a 0-d tensor, and code may compute with it but not branch on it. All other fields are plain
    values, and code may branch on them.

    A client keeps nothing between its tasks unless the phase sets `remembers`. Then `finish` adds
    "memory" to the reply: a dict of trees and tensors that stays with the client and is not sent.
    The client's next task of a phase that remembers finds it in `message.memory`, which is empty at
    first and after `{}` was returned. An entry `"personal"` with an "x" and a "y" is the client's
    own model, which evaluation and export read in place of the server's.

    Variables that belong to the clients (`Problem.owner`) need no memory of a phase. Every value of
    a message that is shaped like x or y arrives whole: the server's part was sent, the client's
    part is what the client kept under this name, at first the start of x or y, and 0 for any other
    name. Of a reply only the server's part is sent. `own` says what the client keeps.

    Args:
        steps: How many steps a client takes: a number, "local" for the environment's `local_steps`,
            or "N epochs" for N passes over the client's training data.
        full: Whether a step is given every sample instead of a mini-batch.

    Attributes:
        name: What the phase is called in the ledger and in messages; random draws are keyed by it.
        batch: The sides of the data that a step is given: "train", "val" or "both".
        reply: The kind of each value that `finish` returns, by name: "x" or "y" (a tree shaped like
            that variable), "scalar", or a dict of shapes (a tree of these).
        fixed_x: Whether every evaluation is at `message.x`, without derivatives in x. A backbone
            (`Problem.embed`) then runs once per task.
        remembers: Whether the phase reads and leaves a memory with the client.
        summed: Whether the server uses only means of the replies, never a single one. Replies may
            then be summed where they are computed.
        quorum: Whether the run ends if fewer than `Environment.min_replies` replies are accepted.
            False: the algorithm asks others instead.

    Raises:
        ValueError: A field has a value that its annotation does not allow.
        TypeError: A field has a wrong type, or the class has no `name`.

    Examples:
        Local SGD on the lower level, which replies with the displacement of y:

        >>> import fedbilevel as fb
        >>> class LowerDescent(Phase):
        ...     name = "lower-descent"
        ...     batch = "train"
        ...     reply: ClassVar = {"dy": "y"}
        ...     lr_y: Number = 0.1
        ...     def start(self, message):
        ...         return message.x, message.y, message.y
        ...     def step(self, carry, oracle, batch):
        ...         x, start, y = carry
        ...         return x, start, y - self.lr_y * oracle.lower_gradient_y(x, y, batch)
        ...     def finish(self, carry):
        ...         x, start, y = carry
        ...         return {"dy": y - start}
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> x, y = task.problem.start
        >>> replies = fed.ask(LowerDescent(steps=3), fed.sample(), x=x, y=y)
        >>> fed.ledger.phases["lower-descent"].gradients  # 4 clients, 3 steps each
        12
    """

    name: ClassVar[str]
    batch: ClassVar[Sides] = "both"
    reply: ClassVar[Mapping[str, Kind]]
    fixed_x: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    summed: ClassVar[bool] = True
    quorum: ClassVar[bool] = True

    steps: Steps = 1
    full: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _registry[cls.registered_name()] = cls

    def __post_init__(self) -> None:
        if not hasattr(self, "name"):
            raise TypeError(f"{type(self).__name__} has no name; a phase must name itself")
        super().__post_init__()

    @abstractmethod
    def start(self, message: Message) -> Carry:
        """Turn the message into the first carry.

        Args:
            message: What the client was sent; see `Message`.

        Returns:
            The carry: any nest of tuples, dicts and trees of tensors.
        """

    def first(self, carry: Carry, oracle: Oracle, batch: StepBatch) -> Carry:
        """Take the first step, where it differs from the others; by default it is `step`.

        Args:
            carry: What `start` returned.
            oracle: Derivatives of the client's losses.
            batch: The data of this step; a tuple of batches where `draws` is above 1.

        Returns:
            The next carry.
        """
        return self.step(carry, oracle, batch)

    @abstractmethod
    def step(self, carry: Carry, oracle: Oracle, batch: StepBatch) -> Carry:
        """Take one local step.

        Args:
            carry: What the last step returned.
            oracle: Derivatives of the client's losses.
            batch: The data of this step; a tuple of batches where `draws` is above 1.

        Returns:
            The next carry.
        """

    @abstractmethod
    def finish(self, carry: Carry) -> dict[str, Any]:
        """Turn the last carry into the reply.

        Args:
            carry: What the last step returned.

        Returns:
            The values that the class declares in `reply`, by name, and "memory" if it remembers.
        """

    def own(self, carry: Carry) -> dict[str, Tree]:
        """Return what the client keeps of the variables that it owns, by name in messages.

        It is called only where clients own variables, and only the parts that belong to the client
        are kept. Names that are not returned keep their values; by default all do.

        Args:
            carry: What the last step returned.

        Returns:
            Trees like x or y.
        """
        return {}

    def contradiction(self, m: Message, values: Mapping[str, Any]) -> str | None:
        """What in a reply contradicts the message that it answers; the server asks.

        Args:
            m: The message, without `steps` and `memory`.
            values: The reply of one client; its names and shapes are those declared.

        Returns:
            The reason why the reply is refused, or None (by default).
        """
        return None

    @property
    def is_inner(self) -> bool:
        """Whether it is part of an inner loop: its reply has nothing that is shaped like x."""
        return "x" not in self.reply.values()

    @property
    def draws(self) -> int:
        """Independent batches per step; above 1, a step is given a tuple of batches."""
        return 1

    @property
    def epochs(self) -> int | None:
        """N where `steps` is "N epochs", otherwise None."""
        return _epochs(self.steps)

    @property
    def epoch_side(self) -> Side:
        """The data that an epoch passes over: validation data where steps are given no other."""
        return "val" if self.batch == "val" else "train"

    def steps_on(self, samples: int, batch_size: int | None) -> int:
        """The number of steps of `epochs` passes over a client's data.

        Args:
            samples: How many samples the client holds on `epoch_side`.
            batch_size: Samples per mini-batch; None is the full batch.

        Returns:
            Epochs * ceil(samples / batch_size).
        """
        assert self.epochs is not None
        size = samples
        if batch_size is not None and not self.full:
            size = min(batch_size, samples)
        return self.epochs * -(-samples // size)

    @functools.cached_property
    def structure(self) -> tuple[Any, ...]:
        """Everything but the numbers: phases of one structure run the same code."""
        rest = [(name, getattr(self, name)) for name in _plain_fields(type(self))]
        return self.registered_name(), *rest

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of the fields that are annotated `Number`."""
        return tuple([getattr(self, name) for name in number_fields(type(self))])

    def with_numbers(self, values: Sequence[Tensor]) -> Phase:
        """This phase with tensors in place of its `numbers`, for a step that is traced."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound.__dict__.update(zip(number_fields(type(self)), values, strict=True))
        return bound

    @classmethod
    def registered_name(cls) -> str:
        """The name that stands for this class on a wire and in a checkpoint."""
        return f"{cls.__module__}.{cls.__qualname__}"

    def to_dict(self) -> dict[str, Any]:
        """The phase as plain values, for a wire or a file; `from_dict` reads them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"phase": self.registered_name(), **values}

    @staticmethod
    def from_dict(plain: object) -> Phase:
        """The phase that plain values describe.

        Args:
            plain: What `to_dict` returned; it may come from an untrusted sender.

        Returns:
            The phase. Its class must have been imported by this process: nothing is imported here.

        Raises:
            ValueError: The class is not registered, or a field is unknown, missing or wrong.
            TypeError: `plain` is not a dict with names.
        """
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise TypeError(f"phase is {plain!r:.80}; it must be a name with its fields")
        table = dict(plain)
        name = str(table.pop("phase", None))[:200]
        phase_class = _registry.get(name)
        if phase_class is None or isabstract(phase_class):
            raise ValueError(f"phase is {name!r}, which is not registered here")
        return build(phase_class, name, table)


@functools.cache
def number_fields(phase_class: type[Phase]) -> tuple[str, ...]:
    """The names of the fields of a phase that are annotated `Number`."""
    hints = get_type_hints(phase_class, include_extras=True)
    names = []
    for field in fields(phase_class):
        hint = hints[field.name]
        marks = get_args(hint) if get_origin(hint) is Annotated else ()
        if any(isinstance(mark, StepInput) for mark in marks):
            names.append(field.name)
    return tuple(names)


@functools.cache
def _plain_fields(phase_class: type[Phase]) -> tuple[str, ...]:
    """The names of the other fields of a phase."""
    numbers = number_fields(phase_class)
    return tuple([field.name for field in fields(phase_class) if field.name not in numbers])


_epochs = functools.cache(parse_epochs)  # asked for several times per round
