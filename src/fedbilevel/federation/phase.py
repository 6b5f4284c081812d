"""Phases: what one client does with a message. A phase is a value; its numbers are its fields."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from inspect import isabstract
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.settings import FrozenDataclass, Rule, build, epochs

Sides = Literal["train", "val", "both"]
Kind = (
    Literal["x", "y", "scalar"] | Mapping[str, tuple[int, ...]]
)  # the last: a tree of these shapes


def _check_steps(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value != "local" and epochs(value) is None:
            raise ValueError(
                f"{name} is {value!r}; it must be a whole number, 'local' or 'N epochs'"
            )
        return value
    return checks.integer(name, value, least=1)


Steps = Annotated[
    int | str, Rule("whole number, at least 1, or 'local', or 'N epochs'", _check_steps)
]


class Input:
    """Marks a field of a phase whose value may change between iterations.

    Such a number is an input of the compiled step, not a part of its code.
    """


Number = Annotated[float, Input(), Rule("number, at least 0", checks.non_negative)]


class Message(SimpleNamespace):
    """What a client receives: the values it was sent, and `steps`, the number of steps it takes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the message holds {', '.join(vars(self))}, not {name!r}")


_registry: dict[str, type[Phase]] = {}


class Phase(FrozenDataclass, ABC):
    """What one client does on receiving a message: `start`, `first`, `step` (repeated), `finish`.

    A subclass is a frozen dataclass (no decorator needed), written for one client. Its fields say
    how: step sizes, lengths, variants. Fields annotated `Number` may take another value in each
    iteration (a schedule); while a step runs they are floats or 0-d tensors, for arithmetic alone.
    All other fields are plain values, and code may branch on them. A carry is any nest of tuples
    and trees of tensors. The executor owns the loop: it draws the batches, runs the steps for one
    client or for a stack of clients under `torch.func.vmap`, and counts costs. All four methods are
    pure functions of their arguments and the fields, so that a step can be traced once and replayed.

    A phase that `remembers` adds "memory" to what `finish` returns: a dict of trees and tensors that
    stays with the client. The client's next such phase finds it in `message.memory`, which is empty
    at first and after `{}` was returned.

    Attributes:
        name: what the phase is called in the ledger and in messages; it also keys the draws.
        batch: the sides of the data that a step is given.
        reply: the names of the values that `finish` returns, each with what it is shaped like.
        fixed_x: whether every evaluation is at `message.x`, without derivatives in x.
        remembers: whether the phase reads and leaves a memory with the client.
        summed: whether the server sees only means of the replies, never a single one.
        steps: how many steps a client takes.
        full: whether a step is given every sample instead of a mini-batch.
    """

    name: ClassVar[str]
    batch: ClassVar[Sides] = "both"
    reply: ClassVar[Mapping[str, Kind]]
    fixed_x: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    summed: ClassVar[bool] = True

    steps: Steps = 1
    full: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _registry[cls.registered_name()] = cls

    def __post_init__(self) -> None:
        if not hasattr(self, "name"):
            raise TypeError(f"{type(self).__name__} has no name; a phase must name itself")
        super().__post_init__()

    @classmethod
    def registered_name(cls) -> str:
        """The name that stands for this class on a wire and in a checkpoint."""
        return f"{cls.__module__}.{cls.__qualname__}"

    @property
    def draws(self) -> int:
        """Independent batches per step: with one, a step is given a `Batch`, with more a tuple."""
        return 1

    @property
    def epochs(self) -> int | None:
        """Passes over the client's training data, where `steps` counts those."""
        return epochs(self.steps)

    def steps_on(self, samples: int, batch_size: int | None) -> int:
        """The steps that `epochs` passes over so many samples take; None is the full batch."""
        assert self.epochs is not None
        size = samples if self.full or batch_size is None else min(batch_size, samples)
        return self.epochs * -(-samples // size)

    @functools.cached_property
    def structure(self) -> tuple[Any, ...]:
        """Everything but the numbers: phases of one structure run the same code."""
        inputs = number_fields(type(self))
        rest = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in inputs)
        return self.registered_name(), *rest

    @property
    def numbers(self) -> dict[str, float]:
        """The values of the fields that may change between iterations."""
        return {name: getattr(self, name) for name in number_fields(type(self))}

    def with_numbers(self, values: Mapping[str, Tensor]) -> Phase:
        """This phase with tensors in the place of its numbers, for a step that is traced."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__ | dict(values))
        return bound

    def plain(self) -> dict[str, Any]:
        """The phase as plain values, for a wire or a file; `load` reads it."""
        return {
            "phase": self.registered_name(),
            **{f.name: getattr(self, f.name) for f in fields(self)},
        }

    @staticmethod
    def load(plain: Any) -> Phase:
        """The phase that `plain` describes; what is not registered or does not fit is refused."""
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise TypeError(f"phase is {plain!r:.80}; it must be a name with its fields")
        table = dict(plain)
        name = str(table.pop("phase", None))[:200]
        kind = _registry.get(name)
        if kind is None or isabstract(kind):
            raise ValueError(f"phase is {name!r}, which is not registered here")
        return build(kind, name, table)  # type: ignore[no-any-return]

    @abstractmethod
    def start(self, message: Message) -> Any:
        """The first carry, from what the client was sent."""

    def first(self, carry: Any, oracle: Oracle, batch: Any) -> Any:
        """The first step, where it differs from the others."""
        return self.step(carry, oracle, batch)

    @abstractmethod
    def step(self, carry: Any, oracle: Oracle, batch: Any) -> Any:
        """One local step: the next carry."""

    @abstractmethod
    def finish(self, carry: Any) -> dict[str, Any]:
        """The reply, by name."""


@functools.cache
def number_fields(kind: type[Phase]) -> tuple[str, ...]:
    """The fields of a phase that are annotated `Number`."""
    hints = get_type_hints(kind, include_extras=True)
    names = [f.name for f in fields(kind)]
    return tuple(
        name
        for name in names
        if get_origin(hints[name]) is Annotated
        and any(isinstance(mark, Input) for mark in get_args(hints[name]))
    )
