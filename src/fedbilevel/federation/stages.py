"""Stages: transformations of values between their sender and their receiver.

`Environment(stages=[...])` lists them. `encode_values` applies their encoders at the sender,
`decode_values` their decoders at the receiver; the bytes of what travels in between are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbilevel.core.rng import fold_in
from fedbilevel.core.settings import FrozenDataclass, Positive, Rule, build_variant
from fedbilevel.core.tree import Tree, project
from fedbilevel.federation.kinds import Kind

__all__ = ["Clip", "Half", "Stage"]

Payload = Any  # a nest of dicts and tensors, or a value that goes through no stage
Memory = Any  # a nest of dicts and tensors; () at first

_registry: dict[str, type[Stage]] = {}


class Stage(FrozenDataclass):
    """One transformation of a value: `encode` at the sender, `decode` at the receiver.

    A subclass overrides one or both, and may have fields (it is a frozen dataclass; no decorator is
    needed). It is written for one value and pure, so that a stack of replies can go through it at
    once. What `encode` returns is what travels and what is counted in bytes.

    A list of stages is encoded from first to last and decoded from last to first: the decoder of a
    stage is given what the stages after it in the list have decoded.

    A subclass with a `name` can be used in an experiment, as in
    `environment.stages = [{stage = "clip", norm = 10.0}]`.

    Args:
        direction: "up" for replies, "down" for what the server sends to everyone.
        values: The names of the trees that go through the stage; empty for all that are shaped like
            x or y. Scalars never do.

    Attributes:
        name: What the stage is called in experiments.
        remembers: Whether the stage keeps a memory with each client, one per name of a value
            (replies only).

    Raises:
        ValueError: A field has a value that its annotation does not allow.
        TypeError: A field has a wrong type.

    Examples:
        A stage that rounds replies to multiples of a step, at the sender:

        >>> import torch
        >>> import fedbilevel as fb
        >>> class Round(fb.stages.Stage):
        ...     step: float = 0.5
        ...     def encode(self, value, key, memory):
        ...         return value.map(lambda t: (t / self.step).round() * self.step), memory
        >>> payload, _ = Round().encode(fb.Tree(w=torch.tensor([0.3, 1.1])), torch.tensor(0), ())
        >>> payload["w"]
        tensor([0.5000, 1.0000])
        >>> environment = fb.Environment(stages=[Round(values=("dx",))])
    """

    name: ClassVar[str]
    remembers: ClassVar[bool] = False

    direction: Literal["up", "down"] = "up"
    values: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            _registry[cls.name] = cls

    def applies_to(self, name: str, kind: Kind) -> bool:
        """Whether a value goes through the stage.

        Args:
            name: The name of the value.
            kind: What it is shaped like.

        Returns:
            True if the name is in `values` or, where that is empty, the kind is "x" or "y".
        """
        if self.values:
            return name in self.values and kind != "scalar"
        return kind in ("x", "y")

    def encode(self, value: Tree, key: Tensor, memory: Memory) -> tuple[Payload, Memory]:
        """Encode a value at its sender; by default it is unchanged.

        Args:
            value: What is to be sent.
            key: The key of random draws, different for each exchange, client and value.
            memory: What the last call for this client and name returned; () the first time.

        Returns:
            The payload, a nest of dicts and tensors that travels instead of the value, and the
            memory for the next time.
        """
        return value, memory

    def decode(self, payload: Payload, like: Tree) -> Tree:
        """Decode a payload at its receiver; by default it is the value.

        Args:
            payload: What `encode` returned.
            like: A tree with the names, shapes and dtypes of the value; its numbers mean nothing.

        Returns:
            The value that the receiver computes with.
        """
        return payload  # type: ignore[no-any-return]


class Clip(Stage):
    """Shorten values whose Euclidean norm is above a bound, at the receiver.

    value <- value min(1, norm / ||value||)

    No client can then push further than others, whatever it sends.

    Args:
        norm: The bound, above 0.
        direction: "up" (default) for replies, "down" for messages.
        values: The names of the values that are clipped; empty for all shaped like x or y.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> value = fb.Tree(w=torch.tensor([3.0, 4.0]))
        >>> fb.stages.Clip(norm=1.0).decode(value, value)["w"]
        tensor([0.6000, 0.8000])
    """

    name = "clip"

    norm: Positive

    def decode(self, payload: Tree, like: Tree) -> Tree:
        """The value, shortened to `norm` if it is longer."""
        return project(payload, self.norm)


class Half(Stage):
    """Send values as float16: half the bytes of float32, a quarter of those of float64.

    A number beyond the range of float16 (65504) arrives as infinity.

    Args:
        direction: "down" (default) for messages, "up" for replies.
        values: The names of the values that are rounded; empty for all shaped like x or y.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> half = fb.stages.Half()
        >>> value = fb.Tree(w=torch.tensor([1.0, 1e6]))
        >>> payload, _ = half.encode(value, torch.tensor(0), ())
        >>> payload["w"].dtype
        torch.float16
        >>> half.decode(payload, value)["w"]
        tensor([1., inf])
    """

    name = "half"

    direction: Literal["up", "down"] = "down"

    def encode(self, value: Tree, key: Tensor, memory: Memory) -> tuple[Payload, Memory]:
        """The value in float16."""
        return value.map(lambda t: t.to(torch.float16)), memory

    def decode(self, payload: Tree, like: Tree) -> Tree:
        """The payload in the dtypes of `like`."""
        return payload.map(lambda t, other: t.to(other.dtype), like)


def encode_values(
    stages: Sequence[Stage],
    values: Mapping[str, Payload],
    kinds: Mapping[str, Kind],
    key: Tensor,
    memory: Mapping[str, Memory],
) -> tuple[dict[str, Payload], dict[str, Memory]]:
    """Send the values of one message or reply through the encoders of its stages.

    Args:
        stages: The stages, in the order of encoding.
        values: The values by name.
        kinds: What each value is shaped like; values without a kind go through no stage.
        key: The root of random draws.
        memory: What the stages have left with this client, by stage and name.

    Returns:
        The values as they travel, and the new memories. Memories of values that are not among
        `kinds` are kept: they belong to other phases.
    """
    payload = dict(values)
    memories = dict(memory)
    for value_index, (name, kind) in enumerate(kinds.items()):
        if isinstance(payload[name], Tree) and not payload[name]:
            continue  # all of it stays with the client
        for stage_index, stage in enumerate(stages):
            if stage.applies_to(name, kind):
                value_key = fold_in(fold_in(key, stage_index), value_index)
                owner = f"{stage_index} {name}"
                payload[name], after = stage.encode(payload[name], value_key, memory.get(owner, ()))
                if stage.remembers:
                    memories[owner] = after
    return payload, memories


def decode_values(
    stages: Sequence[Stage],
    payload: Mapping[str, Payload],
    kinds: Mapping[str, Kind],
    like: Mapping[str, Tree],
) -> dict[str, Payload]:
    """Send a payload through the decoders of its stages, from the last stage to the first.

    Args:
        stages: The stages, in the order of encoding.
        payload: The values as they travelled, by name.
        kinds: What each value is shaped like.
        like: A template for each value that is a tree (`kinds.templates`).

    Returns:
        The values that the receiver computes with.
    """
    values = dict(payload)
    for name, kind in kinds.items():
        for stage in reversed(stages):
            if stage.applies_to(name, kind) and like.get(name, True):
                values[name] = stage.decode(values[name], like[name])
    return values


def _check_stages(name: str, value: object) -> tuple[Stage, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(stage, Stage) for stage in value):
        example = "fedbilevel.stages.Clip(norm=1.0)"
        raise TypeError(f"{name} is {value!r}; it must be a list of stages, such as {example}")
    return tuple(value)


def _read_stages(key: str, value: object) -> tuple[Stage, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{key} is {value!r}; it must be a list of tables")
    stages = []
    for index, table in enumerate(value):
        stages.append(build_variant("stage", _registry, f"{key}[{index}]", table))
    return tuple(stages)


Stages = Annotated[tuple[Stage, ...], Rule("list of stages", _check_stages, _read_stages)]
