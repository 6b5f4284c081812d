"""What a client does on receiving a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from fedbilevel.oracle import Oracle
from fedbilevel.problem import Batch


class Message(SimpleNamespace):
    """What a client receives: the tensors it was sent, and `steps`, the number of steps it will take."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the message holds {', '.join(vars(self))}, not {name!r}")


class Phase(ABC):
    """What a client does on receiving a message: start, step (repeated), finish. Pure, and written for one client.

    A carry is any nest of tuples and trees of tensors. The runtime owns the loop: it draws the batches, runs `step` as
    often as it should, for one client or for a stack of them under `torch.func.vmap`, and counts.
    """

    steps: ClassVar[Literal["local"] | int] = 1
    batch: ClassVar[Literal["train", "val", "both", "full"]] = "both"
    reply: ClassVar[Mapping[str, Literal["x", "y", "scalar"]]]
    summed: ClassVar[bool] = True  # the server sees only means of these replies, never a single one

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def draws(self) -> int:
        """Independent batches a step, each passed to `step`."""
        return 1

    @abstractmethod
    def start(self, message: Message) -> Any: ...

    @abstractmethod
    def step(self, k: int, carry: Any, oracle: Oracle, *batches: Batch) -> Any: ...

    @abstractmethod
    def finish(self, carry: Any) -> dict[str, Any]: ...
