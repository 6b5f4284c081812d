"""`fedbilevel tune`: step sizes by trial, with the same number of trials for every algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides, say_if_nothing_to_resume, unused_folder


def tune(
    experiment: options.ExperimentName,
    algorithm: options.AlgorithmNames = None,
    trials: Annotated[
        int,
        typer.Option(min=1, help="Runs per algorithm; the first has the algorithm's own settings."),
    ] = 8,
    task: options.TaskName = None,
    data: options.DataName = None,
    rounds: options.Rounds = None,
    device: options.Device = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    out: options.ComparisonFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the trials in --out.")] = False,
    smoke: options.Smoke = False,
    data_dir: options.DataDir = None,
    jobs: options.Jobs = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Search for the step sizes of least upper loss.

    Every algorithm gets the same number of trials; tuned.toml holds the best settings.
    """
    from fedbilevel.cli.comparison import compared_algorithms, share_cores
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)
    names = compared_algorithms(table, algorithm)
    jobs, threads = share_cores(table, jobs)
    overrides = given_overrides(task=task, data=data, rounds=rounds, device=device)
    # A trial that stops at a test accuracy, say, would have used the test data.
    trial_overrides = {**overrides, "runtime.threads": threads}
    for key in ("test_accuracy", "metric", "patience"):
        trial_overrides[f"stop.{key}"] = None
    methods = {}
    for name in names:
        config = configs.resolve(
            source, table, algorithm=name, settings=set_, overrides=trial_overrides, smoke=smoke
        )
        methods[config.label] = config
    # tuned.toml is the experiment with the options of this call, but with its own budget of rounds
    # and its own sections of algorithms.
    common = {key: value for key, value in table.items() if key != "algorithms"}
    first = next(iter(methods.values())).algorithm.name  # a label means nothing without its section
    changed = configs.resolve(
        source, common, algorithm=first, settings=set_, overrides=overrides, smoke=smoke
    )
    tuned = changed.experiment.model_dump(exclude_unset=True)
    for key in ("algorithm", "algorithms", "rounds"):
        tuned[key] = table.get(key)
    folder = out or unused_folder(Path("runs", f"{Path(source).stem}-tune"))

    from fedbilevel.cli.tuning import Tuning  # after what may be refused without PyTorch

    if resume and not quiet:
        say_if_nothing_to_resume(folder, [f"{label}/trial-0" for label in methods])
    search = Tuning(folder, methods, trials, tuned, data_dir, resume, jobs)
    raise typer.Exit(search.run(quiet, json_))
