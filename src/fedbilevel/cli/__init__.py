"""The command line: `fedbilevel run | compare | tune | check | report | list | export | serve | join | keys`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel import __version__, configure_process
from fedbilevel.core import checks

app = typer.Typer(
    name="fedbilevel",
    help="Federated bilevel optimization: run methods, compare them, report what they cost.",
    epilog="Example: fedbilevel compare digits --out runs/digits",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[
    str,
    typer.Argument(help="A shipped experiment (see `fedbilevel list experiments`) or a TOML file."),
]
Set = Annotated[
    list[str], typer.Option("--set", help="key=value with a dotted key, e.g. algorithm.lr_x=0.05.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data sets are (else $FEDBILEVEL_DATA, then the cache)."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Smoke = Annotated[
    bool, typer.Option(help="2 rounds, 2 clients, 32 samples, embedded data: does it run at all?")
]
Rounds = Annotated[int | None, typer.Option(help="Budget of communication rounds.")]
TaskName = Annotated[str | None, typer.Option(help="Another task, by name or as module:function.")]
DataName = Annotated[str | None, typer.Option(help="Another data set.")]
Seed = Annotated[
    int | None, typer.Option(help="Of the partition, the initial point and every draw.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Methods = Annotated[
    str | None, typer.Option(help="Comma-separated; the experiment's own list by default.")
]
Clients = Annotated[int | None, typer.Option(min=1, help="How many clients the federation has.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="A folder made by `fedbilevel keys`: encryption, and keys for nodes."),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Not encrypted, no keys, also outside this machine.")
]
AllOut = Annotated[
    Path | None, typer.Option(help="The folder of all runs; a new one below runs/ by default.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Runs at the same time; one a core by default.")
]


def _overrides(**given: Any) -> dict[str, Any]:
    names = {"task": "task.name", "data": "data.name"}
    return {names.get(key, key): value for key, value in given.items() if value is not None}


@app.command(
    epilog="Example: fedbilevel run digits --algorithm la-asfbo --set algorithm.lr_x=0.02 --out runs/first"
)
def run(
    experiment: Name,
    algorithm: Annotated[
        str | None, typer.Option(help="Which method (see `fedbilevel list algorithms`).")
    ] = None,
    task: TaskName = None,
    data: DataName = None,
    rounds: Rounds = None,
    seed: Seed = None,
    device: Device = None,
    set_: Set = [],  # noqa: B006  (typer wants it)
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; a new one below runs/ by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    smoke: Smoke = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json_: Json = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to the run's folder for TensorBoard.")
    ] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log to MLflow's tracking store.")
    ] = False,
    federation: Annotated[
        str,
        typer.Option(
            help="simulated (in this process), flower (real nodes, all on this machine), or ray: Flower's simulation."
        ),
    ] = "simulated",
    clients: Clients = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="flower: stock SuperNodes instead of warm nodes.")
    ] = False,
    keys: Keys = None,
) -> None:
    """Run one experiment with one method; the folder holds its config, metrics, checkpoint and summary."""
    from fedbilevel.cli.progress import Progress
    from fedbilevel.cli.track import trackers
    from fedbilevel.core import ranks
    from fedbilevel.experiments import config as configs
    from fedbilevel.experiments.runner import prepare_run
    from fedbilevel.runs.recorder import Recorder

    ranks.initialize()
    if ranks.rank():  # the first one speaks for all
        quiet = True
        json_ = tensorboard = mlflow = False
    if quiet or json_:
        logging.getLogger("fedbilevel").setLevel(logging.ERROR)
    place, table = configs.read(experiment)
    overrides = _overrides(task=task, data=data, rounds=rounds, seed=seed, device=device)

    def resolve(changes: dict[str, Any]) -> configs.Config:
        return configs.resolve(
            place,
            table,
            algorithm=algorithm,
            settings=set_,
            overrides={**overrides, **changes},
            smoke=smoke,
        )

    _check_federation(federation, stock, keys)
    config = _with_clients(resolve, clients)
    title = f"{Path(place).stem} {config.label} seed {config.experiment.seed}"
    folder = ranks.on_first_rank(lambda: out or _fresh(Path("runs", title.replace(" ", "-"))))
    if federation == "flower":
        summary = _run_flower(
            config, title, folder, clients, resume, data_dir, quiet or json_, stock, keys
        )
        _finish(summary, folder, quiet, json_)
    if federation == "ray":
        from fedbilevel.cli.federation import simulate_on_ray

        _finish(simulate_on_ray(config, folder, resume, data_dir), folder, quiet, json_)
    with ranks.fail_together():
        prepared = prepare_run(config, data_dir)
        recorder = Recorder(
            prepared, folder, config.table, resume, config.experiment.checkpoint_every
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: prepared.stop())
    with (
        Progress(title, config.experiment.rounds, quiet or json_) as progress,
        trackers(folder, config.table, tensorboard=tensorboard, mlflow=mlflow) as track,
    ):
        for metrics in recorder:
            progress.show(metrics)
            track(metrics)
    _finish(recorder.summary(), folder, quiet, json_)


def _check_federation(federation: str, stock: bool, keys: Path | None) -> None:
    """Refuse a federation that does not exist, or that the other options or torchrun rule out."""
    from fedbilevel.core import ranks

    checks.one_of("federation", federation, ("simulated", "flower", "ray"))
    if federation != "simulated" and ranks.size() > 1:
        raise ValueError(f"federation is {federation!r}; under torchrun it must be 'simulated'")
    if federation != "flower" and (stock or keys):
        raise ValueError("--stock and --keys are for --federation flower")


def _finish(summary: dict[str, Any], folder: Path, quiet: bool, json_: bool) -> None:
    if json_:
        print(json.dumps(summary))
    elif not quiet:
        _tell(summary, folder)
    raise typer.Exit({"completed": 0, "diverged": 3, "interrupted": 130}[summary["status"]])


def _with_clients(resolve: Callable[[dict[str, Any]], Any], clients: int | None) -> Any:
    """The config for so many clients: the task deals its data to them, and no more of them can take part."""
    config = resolve({})
    if clients is None:
        return config
    section = next(
        (name for name in ("data", "task") if "clients" in config.table.get(name, {})), None
    )
    changes: dict[str, Any] = {f"{section}.clients": clients} if section else {}
    taking_part = config.environment.participation
    if isinstance(taking_part, int) and taking_part > clients:
        changes["environment.participation"] = clients
    return resolve(changes)


def _run_flower(
    config: Any,
    title: str,
    folder: Path,
    clients: int | None,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    stock: bool,
    keys: Path | None,
) -> dict[str, Any]:
    """Everything on this machine; the nodes deal themselves their parts of the experiment's data."""
    from fedbilevel.cli.federation import serve
    from fedbilevel.deploy.flower.deployment import Deployment

    count = clients or len(config.load_task(data_dir).clients)
    own = {"data-dir": str(data_dir.resolve())} if data_dir else {}
    if ":" in config.table["task"]["name"]:
        own["task"] = config.table["task"]["name"]

    def start_nodes(deployment: Deployment) -> None:
        for partition in range(count):
            deployment.start_node(partition, warm=not stock, options=own)

    return serve(
        *(config, title, folder),
        deployment=Deployment(keys=keys),
        clients=count,
        resume=resume,
        data_dir=data_dir,
        quiet=quiet,
        start_nodes=start_nodes,
    )


