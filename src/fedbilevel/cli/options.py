"""Arguments and options that several commands share."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli import names

ExperimentName = Annotated[
    str,
    typer.Argument(
        help="An experiment of the package (see `fedbilevel list experiments`) or a TOML file.",
        autocompletion=names.experiments,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option("--set", help="Change a setting: key=value, e.g. algorithm.lr_x=0.05."),
]
AlgorithmName = Annotated[
    str | None,
    typer.Option(
        help="The algorithm to run (see `fedbilevel list algorithms`).",
        autocompletion=names.algorithms,
    ),
]
AlgorithmNames = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated algorithms; by default those that the experiment lists.",
        autocompletion=names.algorithm_list,
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        help="Use another task, by name or as module:function.", autocompletion=names.tasks
    ),
]
DataName = Annotated[
    str | None, typer.Option(help="Use another data set.", autocompletion=names.data)
]
Rounds = Annotated[int | None, typer.Option(help="Budget of communication rounds.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the partition, the initial point and every draw.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Smoke = Annotated[
    bool,
    typer.Option(
        help="Only see whether it runs: 2 rounds (unless --rounds is given), 2 clients, "
        "32 samples, embedded data."
    ),
]


def _check_data_dir(folder: Path | None) -> Path | None:
    if folder is not None and not folder.expanduser().is_dir():
        raise ValueError(f"--data-dir is {str(folder)!r}; it must be a folder that exists")
    return folder


DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the data sets; else $FEDBILEVEL_DATA, then the cache.",
        callback=_check_data_dir,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
RunFolder = Annotated[
    Path | None, typer.Option(help="Run folder; by default a new folder below runs/.")
]
ComparisonFolder = Annotated[
    Path | None, typer.Option(help="Folder of all runs; by default a new folder below runs/.")
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="How many runs at the same time; one per core by default."),
]
Clients = Annotated[int | None, typer.Option(min=1, help="Number of clients in the federation.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="Folder made by `fedbilevel keys`: encrypts, and authenticates nodes."),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain", help="Allow connections to other machines without encryption and keys."
    ),
]


def given_overrides(**options: object) -> dict[str, object]:
    """Return the options that were given, by the dotted key of the experiment that each changes."""
    keys = {"task": "task.name", "data": "data.name"}
    return {keys.get(name, name): value for name, value in options.items() if value is not None}


def called_command() -> str:
    """Return the command line of this process, for a page that it writes."""
    return shlex.join(["fedbilevel", *sys.argv[1:]])


def say_if_nothing_to_resume(folder: Path, members: Iterable[str] = ("",)) -> None:
    """Say that `--resume` starts from the beginning if no member has run in the folder."""
    from fedbilevel.runs.folder import holds_run  # imports little

    if not any(holds_run(folder / name) for name in members):
        logging.getLogger("fedbilevel").warning(
            "%s holds no run to resume; starting from the beginning", folder
        )


def unused_folder(folder: Path) -> Path:
    """Return the folder if it does not exist, else its name with the next free number."""
    candidate = folder
    number = 2
    while candidate.exists():
        candidate = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return candidate
