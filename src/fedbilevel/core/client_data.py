"""The data of clients (`ClientData`), batches of them (`Batch`), and the weights of clients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.tree import is_finite

Data = tuple[Tensor, ...] | dict[str, Tensor]


class Batch(NamedTuple):
    """The samples that the two losses are evaluated on.

    Attributes:
        train: Samples of the training data, for the lower loss; `()` where it is not evaluated.
        val: Samples of the validation data, for the upper loss; `()` where it is not evaluated.
        rng: The key from which losses with a fourth argument `rng` draw; `()` if there is none.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> inputs = torch.ones(8, 3)
        >>> targets = torch.zeros(8)
        >>> batch = fb.Batch(train=(inputs, targets))
        >>> batch.val
        ()
    """

    train: Data = ()
    val: Data = ()
    rng: Tensor | tuple[()] = ()


def describe(value: object) -> str:
    """Type and shape of a value, never its contents, which could fill a screen."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def named_tensors(data: Data) -> list[tuple[str, Tensor]]:
    """The tensors of one side of the data, each with its index or quoted key for messages."""
    if isinstance(data, dict):
        return [(repr(key), value) for key, value in data.items()]
    return [(str(index), value) for index, value in enumerate(data)]


def repack(data: Data, tensors: list[Tensor]) -> Data:
    """`tensors` in the container of `data`: a tuple, or a dict with the same keys."""
    if isinstance(data, dict):
        return dict(zip(data, tensors, strict=True))
    return tuple(tensors)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of one client: one side for each level.

    Each side is a tuple or a dict of tensors whose leading axis counts samples. The losses receive
    batches of the same structure.

    Args:
        train: Training data, on which the lower loss is evaluated.
        val: Validation data, on which the upper loss is evaluated.

    Raises:
        TypeError: A side is not a non-empty tuple or dict of tensors with at least one axis.
        ValueError: A side has no samples, tensors of different lengths, or values that are not
            finite.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> client = fb.ClientData(
        ...     train={"image": torch.zeros(6, 1, 8, 8), "label": torch.arange(6)},
        ...     val={"image": torch.zeros(2, 1, 8, 8), "label": torch.arange(2)},
        ... )
        >>> client.size("train"), client.size("val")
        (6, 2)
    """

    train: Data
    val: Data

    def __post_init__(self) -> None:
        _check_side("train", self.train)
        _check_side("val", self.val)

    def size(self, side: str) -> int:
        """The number of samples of one side.

        Args:
            side: "train" or "val".

        Returns:
            The length of the leading axis.
        """
        return self.layouts[side][0]

    @functools.cached_property
    def layouts(self) -> dict[str, tuple[int, str]]:
        """For "train" and "val", the number of samples and the layout of one sample.

        A layout is a string with the names, shapes and dtypes of the tensors, because executors
        compare it often: clients of equal layouts can share a stack.
        """
        layouts = {}
        for side, data in (("train", self.train), ("val", self.val)):
            tensors = named_tensors(data)
            layout = [(name, *tensor.shape[1:], tensor.dtype) for name, tensor in tensors]
            layouts[side] = (len(tensors[0][1]), str(layout))
        return layouts


def _check_side(side: str, data: object) -> None:
    """Refuse what cannot be one side of a client's data."""
    if not isinstance(data, (tuple, dict)) or not data:
        raise TypeError(
            f"{side} is {type(data).__name__}; it must be a non-empty tuple or dict of tensors"
        )
    lengths = set()
    for name, value in named_tensors(data):
        if not isinstance(value, Tensor) or value.ndim == 0:
            raise TypeError(
                f"{side}[{name}] must be a tensor whose leading axis counts samples, "
                f"got {describe(value)}"
            )
        if value.is_floating_point() and not is_finite(value):
            raise ValueError(
                f"{side}[{name}] holds NaN or infinity; every number in the data must be finite"
            )
        lengths.add(len(value))
    if len(lengths) > 1:
        raise ValueError(
            f"{side} holds tensors of {sorted(lengths)} samples; all must have the same number"
        )
    if lengths == {0}:
        raise ValueError(f"{side} is empty; a client needs at least one sample on each side")


def check_clients(clients: object) -> None:
    """Check that something is a sequence of clients, without asking for one of them.

    Args:
        clients: What was given as the data of all clients.

    Raises:
        TypeError: It is no sequence.
        ValueError: It is empty.
    """
    if isinstance(clients, ClientData) or not hasattr(clients, "__getitem__"):
        raise TypeError(
            f"clients is {type(clients).__name__}; it must be a sequence with a ClientData for each"
        )
    if len(clients) == 0:  # type: ignore[arg-type]
        raise ValueError("clients is empty; a federation needs at least one")


def client_weights(
    weights: str | Sequence[float], clients: Sequence[ClientData]
) -> Sequence[float]:
    """The weight p_i >= 0 of every client in the global losses; the weights sum to 1.

    Args:
        weights: "uniform", "samples" (in proportion to the training samples) or one number per
            client, which are divided by their sum.
        clients: The data of all clients.

    Returns:
        One weight per client.

    Raises:
        TypeError: `weights` is neither a string nor a sequence of numbers.
        ValueError: A string is unknown, or the numbers are not one per client, not finite,
            negative or all zero.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.core.client_data import client_weights
        >>> clients = fb.tasks.load("quadratic", clients=4).clients
        >>> list(client_weights("uniform", clients))
        [0.25, 0.25, 0.25, 0.25]
        >>> list(client_weights([3, 1, 0, 4], clients))
        [0.375, 0.125, 0.0, 0.5]
    """
    n = len(clients)
    values: Sequence[object]
    if isinstance(weights, str):
        if checks.one_of("weights", weights, ("uniform", "samples")) == "uniform":
            return _UniformWeights(n)
        values = [clients[i].size("train") for i in range(n)]
    elif isinstance(weights, Sequence):
        values = weights
    else:
        raise TypeError(
            f"weights is {weights!r}; "
            "it must be 'uniform', 'samples' or a sequence of one number per client"
        )
    if len(values) != n:
        raise ValueError(f"weights has {len(values)} entries; there are {n} clients")
    numbers = [checks.non_negative("weights", value) for value in values]
    total = checks.positive("the sum of weights", sum(numbers))
    return [number / total for number in numbers]


class _UniformWeights(Sequence[float]):
    """1/n for each of n clients, without a list of n numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> float:  # type: ignore[override]  # no slices
        if not 0 <= index < self.n:
            raise IndexError(f"client {index} of {self.n}")
        return 1 / self.n
