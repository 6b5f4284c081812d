"""Sets up the run that a config describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedbilevel.core import ranks
from fedbilevel.experiments.config import Config
from fedbilevel.federation import Federation
from fedbilevel.runs.callbacks import Callback, EarlyStopping
from fedbilevel.runs.run import Run
from fedbilevel.runs.simulation import simulated_federation
from fedbilevel.tasks import Task


def prepare_run(config: Config, data_dir: Path | None = None) -> Run:
    """Load the task of a config, and set up its run on a simulated federation.

    Nothing is written, so whatever is wrong with the input shows before the run has left a trace.

    Args:
        config: The resolved experiment.
        data_dir: The folder with downloaded data, if it is not in the usual place.

    Returns:
        The run, before its first iteration.

    Raises:
        ConfigError: If the task cannot be loaded.
        ValueError: If the parts of the experiment do not fit each other.
        ClientError: If a loss fails on the data of the first client.

    Examples:
        >>> from fedbilevel.experiments import config as configs
        >>> config = configs.resolve(*configs.read("digits"), overrides={"task.name": "quadratic"})
        >>> run = prepare_run(config)
        >>> run.limits
        {'rounds': 100}
    """
    task = load_task(config, data_dir)
    return build_run(config, task, build_federation(config, task))


def load_task(config: Config, data_dir: Path | None = None) -> Task:
    """Set this process to the config's number of threads, and load the task.

    What the task found out about itself is recorded in the config's table.

    Args:
        config: The resolved experiment.
        data_dir: The folder with downloaded data, if it is not in the usual place.

    Returns:
        The task.

    Raises:
        ConfigError: If the task cannot be loaded.
    """
    torch.set_num_threads(config.table["runtime"]["threads"])
    task = config.load_task(data_dir)
    config.table["task"].update(task.options)
    runtime = config.experiment.runtime
    problem = task.problem
    if runtime.derivatives != "auto":
        problem = replace(problem, derivatives=runtime.derivatives)
    if runtime.micro_batch is not None:
        problem = replace(problem, micro_batch=runtime.micro_batch)
    return replace(task, problem=problem)


def build_federation(config: Config, task: Task) -> Federation:
    """Build the simulated federation of a config, with the clients of a task.

    How clients compute is chosen here, where the config leaves it open, and recorded in its table.

    Args:
        config: The resolved experiment.
        task: Its task, as `load_task` returns it.

    Returns:
        The federation, on the config's device.

    Raises:
        ValueError: If the environment does not fit the number of clients.
        ClientError: If a loss fails on the data of the first client.
    """
    experiment = config.experiment
    device = ranks.local_device(experiment.device)
    federation = simulated_federation(
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
    config.table["runtime"]["derivatives"] = federation.runtime["derivatives"]
    return federation


def build_run(config: Config, task: Task, fed: Federation) -> Run:
    """Build the run of a config on a federation, simulated or real.

    Args:
        config: The resolved experiment.
        task: Its task, which evaluates the run; real clients evaluate their own models themselves.
        fed: The federation.

    Returns:
        The run, before its first iteration.

    Raises:
        ValueError: If the algorithm does not solve such a problem.
    """
    stop = config.experiment.stop
    callbacks: list[Callback] = []
    if stop.patience is not None:
        callbacks.append(EarlyStopping(stop.patience))
    target = stop.metric
    if stop.test_accuracy is not None:
        target = stop.test_accuracy
    return Run(
        config.algorithm,
        fed,
        config.limits,
        task.evaluate,
        config.every,
        target,
        task.evaluate_client,
        config.metric or task.metric,
        callbacks,
    )
