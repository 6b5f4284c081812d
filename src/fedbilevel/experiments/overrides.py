"""Reduces an experiment to the table of one run: its algorithm, changed settings, a smoke test."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from fedbilevel.experiments.schema import (
    NAMED_TABLES,
    TASK_ARGUMENTS,
    ConfigError,
    Table,
    copy_table,
    expand_names,
    name_in,
)

# Arguments that make each task small and let it do without downloaded data, for smoke tests.
SMALL_TASKS: dict[str, Table] = {
    "hyper-representation": {
        "data": "digits",
        "clients": 2,
        "samples": 32,
        "model": "mlp",
        "head_layers": 1,
    },
    "hyper-cleaning": {"data": "digits", "clients": 2, "samples": 32},
    "regularization": {"data": "breast-cancer", "clients": 2, "samples": 32},
    "quadratic": {"clients": 2},
    "survival": {"irrelevant": 0},
    "mixture": {"owners": ["json", "xml"], "target": "json", "width": 8, "characters": 20_000},
    "few-shot": {
        "data": "digits",
        "clients": 2,
        "ways": 2,
        "model": "conv4",
        "hidden": 8,
        "episodes": 10,
    },
    "loss-tuning": {"data": "digits", "clients": 2, "samples": 32, "model": "mlp"},
}


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse a `--set` option.

    Args:
        text: "KEY=VALUE" with a dotted key. The value is in TOML; anything else is a string.

    Returns:
        The key and the value.

    Raises:
        ConfigError: If there is no key or no equals sign.

    Examples:
        >>> parse_setting("algorithm.lr_x=0.1")
        ('algorithm.lr_x', 0.1)
        >>> parse_setting("task=quadratic")
        ('task.name', 'quadratic')
    """
    key, separator, text_value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {text!r} is not key=value")
    try:
        value = tomllib.loads(f"value = {text_value}")["value"]
    except (ValueError, RecursionError):
        value = text_value.strip()
    if key in NAMED_TABLES and isinstance(value, str):
        key = f"{key}.name"
    return key, value


def reduce_to_run(
    source: str, table: Table, algorithm: str | None, changes: Sequence[tuple[str, Any]]
) -> Table:
    """Return the table of the run of one algorithm, with changed settings.

    The changes win over the algorithm's section `[algorithms.LABEL]`, which wins over the rest of
    the table. The algorithm is the one in the changes, or else `algorithm`, the table's own, the
    first of `compare`, or simfbo.

    Args:
        source: The experiment's name or file, for messages.
        table: The table of the experiment, which is left alone.
        algorithm: The name of an algorithm, or the label of a section.
        changes: Dotted keys with their new values.

    Returns:
        The table of the run.

    Raises:
        ConfigError: If a name is not a string, a label cannot be a folder's name, or a whole number
            does not fit in 64 bits.
    """
    changed: Table = {}
    for key, value in changes:
        _set(changed, key, value)
    expand_names(source, changed)
    try:
        table = copy_table(table)
    except (OverflowError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from None
    for key, value in changes:
        if key.startswith("algorithms."):  # before the section is merged
            _set(table, key, value)
    compared = [*table.get("compare", []), "simfbo"]
    label = name_in(changed, "algorithm") or algorithm or name_in(table, "algorithm") or compared[0]
    name = _merge_section(source, table, label, name_in(changed, "task"))
    for key, value in changes:
        if key == "algorithm.name":
            value = name  # the change may have named a label
        _set(table, key, value)
    return table


def _merge_section(source: str, table: Table, label: str, task: str | None) -> str:
    """Merge the section under a label into the tables of the run, in place.

    `task` is the name of another task than the table's, if one was asked for. Returns the name of
    the algorithm.
    """
    settings = dict(table.get("algorithms", {}).get(label, {}))
    name: str = settings.pop("algorithm", label)
    conditions = {key: settings.pop(key, {}) for key in ("environment", "task", "data")}
    task = task or name_in(conditions, "task") or name_in(table, "task")
    for tables in (table, conditions):
        if name_in(tables, "task") not in (None, task):  # its settings are for another task
            tables.update(task={}, data={})
    if name_in(table, "algorithm") not in (None, name):  # its settings are for another algorithm
        table["algorithm"] = {}
    if name_in(table, "algorithm") != name:
        table["label"] = None
    if label != name:
        if "/" in label or label in (".", ".."):
            raise ConfigError(
                f"{source}: the label {label!r} would name a folder elsewhere; "
                "it must not hold a '/'"
            )
        table["label"] = label
    for key, special in conditions.items():
        table[key] = {**table.get(key, {}), **special}
    table["algorithm"] = {**table.get("algorithm", {}), **settings, "name": name}
    return name


def _set(table: Table, key: str, value: Any) -> None:
    """Set the value under a dotted key, in place."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(table.get(parent), dict):
            table[parent] = {}
        table = table[parent]
    table[last] = value


def shrink(table: Table, rounds: int = 2) -> Table:
    """Return the table of a smoke test: a run that takes about a second on any machine.

    It has two clients, and 32 samples of data that come with a package.

    Args:
        table: The table of the run.
        rounds: The budget of rounds.
    """
    small_task = SMALL_TASKS.get(name_in(table, "task") or "", {})
    environment = {**table["environment"], "participation": 1.0, "min_replies": 1}
    if isinstance(environment.get("local_steps"), dict):
        environment["local_steps"] = 1
    if "ways" in small_task:  # a batch is an episode, with one sample per class
        environment["batch_size"] = small_task["ways"]
    if isinstance(environment.get("stragglers"), dict):
        environment["stragglers"] = {**environment["stragglers"], "clients": 1}
    data = dict(table.get("data", {}))
    task = dict(table.get("task", {}))
    task.pop("new_clients", None)  # both clients train
    for key in table.get("data", {}):
        if TASK_ARGUMENTS.get(key, key) in small_task:
            del data[key]
    return {
        **table,
        "rounds": rounds,
        "every": 1,
        "stop": {},
        "environment": environment,
        "task": {**task, **small_task},
        "data": data,
    }
