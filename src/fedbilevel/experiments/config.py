"""Experiments: TOML files that say what to run, checked key by key; resolved, one says exactly one run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbilevel import algorithms, tasks
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks, devices, schedules
from fedbilevel.core.settings import arguments, build, declared
from fedbilevel.federation import delays, stages
from fedbilevel.federation.conduct import Conduct
from fedbilevel.federation.environment import Environment

T = TypeVar("T")
Table = dict[str, Any]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GIVEN = ("seed", "data_dir")  # what a task gets from the run, not from its table
NAMED = ("task", "data", "algorithm")  # tables for which their name alone may stand
SMOKE: dict[str, Table] = {  # what makes a task small, by its name
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


class ConfigError(ValueError):
    """What is wrong with an experiment, in one sentence."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Every(Strict):
    """Evaluate when so much was spent; a number alone counts rounds."""

    rounds: Annotated[int, Field(ge=1)] | None = None
    bytes: Amount | None = None
    samples: Amount | None = None
    gradients: Amount | None = None
    flops: Amount | None = None
    virtual_s: Amount | None = None
    wall_s: Amount | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return value if isinstance(value, dict) else {"rounds": value}

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"it must have exactly one of {', '.join(type(self).model_fields)}")
        return self


class Stop(Strict):
    """Further ends of a run: a budget of something else than rounds, or a test accuracy."""

    bytes: Amount | None = None
    samples: Amount | None = None
    gradients: Amount | None = None
    flops: Amount | None = None
    virtual_s: Amount | None = None
    wall_s: Amount | None = None
    test_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None


class Runtime(Strict):
    """How clients run; recorded because another choice rounds differently. A real client takes no part in the choice of
    mode, memory and compile: it runs alone, as if by mode = "loop"."""

    mode: Literal["stack", "loop"] = "stack"
    memory: Annotated[int, Field(ge=1)] | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None


class Section(BaseModel):
    """What applies when one algorithm runs: its settings and conditions; under a label of its own, also which it is."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    algorithm: str | None = None
    environment: Table = {}
    task: Table = {}
    data: Table = {}


class Experiment(Strict):
    """A file in `experiments/`, or a resolved config.toml. `algorithms` and `compare` serve to choose from."""

    title: str = ""
    label: str | None = None
    task: Table = {}
    data: Table = {}
    algorithm: Table = {}
    algorithms: dict[str, Section] = {}
    compare: list[str] = []
    environment: Table = {}
    rounds: Annotated[int, Field(ge=0)] = 100
    every: Every = Every(rounds=1)
    stop: Stop = Stop()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    weights: Literal["uniform", "samples"] = "uniform"
    device: str = "cpu"
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    runtime: Runtime = Runtime()
    conduct: Table = {}


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, resolved: what it is made of, and the table that says so."""

    table: Table
    experiment: Experiment
    algorithm: Algorithm
    environment: Environment
    load_task: Callable[[Path | None], tasks.Task]  # given where the data is
    conduct: Conduct

    @property
    def label(self) -> str:
        """The method's name, or that of its section in the experiment."""
        return self.experiment.label or self.algorithm.name

    @property
    def limits(self) -> dict[str, float]:
        stop = self.experiment.stop.model_dump(exclude_none=True, exclude={"test_accuracy"})
        return {"rounds": self.experiment.rounds, **stop}

    @property
    def every(self) -> dict[str, float]:
        return self.experiment.every.model_dump(exclude_none=True)


def names() -> list[str]:
    """The experiments that come with the package."""
    return sorted(file.name[:-5] for file in _shipped().iterdir() if file.name.endswith(".toml"))


