"""What a client does on receiving a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel.oracle import Oracle


class Message(SimpleNamespace):
    """What a client receives: the tensors it was sent, and `steps`, the number of steps it will take."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the message holds {', '.join(vars(self))}, not {name!r}")


class Epochs(NamedTuple):
    """So many passes over the client's training data in shuffled batches; the last of a pass may be smaller."""

    passes: int


Steps = Literal["local"] | int | Epochs


class Phase(ABC):
    """What a client does on receiving a message: start, first, step (repeated), finish. Written for one client.

    A carry is any nest of tuples and trees of tensors. The runtime owns the loop: it draws the batches, runs the steps,
    for one client or for a stack of them under `torch.func.vmap`, and counts. All four are pure functions of what they
    are given and of the settings: a step that is run often is traced once and replayed.

    A phase that `remembers` adds "memory" to what `finish` returns, a dict of trees and tensors that stays with the
    client: its next such phase finds it in `message.memory`, which is empty at first and after `{}` was left there.
    """

    steps: Steps = 1  # "local": the environment's number of local steps
    batch: ClassVar[Literal["train", "val", "both"]] = "both"
    full: bool = False  # every sample instead of a mini-batch
    reply: ClassVar[Mapping[str, Literal["x", "y", "scalar"]]]
    fixed_x: ClassVar[bool] = False  # it evaluates at `message.x` alone and takes no derivatives in x
    remembers: ClassVar[bool] = False  # it reads and leaves a memory of the client's own
    summed: ClassVar[bool] = True  # the server sees only means of these replies, never a single one

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def draws(self) -> int:
        """Independent batches a step: with one, a step is given a `Batch`, with more a tuple of them."""
        return 1

    @abstractmethod
    def start(self, message: Message) -> Any: ...

    def first(self, carry: Any, oracle: Oracle, batch: Any) -> Any:
        """The first step, where it differs from the others."""
        return self.step(carry, oracle, batch)

    @abstractmethod
    def step(self, carry: Any, oracle: Oracle, batch: Any) -> Any: ...

    @abstractmethod
    def finish(self, carry: Any) -> dict[str, Any]: ...
