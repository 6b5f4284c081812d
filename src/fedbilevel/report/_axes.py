"""What is reported: costs, metrics, and how their numbers are written."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (0 for one seed) over `count` seeds."""

    mean: float
    std: float
    count: int

    def format(self, digits: int = 4, divisor: float = 1, unit: str = "") -> str:
        """Return the mean, with the deviation if there are several seeds, in a unit."""
        text = f"{self.mean / divisor:,.{digits}f}"
        if self.count > 1:
            text += f" ± {self.std / divisor:,.{digits}f}"
        return f"{text} {unit}".rstrip()


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and standard deviation of the finite values, None if there are none."""
    finite = [value for value in values if np.isfinite(value)]
    if not finite:
        return None
    std = 0.0
    if len(finite) > 1:
        std = float(np.std(finite, ddof=1))
    return Spread(float(np.mean(finite)), std, len(finite))


@dataclass(frozen=True)
class Axis:
    """A cost to draw curves against; each of its units is a thousand times the one before."""

    key: str
    title: str
    units: tuple[str, ...]

    def unit(self, largest: float) -> tuple[float, str]:
        """Return the divisor and the name of the unit in which `largest` reads well."""
        power = sum(largest >= 1000**k for k in range(1, len(self.units)))
        return 1000.0**power, self.units[power]

    def heading(self, largest: float) -> str:
        """Return the title, with the unit in which `largest` reads well."""
        _, unit = self.unit(largest)
        if not unit:
            return self.title
        return f"{self.title} ({unit})"

    def format(self, cost: Spread) -> str:
        """Return a cost in a unit in which it reads well."""
        divisor, unit = self.unit(cost.mean)
        scaled = cost.mean / divisor
        is_whole = divisor == 1 and cost.std == 0 and cost.mean % 1 == 0
        if is_whole or scaled >= 100:
            digits = 0
        elif scaled >= 10:
            digits = 1
        else:
            digits = 2
        return cost.format(digits, divisor, unit)


COUNT_UNITS = ("", "k", "M", "G", "T", "P")
_AXES = (
    Axis("round", "Communication rounds", ("",)),
    Axis("bytes", "Bytes up and down", ("B", "kB", "MB", "GB", "TB")),
    Axis("gradients", "Gradients", COUNT_UNITS),
    Axis("flops", "Operations", tuple(f"{unit}FLOP" for unit in COUNT_UNITS)),
    Axis("samples", "Samples", COUNT_UNITS),
    Axis("virtual_s", "Virtual time", ("s",)),
    Axis("wall_s", "Wall time", ("s",)),
)
AXES = {axis.key: axis for axis in _AXES}
COSTS = {"iteration", "bytes_up", "bytes_down", "peak_bytes", *AXES}  # everything else is a metric
USUAL_METRICS = ("test_accuracy", "upper_loss", "hypergradient_norm")


def metric_title(name: str) -> str:
    """Return the name of a metric as a heading."""
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]
