"""Experiment trackers, each behind a flag: TensorBoard and MLflow (`pip install fedbilevel[track]`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

Metrics = Mapping[str, Any]
Sink = Callable[[Metrics], None]


@contextmanager
def trackers(
    folder: Path, config: Mapping[str, Any], *, tensorboard: bool, mlflow: bool
) -> Iterator[Sink]:
    """A function that sends metrics to every tracker asked for."""
    with ExitStack() as stack:
        sinks = [stack.enter_context(_tensorboard(folder / "tensorboard"))] if tensorboard else []
        sinks += [stack.enter_context(_mlflow(folder.name, config))] if mlflow else []

        def track(metrics: Metrics) -> None:
            for sink in sinks:
                sink(metrics)

        yield track


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Sink]:
    kind = optional("torch.utils.tensorboard", "track").SummaryWriter
    writers: list[Any] = []

    def log(metrics: Metrics) -> None:
        if not writers:  # only now: before its first evaluation a run has no folder
            writers.append(kind(str(folder)))
        for name, value in _numbers(metrics).items():
            writers[0].add_scalar(name, value, metrics["round"])

    try:
        yield log
    finally:
        for writer in writers:
            writer.close()


@contextmanager
def _mlflow(name: str, config: Mapping[str, Any]) -> Iterator[Sink]:
    client = optional("mlflow", "track")
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells what it creates
    client.set_experiment("fedbilevel")
    with client.start_run(run_name=name):
        logging.getLogger(
            "fedbilevel"
        ).disabled = False  # MLflow's store configures logging and silences all others
        client.log_dict(dict(config), "config.json")
        yield lambda metrics: client.log_metrics(_numbers(metrics), step=metrics["round"])


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


def optional(name: str, extra: str) -> Any:
    """A module that comes with an extra of ours."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{name} cannot be imported ({error}); pip install fedbilevel[{extra}]"
        ) from error
