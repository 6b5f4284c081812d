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
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from fedbilevel import algorithms, delays, devices, schedules, tasks
from fedbilevel.algorithms import Algorithm
from fedbilevel.deploy.conduct import Conduct
from fedbilevel.environment import Environment

Table = dict[str, Any]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SCHEDULES = {"power": schedules.Power, "cosine": schedules.Cosine}
NAMED = ("task", "data", "algorithm")  # tables for which their name alone may stand
SMOKE: dict[str, Table] = {  # what makes a task small, by its name
    "hyper-representation": {"data": "digits", "clients": 2, "samples": 32, "model": "mlp", "head_layers": 1},
    "hyper-cleaning": {"data": "digits", "clients": 2, "samples": 32},
    "regularization": {"data": "breast-cancer", "clients": 2, "samples": 32},
    "quadratic": {"clients": 2},
    "few-shot": {"data": "digits", "clients": 2, "ways": 2, "model": "conv4", "hidden": 8, "episodes": 10},
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
        hint = _suggest(experiment, names())
        raise ConfigError(f"experiment {experiment!r} is neither a file nor one of {', '.join(names())}{hint}")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None
    _check(place, "", Experiment, _long_form(place, table))
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
    label = (
        _name(asked, "algorithm") or algorithm or _name(table, "algorithm") or [*table.get("compare", []), "simfbo"][0]
    )
    own = dict(table.get("algorithms", {}).get(label, {}))
    name = own.pop("algorithm", label)
    conditions = {section: own.pop(section, {}) for section in ("environment", "task", "data")}
    task = _name(asked, "task") or _name(conditions, "task") or _name(table, "task")
    if _name(table, "task") not in (None, task):  # the settings of one are not those of another
        table |= {"task": {}, "data": {}}
    if _name(conditions, "task") not in (None, task):
        conditions |= {"task": {}, "data": {}}
    if _name(table, "algorithm") not in (None, name):
        table["algorithm"] = {}
    if _name(table, "algorithm") != name:
        table["label"] = None
    if label != name:
        if "/" in label or label in (".", ".."):
            raise ConfigError(f"{place}: the label {label!r} would name a folder elsewhere; it must not hold a '/'")
        table["label"] = label
    table |= {section: {**table.get(section, {}), **special} for section, special in conditions.items()}
    table["algorithm"] = {**table.get("algorithm", {}), **own, "name": name}
    for key, value in chosen:
        _put(table, key, value if key != "algorithm.name" else name)
    experiment = _check(place, "", Experiment, table)
    return _build(place, _check(place, "", Experiment, _smoke(table)) if smoke else experiment)


def _build(place: str, experiment: Experiment) -> Config:
    """Check every table against what it configures, and fill in the defaults."""
    device = _sentence(place, "", lambda: devices.chosen(experiment.device))
    experiment = experiment.model_copy(update={"device": device})
    name, load, full, filled = _options(place, experiment)  # first: an own task may bring its own algorithm
    chosen = dict(experiment.algorithm)
    method, settings = _method(place, "algorithm", chosen.pop("name"), chosen)
    environment = _environment(place, "environment", experiment.environment)
    for other, section in experiment.algorithms.items():
        _method(place, f"algorithms.{other}", section.algorithm or other, section.model_extra or {})
        _environment(place, f"algorithms.{other}.environment", {**experiment.environment, **section.environment})
    for other in experiment.compare:
        if other not in experiment.algorithms:
            _sentence(place, "compare: ", functools.partial(algorithms.get, other))
    runtime = experiment.runtime.model_dump(exclude_none=True)
    table = {
        **experiment.model_dump(exclude_none=True, exclude={"algorithms", "compare", "data"}),
        **filled,
        "algorithm": {"name": method.name, **settings},
        "environment": _environment_table(environment),
        "runtime": {"threads": torch.get_num_threads(), "memory": devices.stack_bytes(device), **runtime},
    }
    conduct = _object(place, "conduct", Conduct, experiment.conduct)
    if not experiment.conduct:
        del table["conduct"]
    takes = inspect.signature(load).parameters

    def load_task(data_dir: Path | None) -> tasks.Task:
        given = {"seed": experiment.seed, "data_dir": data_dir}
        arguments = {**full, **{key: value for key, value in given.items() if key in takes}}
        task = _sentence(place, f"task {name}: ", lambda: load(**arguments))
        if not isinstance(task, tasks.Task):
            raise ConfigError(
                f"{place}: task {name} made a {type(task).__name__}; it must make a fedbilevel.tasks.Task"
            )
        return task

    return Config(table, experiment, method, environment, load_task, conduct)


def _options(place: str, experiment: Experiment) -> tuple[str, Callable[..., tasks.Task], Table, Table]:
    """The task's name, its function, what to call it with, and the tables that say so."""
    options, data = dict(experiment.task), dict(experiment.data)
    name = options.pop("name", None)
    load = _sentence(place, "", lambda: _task(name))
    given = {"data" if key == "name" else key: value for key, value in data.items()}
    for key in given.keys() & options.keys():
        raise ConfigError(f"{place}: {key} is given in [task] and in [data]; one of them is enough")
    places = {key: f"data.{'name' if key == 'data' else key}" for key in given}
    model = _sentence(place, f"task {name}: ", lambda: _model(load, without=("seed", "data_dir")))
    full = _check(place, "task", model, {**given, **options}, places)
    source = {"name": full["data"]} if "data" in full else {}
    written = {**source, **{key: full[key] for key in given if key != "data"}}
    task = {"name": name, **{key: value for key, value in full.items() if key not in (*given, "data")}}
    return name, load, full, {"task": task, **({"data": written} if written else {})}


def _method(place: str, section: str, name: str, table: Table) -> tuple[Algorithm, Table]:
    """An algorithm, and its settings with the defaults filled in."""
    kind = _sentence(place, f"[{section}] ", lambda: algorithms.get(name))
    settings = _check(place, section, _model(kind), table)
    steps = {key: _schedule(place, f"{section}.{key}", value) for key, value in settings.items()}
    return _sentence(place, f"[{section}] ", lambda: kind(**steps)), settings


def _task(name: Any) -> Callable[..., tasks.Task]:
    """A task's function, by its name or as module:function."""
    if name is None:
        raise ValueError(f"task is missing; it must name a task ({', '.join(tasks.names())}) or be module:function")
    if ":" not in name:
        return tasks.get(name)
    return imported("task", name)


def imported(what: str, name: str) -> Callable[..., Any]:
    """What module:function names; the module may lie in the folder one is in."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # and it stays: what the module imports later may lie beside it
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(f"{what} is {name!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{what} is {name!r}, which is not a function")
    return found  # type: ignore[no-any-return]


def _environment(place: str, section: str, table: Table) -> Environment:
    known = [f.name for f in dataclasses.fields(Environment)]
    for key in table:
        if key not in known:
            raise ConfigError(_unknown(place, f"{section}.{key}", known))
    meant = dict(table)
    if "local_steps" in table:
        meant["local_steps"] = _local_steps(place, f"{section}.local_steps", table["local_steps"])
    if table.get("batch_size") == "full":
        meant["batch_size"] = None
    for key, kind in (("stragglers", delays.Stragglers), ("faults", delays.Faults)):
        if key in table:
            meant[key] = _object(place, f"{section}.{key}", kind, table[key])
    if "delay" in table:
        meant["delay"] = _kind(place, f"{section}.delay", "model", delays.MODELS, table["delay"])
    return _sentence(place, f"[{section}] ", lambda: Environment(**meant))  # type: ignore[no-any-return]


def _local_steps(place: str, key: str, steps: Any) -> Any:
    """In TOML a two-entry array is a range; one entry a client is {clients = [...]}."""
    if isinstance(steps, list) and len(steps) == 2:
        return tuple(steps)
    if isinstance(steps, dict) and list(steps) == ["clients"] and isinstance(steps["clients"], list):
        return steps["clients"]
    if isinstance(steps, (list, dict)):
        raise ConfigError(f"{place}: {key} is {steps}; it must be a number, [low, high] or {{clients = [...]}}")
    return steps


def _environment_table(environment: Environment) -> Table:
    table = {key: value for key, value in dataclasses.asdict(environment).items() if value is not None}
    for model, kind in delays.MODELS.items():
        if isinstance(environment.delay, kind):
            table["delay"] = {"model": model, **table["delay"]}
    if isinstance(environment.local_steps, list):
        table["local_steps"] = {"clients": environment.local_steps}
    return {**table, "batch_size": "full" if environment.batch_size is None else environment.batch_size}


def _schedule(place: str, key: str, value: Any) -> Any:
    """A table with a `schedule` is a schedule."""
    return _kind(place, key, "schedule", SCHEDULES, value) if isinstance(value, dict) else value


def _kind(place: str, key: str, choice: str, kinds: Mapping[str, Callable[..., Any]], value: Any) -> Any:
    """What a table describes that says in `choice` which of several kinds it is."""
    if not isinstance(value, dict) or str(value.get(choice)) not in kinds:
        allowed = " or ".join(map(repr, kinds))
        raise ConfigError(f"{place}: {key} is {value}; a table must have {choice} = {allowed}")
    return _object(place, key, kinds[value[choice]], {k: v for k, v in value.items() if k != choice})


def _object(place: str, key: str, kind: Callable[..., Any], table: Any) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: {key} is {table!r}; it must be a table")
    settings = _check(place, key, _model(kind), table)
    return _sentence(place, f"[{key}] ", lambda: kind(**settings))


def _model(of: Callable[..., Any], without: Iterable[str] = ()) -> type[BaseModel]:
    """The keyword arguments of a function or of a dataclass, as a table to check."""
    hints = get_type_hints(of)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(of).parameters.items():
        if name not in without and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
    return create_model(of.__name__, __base__=Strict, **fields)


def _check(
    place: str, section: str, model: type[BaseModel], table: Table, places: Mapping[str, str] | None = None
) -> Any:
    """A table through its model; the first thing wrong becomes one sentence. `places`: keys from other sections."""
    try:
        checked = model.model_validate_json(json.dumps(_copy(table), default=str))
    except ValidationError as error:
        worst = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")  # what is missing may be misspelt
        raise ConfigError(_first(place, section, places or {}, model, worst)) from None
    except (OverflowError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}") from None
    return checked if model is Experiment else {name: getattr(checked, name) for name in model.model_fields}


def _first(place: str, section: str, places: Mapping[str, str], model: Any, error: Any) -> str:
    *parents, last = [part for part in error["loc"] if isinstance(part, str)] or [""]
    top = (parents or [last])[0]
    start = places.get(top, f"{section}.{top}" if section else top)
    path = ".".join([start, *parents[1:], last] if parents else [start])
    if error["type"] == "extra_forbidden":
        for parent in parents:
            model = model.model_fields[parent].annotation
        return _unknown(place, path, list(model.model_fields))
    if error["type"] == "missing":
        return f"{place}: {path} is missing"
    text = error["msg"].removeprefix("Value error, ")
    return f"{place}: {path} is {error['input']!r:.200}; {text[:1].lower()}{text[1:]}"


def _unknown(place: str, path: str, known: list[str]) -> str:
    hint = _suggest(path.split(".")[-1], known)
    return f"{place}: unknown key {path!r}; allowed are {', '.join(known) or 'none'}{hint}"


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
        "data": {k: v for k, v in table.get("data", {}).items() if ("data" if k == "name" else k) not in small},
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


def _suggest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shipped() -> Any:
    return resources.files("fedbilevel") / "experiments"
