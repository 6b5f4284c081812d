"""`fedbilevel compare`: several algorithms over several seeds, ranked in one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides, say_if_nothing_to_resume, unused_folder


def compare(
    experiment: options.ExperimentName,
    algorithms: options.AlgorithmNames = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="How many seeds, counted from the experiment's.")
    ] = 3,
    task: options.TaskName = None,
    data: options.DataName = None,
    rounds: options.Rounds = None,
    device: options.Device = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    out: options.ComparisonFolder = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the comparison in --out.")
    ] = False,
    smoke: options.Smoke = False,
    data_dir: options.DataDir = None,
    jobs: options.Jobs = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Run algorithms over several seeds, and rank them in report.html."""
    from fedbilevel.cli.comparison import Comparison, compared_algorithms, share_cores
    from fedbilevel.cli.progress import preparing
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)
    names = compared_algorithms(table, algorithms)
    jobs, threads = share_cores(table, jobs)
    overrides = given_overrides(task=task, data=data, rounds=rounds, device=device)
    overrides["runtime.threads"] = threads
    with preparing(f"{seeds * len(names)} runs", quiet):
        first = configs.resolve(
            source, table, algorithm=names[0], settings=set_, overrides=overrides, smoke=smoke
        )
        members = {}
        for name in names:
            for seed in range(first.experiment.seed, first.experiment.seed + seeds):
                config = configs.resolve(
                    source,
                    table,
                    algorithm=name,
                    settings=[*set_, f"seed={seed}"],
                    overrides=overrides,
                    smoke=smoke,
                )
                members[f"{config.label}/seed-{seed}"] = config
    folder = out or unused_folder(Path("runs", Path(source).stem))
    if resume and not quiet:
        say_if_nothing_to_resume(folder, members)
    comparison = Comparison(folder, members, data_dir, resume, jobs)
    raise typer.Exit(comparison.run(quiet, json_))