@app.command(
    "serve",
    epilog="Example: fedbilevel serve digits --clients 3 --host 0.0.0.0 --keys keys --out runs/real",
)
def serve_(
    experiment: Name,
    clients: Clients = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the SuperLink.")] = 8000,
    keys: Keys = None,
    plain: Plain = False,
    algorithm: Annotated[
        str | None, typer.Option(help="Which method (see `fedbilevel list algorithms`).")
    ] = None,
    rounds: Rounds = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; a new one below runs/ by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")
    ] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run an experiment with clients on other machines: a Flower SuperLink with our server on it."""
    from fedbilevel.cli.federation import serve
    from fedbilevel.deploy.flower.deployment import LOOPBACK, Deployment, check_encryption
    from fedbilevel.experiments import config as configs

    check_encryption(host, keys is not None, plain)
    place, table = configs.read(experiment)
    overrides = _overrides(rounds=rounds, seed=seed)

    def resolve(changes: dict[str, Any]) -> configs.Config:
        return configs.resolve(
            place, table, algorithm=algorithm, settings=set_, overrides={**overrides, **changes}
        )

    config = _with_clients(resolve, clients)
    title = f"{Path(place).stem} {config.label} seed {config.experiment.seed}"
    folder = out or _fresh(Path("runs", title.replace(" ", "-")))
    if host not in LOOPBACK:
        logging.getLogger("fedbilevel").warning(
            "whoever reaches port %d can submit code to this SuperLink: keep it behind a proxy (docs/deploy.md)",
            port,
        )
    deployment = Deployment(host, port, keys)
    parts = {"resume": resume, "data_dir": data_dir, "quiet": quiet or json_}
    summary = serve(config, title, folder, deployment=deployment, clients=clients, **parts)  # type: ignore[arg-type]
    _finish(summary, folder, quiet, json_)


@app.command(
    epilog="Example: fedbilevel join 10.0.0.1:8000 --partition 0 --client-data hospital:load --ca ca.crt ..."
)
def join(
    address: Annotated[str, typer.Argument(help="host:port of the SuperLink.")],
    partition: Annotated[int, typer.Option(min=0, help="Which client this is, from 0 on.")],
    client_data: Annotated[
        str | None,
        typer.Option(
            help="module:function(partition) -> ClientData; else the task deals its own data."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="The only task, as module:function, that the experiment may name."),
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="One process that stays up, for tasks under seconds.")
    ] = False,
    ca: Annotated[
        Path | None, typer.Option(help="The authority of the server's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="This client's own private key.")] = None,
    plain: Plain = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "cpu",
    data_dir: DataDir = None,
) -> None:
    """Be a client of a federation, with data that stays here."""
    from fedbilevel.cli.federation import join as join_
    from fedbilevel.deploy.flower.client import Node
    from fedbilevel.deploy.flower.deployment import check_encryption, split_address
    from fedbilevel.experiments.parts import import_function

    host, _ = split_address(address)
    check_encryption(host, ca is not None or key is not None, plain)
    if client_data:
        import_function("client-data", client_data)  # what is wrong with it shows here, not in round 1
    node = Node(partition, client_data, task, str(data_dir) if data_dir else None, device)
    secured = ca is not None or key is not None
    join_(address, node, ca=ca, key=key, plain=not secured, warm=warm)


@app.command(epilog="Example: fedbilevel keys keys --clients 3 --host fl.example.org")
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them; what is there stays.")],
    clients: Annotated[int, typer.Option(min=0, help="How many client keys there should be.")] = 0,
    host: Annotated[
        list[str],
        typer.Option(help="A name or address by which clients reach the server; can be repeated."),
    ] = ["127.0.0.1", "localhost"],  # noqa: B006
    days: Annotated[int, typer.Option(min=1, help="For how long certificates are valid.")] = 365,
) -> None:
    """Make certificates for a server and a key for every client."""
    from fedbilevel.deploy.flower.keys import make

    for path in make(folder, clients, host, days):
        print(path)


def _tell(summary: dict[str, Any], folder: Path) -> None:
    accuracy = summary["final_test_accuracy"]
    ended = f"{summary['label']}: {summary['status']} after {summary['rounds']} rounds"
    print(ended + (f", test accuracy {accuracy:.4f}" if accuracy is not None else ""))
    if summary["reason"]:
        print(f"reason: {summary['reason']}")
    print(f"folder: {folder}")


def _fresh(folder: Path) -> Path:
    """A folder that does not exist yet: the name, or the name with the next free number."""
    if not folder.exists():
        return folder
    numbers = (folder.with_name(f"{folder.name}-{number}") for number in range(2, 10**6))
    return next(free for free in numbers if not free.exists())


@app.command(
    epilog="Example: fedbilevel compare digits --algorithms simfbo,la-asfbo --seeds 5 --out runs/digits"
)
def compare(
    experiment: Name,
    algorithms: Methods = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="How many seeds, counted from the experiment's.")
    ] = 3,
    task: TaskName = None,
    data: DataName = None,
    rounds: Rounds = None,
    device: Device = None,
    set_: Set = [],  # noqa: B006
    out: AllOut = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in --out.")
    ] = False,
    smoke: Smoke = False,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Run methods side by side over several seeds, rank them, and write report.html."""
    from fedbilevel.cli.compare import Comparison
    from fedbilevel.experiments import config as configs

    place, table = configs.read(experiment)
    names, jobs, threads = _side_by_side(table, algorithms, jobs)
    overrides = _overrides(task=task, data=data, rounds=rounds, device=device) | threads
    first = configs.resolve(
        place, table, algorithm=names[0], settings=set_, overrides=overrides, smoke=smoke
    )
    members = {}
    for name in names:
        for seed in range(first.experiment.seed, first.experiment.seed + seeds):
            each = [*set_, f"seed={seed}"]
            config = configs.resolve(
                place, table, algorithm=name, settings=each, overrides=overrides, smoke=smoke
            )
            members[f"{config.label}/seed-{seed}"] = config
    folder = out or _fresh(Path("runs", Path(place).stem))
    raise typer.Exit(Comparison(folder, members, data_dir, resume, jobs).run(quiet, json_))


