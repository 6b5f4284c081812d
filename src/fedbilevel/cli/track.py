"""Experiment trackers, each behind a flag: TensorBoard and MLflow (`pip install fedbilevel[track]`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Metrics = Mapping[str, Any]


@contextmanager
def trackers(
    folder: Path, config: Mapping[str, Any], *, tensorboard: bool, mlflow: bool
) -> Iterator[Callable[[Metrics], None]]:
    """A function that sends metrics to every tracker asked for."""
    sinks: list[Callable[[Metrics], None]] = []
    closers: list[Callable[[], object]] = []
    if tensorboard:
        writer = _import("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))

        def to_tensorboard(metrics: Metrics) -> None:
            for name, value in _numbers(metrics).items():
                writer.add_scalar(name, value, metrics["round"])

        sinks.append(to_tensorboard)
        closers.append(writer.close)
    if mlflow:
        client = _import("mlflow")
        client.set_experiment("fedbilevel")
        client.start_run(run_name=folder.name)
        client.log_dict(dict(config), "config.json")
        sinks.append(lambda metrics: client.log_metrics(_numbers(metrics), step=metrics["round"]))
        closers.append(client.end_run)

    def track(metrics: Metrics) -> None:
        for sink in sinks:
            sink(metrics)

    try:
        yield track
    finally:
        for close in closers:
            close()


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} cannot be imported ({error}); pip install fedbilevel[track]") from error
