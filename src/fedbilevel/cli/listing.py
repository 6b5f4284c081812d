"""`fedbilevel list`: the algorithms, tasks, experiments and data sets that there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli import names
from fedbilevel.core import checks

if TYPE_CHECKING:
    from fedbilevel.core.settings import Setting


def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, tasks, experiments or data.", autocompletion=lambda: LISTINGS
        ),
    ],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also list the settings of each.")
    ] = False,
) -> None:
    """List algorithms, tasks, experiments or data sets, one per line."""
    lines = LISTINGS[checks.one_of("what", what, LISTINGS)]()
    for name, line in lines.items():
        print(line)
        if verbose and what in DECLARATIONS:
            _print_settings(DECLARATIONS[what](name))


# The line of each entry, by its name.


def _algorithms() -> dict[str, str]:
    return {name: f"{name:17} {summary}" for name, summary in names.algorithms().items()}


def _tasks() -> dict[str, str]:
    return {name: f"{name:21} {summary}" for name, summary in names.task_summaries().items()}


def _experiments() -> dict[str, str]:
    from fedbilevel.experiments import config as configs

    lines = {}
    for name in names.experiments():
        _, table = configs.read(name)
        lines[name] = f"{name:16} {table.get('title', '')}"
    return lines


def _data() -> dict[str, str]:
    return {name: name for name in names.data()}


LISTINGS = {
    "algorithms": _algorithms,
    "tasks": _tasks,
    "experiments": _experiments,
    "data": _data,
}


# The class or function that declares the settings of an entry.


def _algorithm(name: str) -> Callable[..., object]:
    from fedbilevel import algorithms

    return algorithms.get(name)


def _task(name: str) -> Callable[..., object]:
    from fedbilevel import tasks

    return tasks.get(name)


DECLARATIONS = {"algorithms": _algorithm, "tasks": _task}


def _print_settings(declaration: Callable[..., object]) -> None:
    """Print one line per setting: its default as TOML has it, and the values allowed."""
    from fedbilevel.core.settings import declared_settings
    from fedbilevel.experiments.parts import RUN_ARGUMENTS

    settings = declared_settings(declaration, without=RUN_ARGUMENTS)
    width = max((len(_default(setting)) for setting in settings), default=0)
    for setting in settings:
        print(f"    {_default(setting):{width}}   {setting.rule.text}")


def _default(setting: Setting) -> str:
    from fedbilevel.core.settings import REQUIRED

    if setting.default is REQUIRED:
        return f"{setting.name} (required)"
    if setting.default is None:
        return f"{setting.name} (not set)"
    return f"{setting.name} = {json.dumps(setting.default, default=repr)}"
