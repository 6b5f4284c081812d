"""`fedbilevel check`: what `fb.check` finds, as a table with settings to paste, or as JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides

if TYPE_CHECKING:
    from fedbilevel.diagnostics.advice import Report

PIPE_WIDTH = 140  # columns, where there is no terminal


def check(
    experiment: options.ExperimentName,
    task: options.TaskName = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    data_dir: options.DataDir = None,
    json_: options.Json = False,
) -> None:
    """Check a problem, and recommend an algorithm and settings.

    It measures curvatures and differences between clients, and warns of an ill-posed problem.
    """
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)
    overrides = given_overrides(task=task, data=data, seed=seed)
    config = configs.resolve(source, table, settings=set_, overrides=overrides)

    from fedbilevel.core import ranks  # after what may be refused without PyTorch
    from fedbilevel.diagnostics.check import check as diagnose
    from fedbilevel.experiments.runner import load_task

    loaded = load_task(config, data_dir)
    report = diagnose(
        loaded.problem.to(ranks.local_device(config.experiment.device)),
        loaded.clients,
        config.environment,
        rounds=max(1, config.experiment.rounds),
        weights=config.experiment.weights,
        seed=config.experiment.seed,
        mode=config.experiment.runtime.mode,
    )
    if json_:
        print(_as_json(report))
    else:
        _print_report(report, source)


def _print_report(report: Report, title: str) -> None:
    import tomli_w
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if report.rows:
        table = Table(
            "", "measured", "at", "verdict", title=escape(title), caption=escape(report.where)
        )
        for row in report.rows:
            table.add_row(*map(escape, row))
        console = Console()
        if not sys.stdout.isatty():
            console = Console(width=PIPE_WIDTH)
        console.print(table)
    for warning in report.warnings:
        print(f"warning: {warning}")
    if report.measured:
        print(f"recommended: {report.recommended} ({report.reason})\n")
        print(tomli_w.dumps({"algorithms": {report.recommended: report.settings()}}), end="")


def _as_json(report: Report) -> str:
    """Return a report with the settings of every algorithm that there is advice on.

    A value that could not be measured is null.
    """
    from fedbilevel.diagnostics.advice import ADVISED

    content: dict[str, object] = {
        "where": report.where,
        "measured": None,
        "verdicts": {quantity: verdict for quantity, _, _, verdict in report.rows},
        "warnings": report.warnings,
        "recommended": None,
        "reason": None,
        "settings": {},
    }
    if report.measured:
        measured = report.measured._asdict()
        measured["condition"] = report.measured.condition
        if not math.isfinite(report.measured.condition):
            measured["condition"] = None
        content["measured"] = measured
        content["recommended"] = report.recommended
        content["reason"] = report.reason
        content["settings"] = {name: report.settings(name) for name in ADVISED}
    return json.dumps(content)
