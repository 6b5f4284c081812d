"""Stages: what happens to the values of a message between its sender and its receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbilevel.core.rng import fold_in
from fedbilevel.core.settings import FrozenDataclass, Positive, Rule, read_kind
from fedbilevel.core.tree import Tree, project

_registry: dict[str, type[Stage]] = {}


class Stage(FrozenDataclass):
    """One thing that happens to a value on its way: `encode` at the sender, `decode` at the receiver.

    Written for one message and pure, so that a stack of replies can go through it at once. What `encode` returns is
    what travels and what is counted in bytes. A list of stages is encoded from its first to its last and decoded
    backwards: a stage sees what those before it in the list have made. A subclass with a `name` can be named in an
    experiment.

    Attributes:
        remembers: whether the stage keeps a memory with each client, by the value's name (replies only).
        direction: "up" for replies, "down" for what the server sends to everyone.
        values: the names of the trees it applies to; none: all that are shaped like x or y.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = False

    direction: Literal["up", "down"] = "up"
    values: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            _registry[cls.name] = cls

    def applies(self, name: str, kind: Any) -> bool:
        """Whether a value of this name, shaped like `kind`, goes through the stage."""
        if self.values:
            return name in self.values and kind != "scalar"
        return kind in ("x", "y")

    def encode(self, value: Tree, key: Tensor, memory: Any) -> tuple[Any, Any]:
        """What travels instead of `value`, and the memory for the next time; `memory` is () the first time."""
        return value, memory

    def decode(self, payload: Any, like: Tree) -> Tree:
        """The value as the receiver takes it, shaped like `like`."""
        return payload  # type: ignore[no-any-return]


class Clip(Stage):
    """value <- value min(1, norm / ||value||), at the receiver, so that no client can push further than others."""

    name = "clip"

    norm: Positive

    def decode(self, payload: Tree, like: Tree) -> Tree:
        return project(payload, self.norm)


class Half(Stage):
    """Half the bytes: values travel as float16. What is beyond its range (65504) arrives as infinity."""

    name = "half"

    direction: Literal["up", "down"] = "down"

    def encode(self, value: Tree, key: Tensor, memory: Any) -> tuple[Any, Any]:
        return value.map(lambda t: t.to(torch.float16)), memory

    def decode(self, payload: Tree, like: Tree) -> Tree:
        return payload.map(lambda t, other: t.to(other.dtype), like)


def encoded(
    stages: Sequence[Stage],
    values: Mapping[str, Any],
    kinds: Mapping[str, Any],
    key: Tensor,
    memory: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values as they travel, and the stages' new memories; `kinds` says what each value is shaped like."""
    sent = dict(values)
    kept = dict(memory)  # what other phases' values have left stays
    for position, (name, kind) in enumerate(kinds.items()):
        for place, stage in enumerate(stages):
            if stage.applies(name, kind):
                own_key = fold_in(fold_in(key, place), position)
                owner = f"{place} {name}"
                sent[name], after = stage.encode(sent[name], own_key, memory.get(owner, ()))
                if stage.remembers:
                    kept[owner] = after
    return sent, kept


def decoded(
    stages: Sequence[Stage],
    payload: Mapping[str, Any],
    kinds: Mapping[str, Any],
    like: Mapping[str, Tree],
) -> dict[str, Any]:
    """The values that a payload stands for; `like` has their shapes."""
    values = dict(payload)
    for name, kind in kinds.items():
        for stage in reversed(stages):
            if stage.applies(name, kind):
                values[name] = stage.decode(values[name], like[name])
    return values


def _check(name: str, value: Any) -> tuple[Stage, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(stage, Stage) for stage in value):
        raise TypeError(
            f"{name} is {value!r}; it must be a list of stages, such as fedbilevel.stages.Clip(norm=1.0)"
        )
    return tuple(value)


def _read(key: str, value: Any) -> tuple[Stage, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{key} is {value!r}; it must be a list of tables")
    return tuple(
        read_kind("stage", _registry, f"{key}[{place}]", table) for place, table in enumerate(value)
    )


Stages = Annotated[tuple[Stage, ...], Rule("list of stages", _check, _read)]
