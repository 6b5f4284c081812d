"""Records: numbers of an algorithm for the metrics, averaged until the next evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Numbers whose name begins with one of these words are not averaged.
EXTREMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
}


class Records:
    """The numbers that were recorded since the last evaluation, by name.

    Of names that begin with `max_` or `min_` the extreme is kept, of all others the mean.

    Args:
        values: For each name the sum or the extreme of its numbers, and their count.

    Examples:
        >>> records = Records()
        >>> records.add("residual", 1.0)
        >>> records.add("residual", 4.0)
        >>> records.take(), records.take()
        ({'residual': 2.5}, {})
    """

    def __init__(self, values: Mapping[str, tuple[float | Tensor, int]] = {}) -> None:
        self.values = dict(values)

    def add(self, name: str, value: float | Tensor) -> None:
        """Record a number; a tensor stays on its device."""
        total, count = self.values.get(name, (0.0, 0))
        extreme = EXTREMES.get(name.split("_")[0])
        if extreme and count:
            total = extreme(_float64(total), _float64(value))
        elif isinstance(value, Tensor) and not value.is_cpu:
            total = total + value.double()  # not read: that would wait for a GPU
        else:
            total = total + float(value)
        self.values[name] = (total, count + 1)

    def take(self) -> dict[str, float]:
        """Return the means and extremes by name, and forget them."""
        taken = {}
        for name, (total, count) in self.plain().items():
            taken[name] = total
            if name.split("_")[0] not in EXTREMES:
                taken[name] /= count
        self.values = {}
        return taken

    def plain(self) -> dict[str, tuple[float, int]]:
        """Return the values as plain numbers, for a checkpoint."""
        return {name: (float(total), count) for name, (total, count) in self.values.items()}


def _float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
