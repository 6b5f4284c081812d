"""`fedbilevel advise`: which methods suit an experiment, with the figures of our results."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides

if TYPE_CHECKING:
    from fedbilevel.diagnostics.methods import Advice

WIDTH = 80


def advise(
    experiment: options.ExperimentName,
    goal: Annotated[
        str | None,
        typer.Option(help="What is dear: rounds, bytes, gradients, seconds or error."),
    ] = None,
    task: options.TaskName = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    data_dir: options.DataDir = None,
    json_: options.Json = False,
) -> None:
    """Say which methods suit an experiment, and why.

    Every sentence comes with the figures of our own results, and the first choice with settings to
    start from.
    """
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)
    overrides = given_overrides(task=task, data=data, seed=seed)
    config = configs.resolve(source, table, settings=set_, overrides=overrides)

    from fedbilevel.core import ranks  # after what may be refused without PyTorch
    from fedbilevel.diagnostics import methods
    from fedbilevel.experiments.runner import load_task

    loaded = load_task(config, data_dir)
    advice = methods.advise(
        loaded.problem.to(ranks.local_device(config.experiment.device)),
        loaded.clients,
        config.environment,
        goal=goal,
        rounds=max(1, config.experiment.rounds),
        seed=config.experiment.seed,
    )
    settings = _settings(advice, table)
    if json_:
        print(_as_json(advice, settings))
    else:
        _print(advice, settings)


def _settings(advice: Advice, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the first choice: the experiment's own, else what was measured."""
    if not advice.order:
        return {}
    return table.get("algorithms", {}).get(advice.first) or dict(advice.settings())


def _print(advice: Advice, settings: Mapping[str, Any]) -> None:
    import tomli_w

    for line in advice.lines():
        print(textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    if settings:
        print("start from:\n")
        print(tomli_w.dumps({"algorithms": {advice.first: settings}}), end="")
    elif advice.order:
        print("start from: its defaults, and `fedbilevel tune`")


def _as_json(advice: Advice, settings: Mapping[str, Any]) -> str:
    content = {
        "goal": advice.goal,
        "conditions": advice.conditions,
        "order": advice.order,
        "figures": [each._asdict() for each in advice.evidence],
        "others": advice.others,
        "settings": settings,
    }
    return json.dumps(content)
