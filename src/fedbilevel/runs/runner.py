"""From a config to a run that is ready to start."""

from __future__ import annotations

from pathlib import Path

import torch

from fedbilevel.federation import SimulatedFederation
from fedbilevel.runs.config import Config
from fedbilevel.solve import Run


def prepare(config: Config, data_dir: Path | None = None) -> Run:
    """Load the task and set up the run; whatever is wrong with the input shows here, before anything is written."""
    experiment = config.experiment
    torch.set_num_threads(config.table["runtime"]["threads"])
    if experiment.device != "cpu" and not (experiment.device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"device is {experiment.device!r}; this machine has 'cpu'" + _accelerators())
    task = config.load_task(data_dir)
    fed = SimulatedFederation(
        task.problem.to(experiment.device),
        task.clients,
        config.algorithm,
        config.environment,
        weights=experiment.weights,
        seed=experiment.seed,
        device=experiment.device,
        mode=experiment.runtime.mode,
        memory=experiment.runtime.memory,
    )
    return Run(fed, config.limits, task.evaluate, config.every, experiment.stop.test_accuracy)


def _accelerators() -> str:
    return " and 'cuda'" if torch.cuda.is_available() else " only"