def read(experiment: str) -> tuple[str, Table]:
    """The place and the table of a shipped experiment or of a TOML file."""
    path = Path(experiment)
    if experiment in names():
        place, text = experiment, (_shipped() / f"{experiment}.toml").read_text("utf-8")
    elif path.suffix == ".toml" or path.exists():
        place, text = str(path), _text(path)
    else:
        hint = checks.suggestion(experiment, names())
        raise ConfigError(
            f"experiment {experiment!r} is neither a file nor one of {', '.join(names())}{hint}"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None
    _check(place, _long_form(place, table))
    return place, table


def resolve(
    place: str,
    table: Table,
    *,
    algorithm: str | None = None,
    settings: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
    smoke: bool = False,
) -> Config:
    """The one run that a table, a choice of algorithm and `key=value` settings describe; the latter win."""
    chosen = [*(overrides or {}).items(), *map(_setting, settings)]
    asked: Table = {}
    for key, value in chosen:
        _put(asked, key, value)
    _long_form(place, asked)
    table = _copy(table)
    for key, value in chosen:  # a section's settings must be there before it is chosen
        if key.startswith("algorithms."):
            _put(table, key, value)
    compared = [*table.get("compare", []), "simfbo"]
    label = _name(asked, "algorithm") or algorithm or _name(table, "algorithm") or compared[0]
    name = _choose(place, table, label, _name(asked, "task"))
    for key, value in chosen:
        _put(table, key, name if key == "algorithm.name" else value)
    experiment = _check(place, table)
    return _build(place, _check(place, _smoke(table)) if smoke else experiment)


def _choose(place: str, table: Table, label: str, asked_task: str | None) -> str:
    """Merge the section under `label` into the tables of the run; returns the algorithm's name."""
    own = dict(table.get("algorithms", {}).get(label, {}))
    name: str = own.pop("algorithm", label)
    conditions = {section: own.pop(section, {}) for section in ("environment", "task", "data")}
    task = asked_task or _name(conditions, "task") or _name(table, "task")
    for tables in (table, conditions):
        # The settings of one task are not those of another.
        if _name(tables, "task") not in (None, task):
            tables.update(task={}, data={})
    if _name(table, "algorithm") not in (None, name):
        table["algorithm"] = {}
    if _name(table, "algorithm") != name:
        table["label"] = None
    if label != name:
        if "/" in label or label in (".", ".."):
            refusal = "would name a folder elsewhere; it must not hold a '/'"
            raise ConfigError(f"{place}: the label {label!r} {refusal}")
        table["label"] = label
    for section, special in conditions.items():
        table[section] = {**table.get(section, {}), **special}
    table["algorithm"] = {**table.get("algorithm", {}), **own, "name": name}
    return name


def _build(place: str, experiment: Experiment) -> Config:
    """Check every table against what it configures, and fill in the defaults."""
    device = _sentence(place, "", lambda: devices.chosen(experiment.device))
    experiment = experiment.model_copy(update={"device": device})
    name, load, full, filled = _options(
        place, experiment
    )  # first: an own task may bring its own algorithm
    chosen = dict(experiment.algorithm)
    method = _method(place, "algorithm", chosen.pop("name"), chosen)
    environment = _built(place, Environment, "environment", experiment.environment)
    for other, section in experiment.algorithms.items():
        _method(place, f"algorithms.{other}", section.algorithm or other, section.model_extra or {})
        conditions = {**experiment.environment, **section.environment}
        _built(place, Environment, f"algorithms.{other}.environment", conditions)
    for other in experiment.compare:
        if other not in experiment.algorithms:
            _sentence(place, "compare: ", functools.partial(algorithms.get, other))
    runtime = experiment.runtime.model_dump(exclude_none=True)
    table = {
        **experiment.model_dump(exclude_none=True, exclude={"algorithms", "compare", "data"}),
        **filled,
        "algorithm": {"name": method.name, **_written(method)},
        "environment": _environment_table(environment),
        "runtime": {
            "threads": torch.get_num_threads(),
            "memory": devices.stack_bytes(device),
            **runtime,
        },
    }
    conduct = _built(place, Conduct, "conduct", experiment.conduct)
    if not experiment.conduct:
        del table["conduct"]
    takes = inspect.signature(load).parameters

    def load_task(data_dir: Path | None) -> tasks.Task:
        values = {"seed": experiment.seed, "data_dir": data_dir}
        given = {key: values[key] for key in GIVEN if key in takes}
        task = _sentence(place, f"task {name}: ", lambda: load(**full, **given))
        if not isinstance(task, tasks.Task):
            raise ConfigError(
                f"{place}: task {name} made a {type(task).__name__}; it must make a fedbilevel.tasks.Task"
            )
        return task

    return Config(table, experiment, method, environment, load_task, conduct)


def _options(
    place: str, experiment: Experiment
) -> tuple[str, Callable[..., tasks.Task], Table, Table]:
    """The task's name, its function, what to call it with, and the tables that say so."""
    options = dict(experiment.task)
    name = options.pop("name", None)
    load = _sentence(place, "", lambda: _task(name))
    given = {"data" if key == "name" else key: value for key, value in experiment.data.items()}
    for key in given.keys() & options.keys():
        raise ConfigError(f"{place}: {key} is given in [task] and in [data]; one of them is enough")
    known = _sentence(place, f"task {name}: ", lambda: declared(load, without=GIVEN))
    keys = {key: f"data.{'name' if key == 'data' else key}" for key in given}
    own = _sentence(place, "", lambda: arguments(known, "task", {**given, **options}, keys))
    full = {**{setting.name: setting.default for setting in known}, **own}
    data = {key: full[key] for key in given if key != "data"}
    if "data" in full:
        data = {"name": full["data"], **data}
    task = {
        "name": name,
        **{key: value for key, value in full.items() if key not in (*given, "data")},
    }
    return name, load, full, {"task": task, "data": data} if data else {"task": task}


def _method(place: str, section: str, name: str, table: Table) -> Algorithm:
    kind: type[Algorithm] = _sentence(place, f"[{section}] ", lambda: algorithms.get(name))
    return _built(place, kind, section, table)


def _built(place: str, kind: type[T], section: str, table: Table) -> T:
    """What a section describes."""
    return _sentence(place, "", lambda: build(kind, section, table))  # type: ignore[no-any-return]


def _task(name: Any) -> Callable[..., tasks.Task]:
    """A task's function, by its name or as module:function."""
    if name is None:
        raise ValueError(
            f"task is missing; it must name a task ({', '.join(tasks.names())}) or be module:function"
        )
    if ":" not in name:
        return tasks.get(name)
    return imported("task", name)


def imported(what: str, name: str) -> Callable[..., Any]:
    """What module:function names; the module may lie in the folder one is in."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # and it stays: what the module imports later may lie beside it
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(f"{what} is {name!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{what} is {name!r}, which is not a function")
    return found  # type: ignore[no-any-return]


def _environment_table(environment: Environment) -> Table:
    table = {key: value for key, value in _written(environment).items() if value not in (None, ())}
    if isinstance(environment.local_steps, list):
        table["local_steps"] = {"clients": environment.local_steps}
    return {**table, "batch_size": environment.batch_size or "full"}


def _written(value: Any) -> Any:
    """A setting, or an object with settings, as a resolved experiment holds it."""
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [_written(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    table = {name: _written(getattr(value, name)) for name in names}
    if isinstance(value, stages.Stage):
        return {"stage": value.name, **table}
    for choice, kinds in (("schedule", schedules.KINDS), ("model", delays.MODELS)):
        for name, kind in kinds.items():
            if isinstance(value, kind):
                return {choice: name, **table}
    return table


def _check(place: str, table: Table) -> Experiment:
    """A table as an experiment; the first thing wrong becomes one sentence."""
    try:
        return Experiment.model_validate_json(json.dumps(_copy(table), default=str))
    except ValidationError as error:
        # An unknown key may be a misspelt one, and explain what else is wrong.
        worst = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(f"{place}: {_explained(worst)}") from None
    except (OverflowError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _explained(error: Any) -> str:
    parts = [part for part in error["loc"] if isinstance(part, str)]
    path = ".".join(parts)
    if error["type"] == "extra_forbidden":
        model: Any = Experiment
        for parent in parts[:-1]:
            model = model.model_fields[parent].annotation
        return checks.unknown(path, model.model_fields)
    text = error["msg"].removeprefix("Value error, ")
    return f"{path} is {error['input']!r:.200}; {text[:1].lower()}{text[1:]}"


def _sentence(place: str, section: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{place}: {section}{error}") from error
    except Exception as error:  # of a task of the reader's own
        raise ConfigError(f"{place}: {section}{type(error).__name__}: {error}") from error


def _smoke(table: Table) -> Table:
    """Two rounds, two clients, 32 samples, embedded data: what can be run anywhere in a second."""
    small = SMOKE.get(_name(table, "task") or "", {})
    conditions = {**table["environment"], "participation": 1.0, "min_replies": 1}
    if isinstance(conditions.get("local_steps"), dict):
        conditions["local_steps"] = 1
    if "ways" in small:  # a batch is an episode
        conditions["batch_size"] = small["ways"]
    if isinstance(conditions.get("stragglers"), dict):
        conditions["stragglers"] = {**conditions["stragglers"], "clients": 1}
    return {
        **table,
        "rounds": 2,
        "every": 1,
        "stop": {},
        "environment": conditions,
        "task": {**table.get("task", {}), **small},
        "data": {
            k: v
            for k, v in table.get("data", {}).items()
            if ("data" if k == "name" else k) not in small
        },
    }


def _setting(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {text!r} is not key=value")
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        found = value.strip()  # a bare word is a string
    return f"{key}.name" if key in NAMED and isinstance(found, str) else key, found


def _put(table: Table, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(table.get(parent), dict):
            table[parent] = {}
        table = table[parent]
    table[last] = value


def _long_form(place: str, table: Table) -> Table:
    """`task = "name"` stands for a table with that name; the same for algorithm and data."""
    for key in NAMED:
        if isinstance(table.get(key), str):
            table[key] = {"name": table[key]}
        if not isinstance(_name(table, key), str | None):
            raise ConfigError(f"{place}: {key}.name is {_name(table, key)!r}; it must be a string")
    return table


def _name(table: Table, key: str) -> Any:
    found = table.get(key)
    return found.get("name") if isinstance(found, dict) else None


def _copy(value: Any, key: str = "") -> Any:
    """A copy whose whole numbers are TOML's: 64 bits (Python's reader lets longer ones through)."""
    if isinstance(value, dict):
        return {name: _copy(item, f"{key}.{name}" if key else name) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, key) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OverflowError(f"{key} is {value}; a whole number must fit in 64 bits")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; an experiment is a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from None


def _shipped() -> Any:
    return resources.files("fedbilevel") / "experiments" / "library"
