"""The schema of an experiment: the keys that its TOML file may have, and their types.

The tables `task`, `data`, `algorithm`, `environment` and `conduct` are free here. Their keys are
the settings of what they configure, and `parts` checks them against it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fedbilevel.core import checks
from fedbilevel.core.precision import Compile, Derivatives, Precision
from fedbilevel.runs.metric import Metric

Table = dict[str, Any]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NAMED_TABLES = ("task", "data", "algorithm")  # a string in their place is their key `name`
TASK_ARGUMENTS = {"name": "data"}  # keys of [data] that the task's function calls differently


class ConfigError(ValueError):
    """An error in an experiment, explained in one sentence."""


class Strict(BaseModel):
    """A table that has no other keys than these, and whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Every(Strict):
    """The distance between two evaluations, in one unit of cost; a number alone counts rounds."""

    rounds: Annotated[int, Field(ge=1)] | None = None
    bytes: Amount | None = None
    samples: Amount | None = None
    gradients: Amount | None = None
    flops: Amount | None = None
    virtual_s: Amount | None = None
    wall_s: Amount | None = None

    @model_validator(mode="before")
    @classmethod
    def _number_counts_rounds(cls, value: object) -> object:
        if isinstance(value, dict):
            return value
        return {"rounds": value}

    @model_validator(mode="after")
    def _has_one_unit(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"it must have exactly one of {', '.join(type(self).model_fields)}")
        return self


class Stop(Strict):
    """Limits beside `rounds`: other units of cost, a value to reach, or no improvement.

    `metric` is a value of the experiment's metric, and `patience` a number of evaluations.
    """

    bytes: Amount | None = None
    samples: Amount | None = None
    gradients: Amount | None = None
    flops: Amount | None = None
    virtual_s: Amount | None = None
    wall_s: Amount | None = None
    test_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    metric: Annotated[float, Field(allow_inf_nan=False)] | None = None
    patience: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if self.test_accuracy is not None and self.metric is not None:
            raise ValueError("it must not have both metric and test_accuracy")
        return self


class Judge(Strict):
    """The metric that runs are judged by; a string alone is its name."""

    name: str
    direction: Literal["minimize", "maximize"] | None = None
    targets: list[Annotated[float, Field(allow_inf_nan=False)]] = []

    @model_validator(mode="before")
    @classmethod
    def _string_is_a_name(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return value

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        Metric(self.name, self.direction)
        return self


class Runtime(Strict):
    """How clients are computed; a part of the experiment, because it affects rounding.

    Nodes of a real federation ignore `mode`, `memory` and `compile`: each computes its one client
    as with `mode = "loop"`.
    """

    mode: Literal["stack", "loop"] = "stack"
    memory: Annotated[int, Field(ge=1)] | None = None
    precision: Precision = "fp32"
    derivatives: Derivatives = "auto"
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    compile: Compile = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None


class Section(BaseModel):
    """A table `[algorithms.LABEL]`: settings and conditions for the runs of one algorithm.

    Keys that are not listed here are settings of the algorithm. If the label is not the name of an
    algorithm, `algorithm` must be.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    algorithm: str | None = None
    environment: Table = {}
    task: Table = {}
    data: Table = {}


class Experiment(Strict):
    """An experiment as its TOML file describes it.

    A file may describe runs of several algorithms, with `algorithms` and `compare`. The config.toml
    of a run is an experiment too, with all defaults filled in and without these two. `code` is the
    folder of the modules that `task` and `algorithm` may name as module:function and module:class.
    """

    title: str = ""
    code: str | None = None
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
    metric: Judge | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    weights: Literal["uniform", "samples"] = "uniform"
    device: str = "cpu"
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    runtime: Runtime = Runtime()
    conduct: Table = {}

    @model_validator(mode="after")
    def _stops_at_its_metric(self) -> Self:
        name = self.metric.name if self.metric else "test_accuracy"
        if self.stop.test_accuracy is not None and name != "test_accuracy":
            raise ValueError(
                f"stop.test_accuracy is given, but metric is {name!r}; give stop.metric instead"
            )
        return self


def validate(source: str, table: Table) -> Experiment:
    """Check a table against the schema.

    Args:
        source: The experiment's name or file, for messages.
        table: The table, with names expanded (`expand_names`).

    Returns:
        The experiment.

    Raises:
        ConfigError: If a key is unknown or a value is not allowed.

    Examples:
        >>> validate("a.toml", {"task": {"name": "quadratic"}, "rounds": 5}).rounds
        5
        >>> validate("a.toml", {"ronds": 5})
        Traceback (most recent call last):
        fedbilevel.experiments.schema.ConfigError: a.toml: unknown key 'ronds' (did you ...
    """
    try:
        return Experiment.model_validate_json(json.dumps(copy_table(table), default=str))
    except ValidationError as error:
        # An unknown key comes first: it may be a misspelt one, and so explain another error.
        first = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        raise ConfigError(f"{source}: {_explain(first)}") from None
    except (OverflowError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _explain(error: ErrorDetails) -> str:
    parts = [part for part in error["loc"] if isinstance(part, str)]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        model: Any = Experiment
        for parent in parts[:-1]:
            annotation = model.model_fields[parent].annotation
            model = next(iter(get_args(annotation)), annotation)  # a table that may be left out
        return checks.unknown_key(key, model.model_fields)
    message = error["msg"].removeprefix("Value error, ")
    return f"{key} is {error['input']!r:.200}; {message[:1].lower()}{message[1:]}"


def copy_table(value: Any, key: str = "") -> Any:
    """Return a deep copy of a table, or of a value in it.

    Raises:
        OverflowError: If a whole number needs more than 64 bits; TOML has none, but Python's reader
            does not check.
    """
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {name: copy_table(item, f"{prefix}{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [copy_table(item, key) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OverflowError(f"{key} is {value}; a whole number must fit in 64 bits")
    return value


def expand_names(source: str, table: Table) -> None:
    """Replace `task = "NAME"` by a table with that name, in place; also for data and algorithm."""
    for key in NAMED_TABLES:
        if isinstance(table.get(key), str):
            table[key] = {"name": table[key]}
        name = name_in(table, key)
        if not isinstance(name, str | None):
            raise ConfigError(f"{source}: {key}.name is {name!r}; it must be a string")


def name_in(table: Table, key: str) -> Any:
    """Return the name in the table under this key, or `None`."""
    inner = table.get(key)
    if isinstance(inner, dict):
        return inner.get("name")
    return None
