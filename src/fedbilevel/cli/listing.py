"""`fedbilevel list`: the algorithms, tasks, experiments and data sets that there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.core import checks

if TYPE_CHECKING:
    from fedbilevel.core.settings import Setting

# A line, and the class or function that declares the settings of the entry, if it has some.
Entry = tuple[str, Callable[..., object] | None]


def list_(
    what: Annotated[str, typer.Argument(help="algorithms, tasks, experiments or data.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also list the settings of each.")
    ] = False,
) -> None:
    """List algorithms, tasks, experiments or data sets, one per line."""
    list_entries = LISTINGS[checks.one_of("what", what, LISTINGS)]
    for line, declaration in list_entries():
        print(line)
        if verbose and declaration is not None:
            _print_settings(declaration)


def _algorithms() -> list[Entry]:
    from fedbilevel import algorithms

    entries: list[Entry] = []
    for name in algorithms.names():
        algorithm = algorithms.get(name)
        summary = (algorithm.__doc__ or "").strip().split("\n")[0]
        entries.append((f"{name:17} {summary}", algorithm))
    return entries


def _tasks() -> list[Entry]:
    from fedbilevel import tasks

    return [(name, tasks.get(name)) for name in tasks.names()]


def _experiments() -> list[Entry]:
    from fedbilevel.experiments import config as configs

    entries: list[Entry] = []
    for name in configs.names():
        _, table = configs.read(name)
        entries.append((f"{name:16} {table.get('title', '')}", None))
    return entries


def _data() -> list[Entry]:
    from fedbilevel import data

    return [(name, None) for name in data.names()]


LISTINGS = {
    "algorithms": _algorithms,
    "tasks": _tasks,
    "experiments": _experiments,
    "data": _data,
}


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
