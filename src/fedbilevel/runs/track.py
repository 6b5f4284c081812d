"""Experiment trackers as callbacks: TensorBoard, MLflow, Weights & Biases (extra `track`)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.core import checks, ranks
from fedbilevel.core.extras import import_extra
from fedbilevel.runs.callbacks import Callback

if TYPE_CHECKING:
    from fedbilevel.runs.metric import Metrics
    from fedbilevel.runs.run import Run

PROJECT = "fedbilevel"  # the name of the experiment or project where a tracker wants one


def trackers(
    names: str | Sequence[str], folder: Path | None, config: Mapping[str, Any]
) -> list[Callback]:
    """Return the callbacks for trackers.

    Args:
        names: One or several of "tensorboard", "mlflow" and "wandb".
        folder: The run folder, if there is one.
        config: The settings of the run, which are logged too.

    Returns:
        One callback per tracker; none on ranks other than the first.

    Raises:
        ValueError: If a name is unknown, or the tracker is not installed.
    """
    if isinstance(names, str):
        names = [names]
    for name in names:
        checks.one_of("track", name, TRACKERS)
    if ranks.rank():
        return []
    return [TRACKERS[name](folder, config) for name in names]


class TensorBoard(Callback):
    """Writes all metrics to `tensorboard/` in the run folder, else below runs/."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self._writer_class = import_extra("torch.utils.tensorboard", "track").SummaryWriter
        self._writer: Any = None

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """Write the metrics."""
        if self._writer is None:  # not earlier: before its first evaluation a run has no folder
            folder = None
            if self.folder is not None:
                folder = str(self.folder / "tensorboard")
            self._writer = self._writer_class(folder)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, metrics["round"])

    def on_end(self, run: Run) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Callback):
    """Logs metrics and settings to MLflow's tracking store, in the experiment `fedbilevel`."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]) -> None:
        self.name = _title(folder, config)
        self.config = dict(config)
        self._client = import_extra("mlflow", "track")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it announces what it creates

    def on_start(self, run: Run) -> None:
        """Start a run of MLflow."""
        try:
            self._client.set_experiment(PROJECT)
        except self._client.MlflowException as error:
            store = self._client.get_tracking_uri()
            reason = str(error).splitlines()[0]
            raise ValueError(f"MLflow cannot use the store {store!r}: {reason}") from error
        self._client.start_run(run_name=self.name)
        # MLflow's store configures logging, and that disables all existing loggers.
        logging.getLogger("fedbilevel").disabled = False
        self._client.log_dict(self.config, "config.json")

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """Log the metrics."""
        self._client.log_metrics(dict(metrics), step=metrics["round"])

    def on_end(self, run: Run) -> None:
        """End the run of MLflow."""
        if self._client.active_run() is not None:
            self._client.end_run("FINISHED" if _has_succeeded(run) else "FAILED")


class WandB(Callback):
    """Logs metrics and settings to Weights & Biases, in the project `fedbilevel`.

    Its own environment variables apply: with WANDB_MODE=offline, nothing leaves this machine.
    """

    def __init__(self, folder: Path | None, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.name = _title(folder, config)
        self.config = dict(config)
        self._wandb = import_extra("wandb", "track")
        self._run: Any = None

    def on_evaluation(self, run: Run, metrics: Metrics) -> None:
        """Log the metrics; the first time, start a run of Weights & Biases."""
        if self._run is None:  # not earlier: before its first evaluation a run has no folder
            try:
                self._run = self._wandb.init(
                    project=os.environ.get("WANDB_PROJECT", PROJECT),
                    name=self.name,
                    config=self.config,
                    dir=self.folder,
                    settings=self._wandb.Settings(silent=True),
                )
            except self._wandb.Error as error:
                reason = str(error).splitlines()[0]
                raise ValueError(
                    f"Weights & Biases cannot start a run: {reason.rstrip('.')} "
                    "(with WANDB_MODE=offline it needs neither an account nor a network)"
                ) from error
        self._run.log(dict(metrics), step=int(metrics["round"]))

    def on_end(self, run: Run) -> None:
        """End the run of Weights & Biases."""
        if self._run is not None:
            self._run.finish(exit_code=0 if _has_succeeded(run) else 1)
            self._run = None


def _has_succeeded(run: Run) -> bool:
    """Whether a run that ends now has neither diverged nor failed."""
    return run.status != "diverged" and isinstance(sys.exception(), GeneratorExit | None)


def _title(folder: Path | None, config: Mapping[str, Any]) -> str:
    """Return the name of a run for a tracker."""
    if folder is not None:
        return folder.name
    return str(config["algorithm"]["name"])


TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
