"""What `fedbilevel list` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fedbilevel import algorithms, data, tasks
from fedbilevel.core import checks
from fedbilevel.core.settings import REQUIRED, Setting, declared_settings
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.parts import RUN_ARGUMENTS

# A line, and what declares settings, if anything does.
Entry = tuple[str, Callable[..., Any] | None]


def lines(what: str, verbose: bool) -> list[str]:
    found = []
    for line, of in LISTINGS[checks.one_of("what", what, LISTINGS)]():
        found.append(line)
        if verbose and of is not None:
            found += _settings(of)
    return found


def _algorithms() -> list[Entry]:
    found: list[Entry] = []
    for name in algorithms.names():
        kind = algorithms.get(name)
        description = (kind.__doc__ or "").strip().split("\n")[0]
        found.append((f"{name:17} {description}", kind))
    return found


def _tasks() -> list[Entry]:
    return [(name, tasks.get(name)) for name in tasks.names()]


def _experiments() -> list[Entry]:
    titles = {name: configs.read(name)[1].get("title", "") for name in configs.names()}
    return [(f"{name:16} {title}", None) for name, title in titles.items()]


def _data() -> list[Entry]:
    return [(name, None) for name in data.names()]


LISTINGS = {
    "algorithms": _algorithms,
    "tasks": _tasks,
    "experiments": _experiments,
    "data": _data,
}


def _settings(of: Callable[..., Any]) -> list[str]:
    """One line per setting: its default as one would write it in TOML, and what is allowed."""
    found = declared_settings(of, without=RUN_ARGUMENTS)
    width = max((len(_default(setting)) for setting in found), default=0)
    return [f"    {_default(setting):{width}}   {setting.rule.text}" for setting in found]


def _default(setting: Setting) -> str:
    if setting.default is REQUIRED:
        return f"{setting.name} (required)"
    if setting.default is None:
        return f"{setting.name} (not set)"
    return f"{setting.name} = {json.dumps(setting.default, default=repr)}"