def _side_by_side(
    table: dict[str, Any], algorithms: str | None, jobs: int | None
) -> tuple[list[str | None], int, dict[str, Any]]:
    """Which methods, how many runs at a time, and the override that leaves each its share of the cores."""
    names: list[str | None] = (
        [*algorithms.split(",")] if algorithms else [*table.get("compare", [])] or [None]
    )
    cores = os.cpu_count() or 1
    jobs = jobs or cores
    return (
        names,
        jobs,
        {"runtime.threads": table.get("runtime", {}).get("threads") or max(1, cores // jobs)},
    )


@app.command(
    epilog="Example: fedbilevel tune digits --algorithm simfbo --trials 8 --rounds 50 --out runs/tune"
)
def tune(
    experiment: Name,
    algorithm: Methods = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Runs a method, its own settings the first.")
    ] = 8,
    task: TaskName = None,
    data: DataName = None,
    rounds: Rounds = None,
    device: Device = None,
    set_: Set = [],  # noqa: B006
    out: AllOut = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the trials in --out.")
    ] = False,
    smoke: Smoke = False,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Find step sizes by the upper loss, with equal effort for every method, and write them to tuned.toml."""
    from fedbilevel.cli.tune import Tuning
    from fedbilevel.experiments import config as configs

    place, table = configs.read(experiment)
    names, jobs, threads = _side_by_side(table, algorithm, jobs)
    given = _overrides(task=task, data=data, rounds=rounds, device=device)
    # A trial that stopped at a test accuracy would have looked at the test data.
    overrides = {**given, **threads, "stop.test_accuracy": None}
    methods = {}
    for name in names:
        config = configs.resolve(
            place, table, algorithm=name, settings=set_, overrides=overrides, smoke=smoke
        )
        methods[config.label] = config
    # tuned.toml is the experiment as it was changed here, its budget and each method's own conditions as they were.
    common = {key: value for key, value in table.items() if key != "algorithms"}
    changed = configs.resolve(
        place, common, algorithm=names[0], settings=set_, overrides=given, smoke=smoke
    )
    own = {key: table.get(key) for key in ("algorithm", "algorithms", "rounds")}
    tuned = {**changed.experiment.model_dump(exclude_unset=True), **own}
    folder = out or _fresh(Path("runs", f"{Path(place).stem}-tune"))
    raise typer.Exit(
        Tuning(folder, methods, trials, tuned, data_dir, resume, jobs).run(quiet, json_)
    )


@app.command(epilog="Example: fedbilevel check digits --set data.partition=iid")
def check(
    experiment: Name,
    task: TaskName = None,
    data: DataName = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006
    data_dir: DataDir = None,
    json_: Json = False,
) -> None:
    """Is the problem well posed? Curvatures, differences between clients, warnings, and settings to start from."""
    from fedbilevel.cli.check import as_json, show
    from fedbilevel.core import ranks
    from fedbilevel.diagnostics import check as diagnosis
    from fedbilevel.experiments import config as configs
    from fedbilevel.experiments.runner import load_task

    place, table = configs.read(experiment)
    config = configs.resolve(
        place, table, settings=set_, overrides=_overrides(task=task, data=data, seed=seed)
    )
    loaded = load_task(config, data_dir)
    found = diagnosis.check(
        loaded.problem.to(ranks.local_device(config.experiment.device)),
        loaded.clients,
        config.environment,
        rounds=max(1, config.experiment.rounds),
        weights=config.experiment.weights,
        seed=config.experiment.seed,
        mode=config.experiment.runtime.mode,
    )
    if json_:
        print(as_json(found))
    else:
        show(found, place)


@app.command(epilog="Example: fedbilevel report runs/digits --figure digits.pdf")
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figure: Annotated[
        Path | None, typer.Option(help="Also a figure for a paper: .pdf or .png.")
    ] = None,
) -> None:
    """Write one self-contained page about runs, and on request a figure."""
    from fedbilevel.report import write_figure, write_page

    write_page(folders, out)
    print(f"page: {out}")
    if figure:
        write_figure(folders, figure)
        print(f"figure: {figure}")


@app.command(epilog="Example: fedbilevel export runs/first --out model.safetensors")
def export(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[
        Path, typer.Option(help="Where to write the trained module's state_dict (safetensors).")
    ],
) -> None:
    """Write what a run has learnt as one state_dict: x and y by the names of the module's parameters."""
    from safetensors.torch import save

    from fedbilevel.runs.load import load_run

    out.write_bytes(save(load_run(folder).state_dict()))
    print(f"written: {out}")


@app.command("list", epilog="Example: fedbilevel list algorithms --verbose")
def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, experiments or data.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the settings of algorithms and tasks.")
    ] = False,
) -> None:
    """What there is, one a line."""
    from fedbilevel.cli.listing import lines

    print("\n".join(lines(what, verbose)))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedbilevel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if processes > 1 and context.invoked_subcommand != "run":
        if os.environ.get("RANK") != "0":  # the first one speaks for all
            raise typer.Exit(2)
        command = f"fedbilevel {context.invoked_subcommand}"
        raise ValueError(
            f"torchrun has started {processes} processes; `{command}` is one, only `run` is shared out"
        )


ClickException: Any = typer.BadParameter.mro()[
    2
]  # click's own or the one newer releases of typer bring along


def main(arguments: list[str] | None = None) -> None:
    """Run a command. What goes wrong is one line on stderr and exit code 2; FEDBILEVEL_DEBUG=1 shows the traceback."""
    configure_process()
    try:
        given = sys.argv[1:] if arguments is None else arguments
        sys.exit(typer.main.get_command(app).main(given or ["--help"], standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if os.environ.get("FEDBILEVEL_DEBUG"):
            raise
        ranks = sys.modules.get("fedbilevel.core.ranks")
        if not (ranks and ranks.rank()):
            sys.stderr.write(f"error: {' '.join(_explain(error).split())}\n")
        sys.exit(2)


def _explain(error: Exception) -> str:
    from fedbilevel.federation import ClientError

    if isinstance(error, ClickException):
        return str(error.format_message())
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, TypeError, OSError, ClientError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (FEDBILEVEL_DEBUG=1 shows where)"
