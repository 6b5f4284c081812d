"""`fedbilevel value`: what each client of an experiment is worth, as a table, a picture or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides
from fedbilevel.core import checks

if TYPE_CHECKING:
    from fedbilevel.diagnostics.value import Value
    from fedbilevel.experiments.config import Config
    from fedbilevel.tasks import Task


def value(
    experiment: options.ExperimentName,
    task: options.TaskName = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    groups: Annotated[
        str | None,
        typer.Option(
            help="Entry of the validation data that numbers people; by default, the task's."
        ),
    ] = None,
    resamples: Annotated[int, typer.Option(min=2, help="Resamples of the trusted samples.")] = 400,
    level: Annotated[
        float, typer.Option(help="Probability that all intervals together cover.")
    ] = 0.95,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Check: solve again without each client.")
    ] = False,
    federation: Annotated[
        str, typer.Option(help="simulated: in this process; flower: real nodes on this machine.")
    ] = "simulated",
    figure: Annotated[
        Path | None, typer.Option(help="Draw the values with their intervals: .pdf, .png or .svg.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    data_dir: options.DataDir = None,
    json_: options.Json = False,
) -> None:
    """Show what the data of each client are worth.

    The trusted samples are the validation data. A value is how much the loss on them would rise
    without the client, to first order, with an interval by bootstrap over the trusted samples.
    """
    checks.one_of("federation", federation, ("simulated", "flower"))
    if figure is not None and figure.suffix not in (".pdf", ".png", ".svg"):
        raise ValueError(f"{figure} ends in {figure.suffix!r}, expected .pdf, .png or .svg")
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)
    overrides = given_overrides(task=task, data=data, seed=seed)
    config = configs.resolve(source, table, settings=set_, overrides=overrides)

    from fedbilevel.experiments.runner import load_task  # after what may be refused without PyTorch

    loaded = load_task(config, data_dir)
    wanted = {
        "groups": groups or getattr(loaded, "groups", None),
        "names": getattr(loaded, "names", None),
        "resamples": resamples,
        "level": level,
        "leave_one_out": leave_one_out,
    }
    if federation == "flower":
        result = _on_flower(config, loaded, wanted, data_dir)
    else:
        result = _simulated(config, loaded, wanted)
    if json_:
        print(json.dumps(result.to_dict()))
    else:
        print(result)
    if figure is not None:
        result.save_figure(figure)
    if out is not None:
        from fedbilevel.report import write_value_page

        write_value_page(f"What each client is worth: {source}", result, out)


def _simulated(config: Config, task: Task, wanted: dict[str, Any]) -> Value:
    """Compute in this process."""
    from fedbilevel.diagnostics.value import value as compute

    experiment = config.experiment
    return compute(
        task.problem, task.clients, weights=experiment.weights, seed=experiment.seed, **wanted
    )


def _on_flower(config: Config, task: Task, wanted: dict[str, Any], data_dir: Path | None) -> Value:
    """Compute on nodes, each of which loads the data of one client."""
    from fedbilevel.cli import federation
    from fedbilevel.cli.run import node_starter
    from fedbilevel.deploy.flower.deployment import Deployment
    from fedbilevel.diagnostics.value import Value

    count = len(task.clients)
    plain = federation.value(
        config,
        wanted,
        deployment=Deployment(),
        clients=count,
        data_dir=data_dir,
        start_nodes=node_starter(config, count, data_dir),
    )
    return Value.from_dict(plain)
