"""`fedbilevel run`: one run, simulated in this process or on a federation on this machine."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbilevel.cli import options
from fedbilevel.cli.options import given_overrides, say_if_nothing_to_resume, unused_folder
from fedbilevel.core import checks
from fedbilevel.core.extras import import_extra

if TYPE_CHECKING:
    from fedbilevel.deploy.flower.deployment import Deployment
    from fedbilevel.experiments.config import Config
    from fedbilevel.runs.run import Run

SAME_MOMENT_S = 1.0
EXIT_CODES = {"completed": 0, "diverged": 3, "interrupted": 130}


def run(
    experiment: options.ExperimentName,
    algorithm: options.AlgorithmName = None,
    task: options.TaskName = None,
    data: options.DataName = None,
    rounds: options.Rounds = None,
    seed: options.Seed = None,
    device: options.Device = None,
    set_: options.Settings = [],  # noqa: B006  (typer expects a list)
    out: options.RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    smoke: options.Smoke = False,
    data_dir: options.DataDir = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to TensorBoard, in the run folder.")
    ] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log to MLflow's tracking store.")
    ] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to Weights & Biases.")] = False,
    federation: Annotated[
        str,
        typer.Option(
            help="simulated: in this process; flower: real nodes, all on this machine; "
            "ray: Flower's simulation engine."
        ),
    ] = "simulated",
    clients: options.Clients = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="flower: stock SuperNodes instead of warm nodes.")
    ] = False,
    keys: options.Keys = None,
) -> None:
    """Run one algorithm on an experiment.

    The run folder holds its config, metrics, checkpoint and summary.
    """
    _check_federation(federation, stock, keys)
    if quiet or json_:
        logging.getLogger("fedbilevel").setLevel(logging.ERROR)
    overrides = given_overrides(task=task, data=data, rounds=rounds, seed=seed, device=device)
    title, config = resolve_run(
        experiment, clients, algorithm=algorithm, settings=set_, overrides=overrides, smoke=smoke
    )

    from fedbilevel.core import ranks  # after what may be refused without PyTorch

    ranks.initialize()
    if federation != "simulated" and ranks.size() > 1:
        raise ValueError(f"federation is {federation!r}; under torchrun it must be 'simulated'")
    if ranks.rank():  # only the first process prints and logs
        quiet = True
        json_ = False
        logging.getLogger("fedbilevel").setLevel(logging.ERROR)
    given = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    track = [name for name, wanted in given.items() if wanted]
    if track and federation != "simulated":
        raise ValueError(f"--{track[0]} is for a simulated federation, not for {federation!r}")
    folder = ranks.on_first_rank(lambda: out or default_folder(title))
    without_progress = quiet or json_
    if resume:
        say_if_nothing_to_resume(folder)
    if federation == "flower":
        summary = _run_on_flower(
            config, title, folder, clients, resume, data_dir, without_progress, stock, keys
        )
    elif federation == "ray":
        import_extra("ray", "ray")
        from fedbilevel.cli.federation import simulate_on_ray

        summary = simulate_on_ray(config, folder, resume, data_dir)
    else:
        summary = _simulate(config, title, folder, resume, data_dir, without_progress, track)
    finish(summary, folder, quiet, json_)


def resolve_run(
    experiment: str,
    clients: int | None,
    *,
    algorithm: str | None = None,
    settings: Iterable[str] = (),
    overrides: Mapping[str, object] | None = None,
    smoke: bool = False,
) -> tuple[str, Config]:
    """Read an experiment and resolve it to one run, for a given number of clients.

    Args:
        experiment: Name of an experiment of the package, or path of a TOML file.
        clients: The number of clients. The task deals its data to them, and if the experiment lets
            more than that take part per round, all of them do. None: the experiment's own number.
        algorithm: See `experiments.config.resolve`, also for the other arguments.
        settings: Changes as "KEY=VALUE".
        overrides: Changes by dotted key.
        smoke: Whether to reduce the run to a second.

    Returns:
        The title of the run, and its config.
    """
    from fedbilevel.experiments import config as configs

    source, table = configs.read(experiment)

    def resolve(changes: Mapping[str, object]) -> Config:
        return configs.resolve(
            source,
            table,
            algorithm=algorithm,
            settings=settings,
            overrides={**(overrides or {}), **changes},
            smoke=smoke,
        )

    config = resolve({})
    if clients is not None:
        config = resolve(_changes_for_clients(config, clients))
    return f"{Path(source).stem} {config.label} seed {config.experiment.seed}", config


def _changes_for_clients(config: Config, clients: int) -> dict[str, object]:
    changes: dict[str, object] = {}
    for section in ("data", "task"):
        if "clients" in config.table.get(section, {}):
            changes[f"{section}.clients"] = clients
            break
    participation = config.environment.participation
    if isinstance(participation, int) and participation > clients:
        changes["environment.participation"] = clients
    return changes


def default_folder(title: str) -> Path:
    """Return a new folder below runs/, named after the run."""
    return unused_folder(Path("runs", title.replace(" ", "-")))


def _check_federation(federation: str, stock: bool, keys: Path | None) -> None:
    """Refuse an unknown federation, and options that are not for this one."""
    checks.one_of("federation", federation, ("simulated", "flower", "ray"))
    if federation != "flower" and (stock or keys):
        raise ValueError("--stock and --keys are for --federation flower")


def _simulate(
    config: Config,
    title: str,
    folder: Path,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    track: Sequence[str],
) -> dict[str, Any]:
    """Run on a simulated federation in this process, and return the summary."""
    from fedbilevel.core import ranks
    from fedbilevel.experiments.runner import prepare_run
    from fedbilevel.runs.progress import ShowProgress
    from fedbilevel.runs.recorder import Recorder
    from fedbilevel.runs.track import trackers

    with ranks.fail_together():
        prepared = prepare_run(config, data_dir)
        prepared.callbacks += trackers(track, folder, config.table)
        prepared.callbacks.append(ShowProgress(title, quiet))
        recorder = Recorder(
            prepared, folder, config.table, resume, config.experiment.checkpoint_every
        )
    _stop_on_signals(prepared, quiet)
    for _ in recorder:
        pass
    return recorder.summary()


def _stop_on_signals(run: Run, quiet: bool) -> None:
    """Let Ctrl-C and SIGTERM end a run after its iteration, and a second one end the iteration.

    Signals of the same moment count once: a comparison sends on what a terminal has already sent.
    """
    asked_at = 0.0

    def stop(*_: object) -> None:
        nonlocal asked_at
        run.stop()
        if not asked_at:
            asked_at = time.monotonic()
            if not quiet:  # `print` must not be interrupted by itself
                os.write(2, b"stopping after this iteration; Ctrl-C again stops at once\n")
        elif time.monotonic() - asked_at > SAME_MOMENT_S:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _run_on_flower(
    config: Config,
    title: str,
    folder: Path,
    clients: int | None,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    stock: bool,
    keys: Path | None,
) -> dict[str, Any]:
    """Run on a SuperLink and nodes on this machine, and return the summary.

    Each node loads its partition of the experiment's data.
    """
    from fedbilevel.cli.federation import serve
    from fedbilevel.deploy.flower.deployment import Deployment

    count = clients or len(config.load_task(data_dir).clients)
    return serve(
        config,
        title,
        folder,
        deployment=Deployment(keys=keys),
        clients=count,
        resume=resume,
        data_dir=data_dir,
        quiet=quiet,
        start_nodes=node_starter(config, count, data_dir, warm=not stock),
    )


def node_starter(
    config: Config, count: int, data_dir: Path | None, *, warm: bool = True
) -> Callable[[Deployment], None]:
    """Return what starts the nodes of an experiment on this machine.

    Args:
        config: The experiment.
        count: How many nodes.
        data_dir: Folder of the data sets. None: the default folder.
        warm: Whether they are warm nodes, or stock SuperNodes.

    Returns:
        A function of the deployment.
    """
    options = {}
    if data_dir:
        options["data-dir"] = str(data_dir.resolve())
    if ":" in config.table["task"]["name"]:
        options["task"] = config.table["task"]["name"]

    def start_nodes(deployment: Deployment) -> None:
        for partition in range(count):
            deployment.start_node(partition, warm=warm, options=options)

    return start_nodes


def finish(summary: Mapping[str, Any], folder: Path, quiet: bool, as_json: bool) -> None:
    """Print how a run has ended, and exit with the code for that."""
    if as_json:
        print(json.dumps(summary))
    elif not quiet:
        _print_summary(summary, folder)
    raise typer.Exit(EXIT_CODES[summary["status"]])


def _print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    line = f"{summary['label']}: {summary['status']} after {summary['rounds']} rounds"
    judged = summary["metric"]
    if judged["final"] is not None:
        line += f", {judged['name'].replace('_', ' ')} {judged['final']:.4f}"
    print(line)
    if summary["reason"]:
        print(f"reason: {summary['reason']}")
    print(f"folder: {folder}")
