"""From a config to a run that is ready to start."""

from __future__ import annotations

from pathlib import Path

import torch

from fedbilevel.core import ranks
from fedbilevel.experiments.config import Config
from fedbilevel.federation import Federation
from fedbilevel.runs.run import Run
from fedbilevel.runs.simulation import simulated_federation
from fedbilevel.tasks import Task


def prepare(config: Config, data_dir: Path | None = None) -> Run:
    """Load the task and set up the run; whatever is wrong with the input shows here, before anything is written."""
    task = load(config, data_dir)
    return run_of(config, task, simulation(config, task))


def load(config: Config, data_dir: Path | None = None) -> Task:
    """The task, on a machine that is set up for it."""
    torch.set_num_threads(config.table["runtime"]["threads"])
    return config.load_task(data_dir)


def simulation(config: Config, task: Task) -> Federation:
    experiment, device = config.experiment, ranks.device(config.experiment.device)
    return simulated_federation(
        task.problem.to(device),
        task.clients,
        config.environment,
        weights=experiment.weights,
        seed=experiment.seed,
        device=device,
        mode=experiment.runtime.mode,
        memory=config.table["runtime"]["memory"],
        precision=experiment.runtime.precision,
        compile=experiment.runtime.compile,
    )


def run_of(config: Config, task: Task, fed: Federation) -> Run:
    return Run(
        config.algorithm,
        fed,
        config.limits,
        task.evaluate,
        config.every,
        config.experiment.stop.test_accuracy,
    )
