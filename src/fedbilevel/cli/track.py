"""Experiment trackers, each behind an option: TensorBoard and MLflow (extra `track`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.core.extras import import_extra

Metrics = Mapping[str, Any]
LogFunction = Callable[[Metrics], None]


@contextmanager
def trackers(
    folder: Path, config: Mapping[str, Any], *, tensorboard: bool, mlflow: bool
) -> Iterator[LogFunction]:
    """Open trackers for a run.

    Args:
        folder: The run folder.
        config: The resolved experiment.
        tensorboard: Whether to log to TensorBoard.
        mlflow: Whether to log to MLflow.

    Yields:
        A function that logs the metrics of an evaluation to every tracker.

    Raises:
        ValueError: If a tracker is not installed.
    """
    with ExitStack() as stack:
        log_functions: list[LogFunction] = []
        if tensorboard:
            log_functions.append(stack.enter_context(_tensorboard(folder / "tensorboard")))
        if mlflow:
            log_functions.append(stack.enter_context(_mlflow(folder.name, config)))

        def log(metrics: Metrics) -> None:
            for log_function in log_functions:
                log_function(metrics)

        yield log


@contextmanager
def _tensorboard(folder: Path) -> Iterator[LogFunction]:
    writer_class = import_extra("torch.utils.tensorboard", "track").SummaryWriter
    writer: Any = None

    def log(metrics: Metrics) -> None:
        nonlocal writer
        if writer is None:  # not earlier: before its first evaluation a run has no folder
            writer = writer_class(str(folder))
        for name, value in _finite(metrics).items():
            writer.add_scalar(name, value, metrics["round"])

    try:
        yield log
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def _mlflow(name: str, config: Mapping[str, Any]) -> Iterator[LogFunction]:
    client = import_extra("mlflow", "track")
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it would announce what it creates
    client.set_experiment("fedbilevel")
    with client.start_run(run_name=name):
        # MLflow's store configures logging, and that disables all existing loggers.
        logging.getLogger("fedbilevel").disabled = False
        client.log_dict(dict(config), "config.json")
        yield lambda metrics: client.log_metrics(_finite(metrics), step=metrics["round"])


def _finite(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}
