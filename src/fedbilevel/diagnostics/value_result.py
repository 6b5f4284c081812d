"""What `fb.value` returns: values with their intervals, as a text, a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedbilevel.core.markup import html_table
from fedbilevel.core.tree import Tree

if TYPE_CHECKING:
    from fedbilevel.diagnostics.value_figure import Bars


@dataclass(frozen=True)
class Value:
    """What each client is worth; `fb.value` returns it.

    Attributes:
        names: The name of each client.
        values: The value of each client: how much the upper loss would rise without it, to first
            order. Below 0, the client does harm.
        errors: The standard error of each value, over resamples of the trusted samples.
        low: The lower end of each interval.
        high: The upper end of each interval.
        level: The probability that all intervals together cover.
        upper_loss: The upper loss at y*(x).
        y: y*(x).
        leave_one_out: For each client how much the upper loss rises when the lower level is solved
            without it; None if that was not asked for.
        samples: For each client the value of each of its training samples, which sum to that of
            the client if the lower loss is a mean; None if that was not asked for.
        rounds: The communication rounds that were used.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("sites", trusted=0.15)
        >>> value = fb.value(task.problem, task.clients, weights="samples", groups="person")
        >>> value.harmful == list(task.bad)
        True
    """

    names: tuple[str, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    level: float
    upper_loss: float
    y: Tree = field(repr=False, default_factory=Tree)
    leave_one_out: tuple[float, ...] | None = None
    samples: tuple[Tensor, ...] | None = field(default=None, repr=False)
    rounds: int = 0

    @property
    def harmful(self) -> list[int]:
        """The clients whose interval lies below 0, in the order of their numbers."""
        return [client for client, high in enumerate(self.high) if high < 0]

    @property
    def helpful(self) -> list[int]:
        """The clients whose interval lies above 0, in the order of their numbers."""
        return [client for client, low in enumerate(self.low) if low > 0]

    @property
    def chances(self) -> list[float]:
        """The probability of each client that it helps: that its value is above 0.

        Clients can be weighted by it: one hypergradient, and nothing to tune. With few trusted
        people that loses less to chance than weights that minimise the upper loss.
        """
        normal = statistics.NormalDist()
        pairs = zip(self.values, self.errors, strict=True)
        return [normal.cdf(v / e) if e > 0 else float(v > 0) for v, e in pairs]

    def verdict(self, client: int) -> str:
        """Return "harms", "helps" or "unclear", for 0 within the interval of a client.

        Args:
            client: The number of the client.
        """
        if self.high[client] < 0:
            return "harms"
        if self.low[client] > 0:
            return "helps"
        return "unclear"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but y and the values of samples as plain values."""
        plain = {name: each for name, each in vars(self).items() if name not in ("y", "samples")}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Value:
        """Return the value that `to_dict` returned as plain values.

        Args:
            plain: What `to_dict` returned, which may have been JSON in between.
        """
        arguments: dict[str, Any] = {}
        for name, each in plain.items():
            arguments[name] = tuple(each) if isinstance(each, list) else each
        return cls(**arguments)

    def save_figure(self, path: Path | str, losses: Mapping[str, float] | None = None) -> None:
        """Draw the values with their intervals.

        Args:
            path: The file to write: .pdf, .png or .svg.
            losses: Losses to draw beside the values, by name.

        Raises:
            ValueError: The file is of another type.
        """
        from fedbilevel.diagnostics.value_figure import save_value_figure  # matplotlib is slow

        save_value_figure(self.bars(), Path(path), losses)

    def bars(self) -> Bars:
        """Return what a picture shows."""
        from fedbilevel.diagnostics.value_figure import Bars

        verdicts = [self.verdict(client) for client in range(len(self.values))]
        return Bars(self.names, self.values, self.low, self.high, verdicts, self.level)

    def __str__(self) -> str:
        """A table with a line per client, the most harmful first, and the loss to compare with."""
        width = max(map(len, (*self.names, "client")))
        heading = f"{'client':{width}}  {'value':>10}  {f'{self.level:.0%} interval':>24}  verdict"
        if self.leave_one_out is not None:
            heading += "  left out"
        lines = [heading]
        for client in sorted(range(len(self.values)), key=self.values.__getitem__):
            interval = f"[{self.low[client]:+.2e}, {self.high[client]:+.2e}]"
            line = f"{self.names[client]:{width}}  {self.values[client]:+10.2e}  {interval:>24}"
            line += f"  {self.verdict(client):7}"
            if self.leave_one_out is not None:
                line += f"  {self.leave_one_out[client]:+.2e}"
            lines.append(line)
        lines.append(f"loss on the trusted samples: {self.upper_loss:.4g}")
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the same as a table of HTML."""
        headings = ["client", "verdict", "value", f"{self.level:.0%} interval"]
        if self.leave_one_out is not None:
            headings.append("left out")
        rows = []
        for client in sorted(range(len(self.values)), key=self.values.__getitem__):
            interval = f"{self.low[client]:+.2e} to {self.high[client]:+.2e}"
            row = [
                self.names[client],
                self.verdict(client),
                f"{self.values[client]:+.2e}",
                interval,
            ]
            if self.leave_one_out is not None:
                row.append(f"{self.leave_one_out[client]:+.2e}")
            rows.append(row)
        caption = f"loss on the trusted samples: {self.upper_loss:.4g}"
        return html_table(rows, headings, caption)

    def _repr_html_(self) -> str:
        """The picture and the table, for a notebook."""
        from fedbilevel.diagnostics.value_figure import value_figure  # matplotlib is slow
        from fedbilevel.runs.display import html_image

        return html_image(value_figure(self.bars())) + self.to_html()
