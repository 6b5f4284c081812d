"""The outcome of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedbilevel.core.extras import import_extra
from fedbilevel.core.markup import describe_tree, html_table
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.runs.metric import UPPER_LOSS, Metric, Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False)
class Result:
    """The outcome of a run.

    Args:
        x: The upper variables after the last finished iteration; after a divergence, or if those
            are not finite, the variables at the last evaluation before.
        y: The lower variables, likewise.
        history: The metrics of each evaluation: the costs so far ("round", "iteration", "bytes_up",
            "bytes_down", "samples", "gradients", "flops", "peak_bytes", "virtual_s", "wall_s"),
            "upper_loss" and "lower_loss", what the algorithm records, and what `evaluate` returned.
        status: "completed", "diverged" or "interrupted".
        reason: A sentence that says why the run diverged, or when it was interrupted and which x
            and y these are, or why a callback ended it; else empty.
        federation: The federation of the run, which `personal` asks.
        metric: The metric that the run was judged by.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> result = fb.solve(task.problem, task.clients, "simfbo", rounds=10, every=5)
        >>> result.status, result.x["x"].shape
        ('completed', torch.Size([5]))
        >>> [metrics["round"] for metrics in result.history]
        [0, 5, 10]
    """

    x: Tree
    y: Tree
    history: list[Metrics] = field(default_factory=list)
    status: str = "completed"
    reason: str = ""
    federation: Federation | None = field(default=None, repr=False, compare=False)
    metric: Metric = UPPER_LOSS

    def personal(self, client: int) -> tuple[Tree, Tree]:
        """Return the whole x and y of one client: those of `x` and `y`, and what the client owns.

        Of a method for personal models, such as `Ditto`, it is the client's own model.

        Args:
            client: The client.

        Returns:
            x and y. Where nothing belongs to the client they are those of the result.

        Raises:
            ValueError: There is no such client.
            LookupError: The client is on another machine, which alone has its model.

        Examples:
            >>> import dataclasses
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> problem = dataclasses.replace(task.problem, owner={"y": "client"})
            >>> result = fb.solve(problem, task.clients, "simfbo", rounds=5)
            >>> result.y
            {}
            >>> x, y = result.personal(2)
            >>> y["y"].shape
            torch.Size([4])
        """
        if self.federation is None:
            raise LookupError("this result has no federation; there is nobody to ask")
        return self.federation.personal(client, self.x, self.y)

    def to_pandas(self) -> Any:
        """Return the history as a table of pandas, with a row per evaluation.

        Returns:
            A `pandas.DataFrame`, indexed by round.

        Raises:
            ImportError: If pandas is not installed.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> result = fb.solve(task.problem, task.clients, "simfbo", rounds=10, every=5)
            >>> list(result.to_pandas().index)
            [0, 5, 10]
        """
        pandas = import_extra("pandas", "frames")
        return pandas.DataFrame(self.history).set_index("round")

    def plot(self, *metrics: str, against: str = "round") -> Figure:
        """Draw metrics over the run.

        Args:
            *metrics: The metrics to draw, one panel each; by default the metric of the run, the
                upper loss and the lower loss.
            against: What they are drawn against: "round" or another cost, such as "wall_s".

        Returns:
            A figure of matplotlib, which a notebook shows; `figure.savefig(path)` writes it.

        Raises:
            ValueError: If a name is not in the history.

        Examples:
            >>> import fedbilevel as fb
            >>> task = fb.tasks.load("quadratic", clients=4)
            >>> result = fb.solve(task.problem, task.clients, "simfbo", rounds=3)
            >>> [panel.get_ylabel() for panel in result.plot("upper_loss").axes]
            ['upper loss']
        """
        from fedbilevel.runs.display import plot_history  # matplotlib takes long to import

        return plot_history(self.history, metrics or self._main_metrics(), against)

    def _main_metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.metric.name, "upper_loss", "lower_loss"]))

    def _facts(self) -> dict[str, str]:
        """Return what is worth knowing of the run in a few words, by name."""
        facts = {"status": self.status}
        if self.reason:
            facts["reason"] = self.reason
        if self.history:
            facts["rounds"] = str(self.history[-1]["round"])
            for name in self._main_metrics():
                facts[name] = f"{self.history[-1].get(name, math.nan):.6g}"
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self._facts().items())
        return f"Result({facts}, x={describe_tree(self.x)}, y={describe_tree(self.y)})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str]] = list(self._facts().items())
        rows += [("x", describe_tree(self.x)), ("y", describe_tree(self.y))]
        table = html_table(rows)
        if len(self.history) < 2:
            return table
        from fedbilevel.runs.display import html_image

        return html_image(self.plot()) + table
