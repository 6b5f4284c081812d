"""What is called while a run goes on: the interface, early stopping, and the best state so far."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.core import checks
from fedbilevel.runs.metric import Metric, Metrics

Run = Any  # `fedbilevel.runs.run.Run`, whose module imports this one


class Callback:
    """Called by a run after its iterations and evaluations; every method may be left out.

    A callback sees the run between two iterations: `run.state`, `run.history`, `run.spent()`. It
    may end the run by `run.finish(reason)`, but must not change it in other ways, so that a run
    with callbacks computes what a run without them does.

    Examples:
        >>> import fedbilevel as fb
        >>> class Print(fb.callbacks.Callback):
        ...     def on_evaluation(self, run, metrics):
        ...         print("round", metrics["round"])
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> result = fb.solve(task.problem, task.clients, rounds=2, callbacks=[Print()])
        round 0
        round 1
        round 2
    """

    def on_start(self, run: Run) -> None:
        """The run begins or, with a history, continues.

        Args:
            run: The run.
        """

    def on_iteration(self, run: Run) -> None:
        """An iteration has ended; a method with one exchange per iteration has ended a round.

        Args:
            run: The run.
        """

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """An evaluation has ended, and is recorded if the run has a folder.

        Args:
            run: The run.
            metrics: The last entry of `run.history`.
        """

    def on_end(self, run: Run) -> None:
        """The run has ended, whether completed or not; also after an error.

        Args:
            run: The run.
        """


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Ends a run whose metric no longer improves.

    It decides by the history alone, so that a resumed run ends where one that was never killed
    does. The result holds the last x and y; `SaveBest` keeps the best ones.

    Args:
        patience: After how many evaluations without an improvement the run ends.
        metric: The metric; by default that of the run.
        least_change: By how much a value must be better than the best one so far.

    Raises:
        ValueError: If the patience is not at least 1, or the least change is negative.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> early = fb.callbacks.EarlyStopping(patience=3, least_change=0.01)
        >>> result = fb.solve(task.problem, task.clients, rounds=500, callbacks=[early])
        >>> result.history[-1]["round"] < 500
        True
        >>> result.reason
        'upper_loss has not improved by 0.01 in 3 evaluations'
    """

    patience: int
    metric: Metric | None = None
    least_change: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("patience", self.patience, least=1)
        checks.non_negative("least_change", self.least_change)

    def on_start(self, run: Run) -> None:
        """End a resumed run that had been ended before.

        Args:
            run: The run.
        """
        self._check(run)

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """End the run if its metric has not improved for long enough.

        Args:
            run: The run.
            metrics: The last evaluation.
        """
        self._check(run)

    def _check(self, run: Run) -> None:
        metric = self.metric or run.metric
        best: float | None = None
        waited = 0
        for metrics in run.history:
            value = metric.best([metrics.get(metric.name, float("nan"))])
            improved = value is not None and (
                best is None or metric.sign * (best - value) > self.least_change
            )
            if improved:
                best = value
                waited = 0
            else:
                waited += 1
        if waited >= self.patience:
            change = f" by {self.least_change:g}" if self.least_change else ""
            run.finish(f"{metric.name} has not improved{change} in {self.patience} evaluations")


@dataclass
class SaveBest(Callback):
    """Writes x and y to a file whenever an evaluation is the best so far.

    Args:
        path: The file, in the safetensors format: the names of x and y with their tensors.
        metric: The metric; by default that of the run.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> from safetensors.torch import load_file
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best = fb.callbacks.SaveBest(f"{folder}/best.safetensors")
        ...     _ = fb.solve(task.problem, task.clients, rounds=2, callbacks=[best])
        ...     sorted(load_file(f"{folder}/best.safetensors"))
        ['x', 'y']
    """

    path: str | Path
    metric: Metric | None = None
    _written: float | None = field(default=None, init=False, repr=False)

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """Write the state if this evaluation is better than all before.

        Args:
            run: The run.
            metrics: The last evaluation.
        """
        from safetensors.torch import save  # needs more packages than PyTorch

        from fedbilevel.core import ranks

        metric = self.metric or run.metric
        values = [earlier.get(metric.name, float("nan")) for earlier in run.history]
        value = values[-1]
        is_best = metric.best([value]) is not None and metric.best(values) == value
        if not is_best or value == self._written or ranks.rank():
            return
        self._written = value
        tensors = {**run.state.x, **run.state.y}
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_bytes(save(plain))
        os.replace(temporary, path)
