"""Builds the parts that an experiment names: algorithm, environment, conduct and task.

Their settings are checked against their declarations (`core.settings`). `settings_table` is the way
back, from a part to the table that describes it completely.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_type_hints

from fedbilevel import algorithms, tasks
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import schedules
from fedbilevel.core.settings import build, declared_settings, read_arguments
from fedbilevel.experiments.schema import TASK_ARGUMENTS, ConfigError, Experiment, Table
from fedbilevel.federation import delays, stages
from fedbilevel.federation.environment import Environment

T = TypeVar("T")
RUN_ARGUMENTS = ("seed", "data_dir")  # a task's function gets these from the run, not from a table


@contextmanager
def config_errors(source: str, prefix: str = "") -> Iterator[None]:
    """Turn whatever a block raises into a `ConfigError` that names the experiment."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{source}: {prefix}{error}") from error
    except Exception as error:  # from the code of a user's task
        raise ConfigError(f"{source}: {prefix}{type(error).__name__}: {error}") from error


def build_algorithm(source: str, section: str, name: str, settings: Table) -> Algorithm:
    """Build an algorithm; `section` is where the experiment configures it."""
    with config_errors(source, f"[{section}] "):
        algorithm_type = find_algorithm(name)
    return build_settings(source, section, algorithm_type, settings)


def find_algorithm(name: str) -> type[Algorithm]:
    """Return an algorithm by its registered name, or as module:class.

    A class that no name was registered for is registered as module:class.
    """
    if ":" not in name or name in algorithms.names():
        return algorithms.get(name)
    found = _import_object("algorithm", name)
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise ValueError(
            f"algorithm is {name!r}, which is not a class derived from Algorithm "
            "of fedbilevel.algorithms"
        )
    if "name" not in vars(found):
        algorithms.register(name)(found)
    return found


def build_settings(source: str, section: str, settings_type: type[T], settings: Table) -> T:
    """Build an object from a table; `section` is where the table stands in the experiment."""
    with config_errors(source):
        instance: T = build(settings_type, section, settings)
    return instance


def check_other_algorithms(source: str, experiment: Experiment) -> None:
    """Check the sections and names of algorithms that a run of the experiment does not use."""
    for label, section in experiment.algorithms.items():
        name = section.algorithm or label
        build_algorithm(source, f"algorithms.{label}", name, section.model_extra or {})
        conditions = {**experiment.environment, **section.environment}
        build_settings(source, f"algorithms.{label}.environment", Environment, conditions)
    for label in experiment.compare:
        if label not in experiment.algorithms:
            with config_errors(source, "compare: "):
                find_algorithm(label)


@dataclasses.dataclass(frozen=True)
class TaskLoader:
    """The function that makes the task of an experiment, together with its arguments.

    Args:
        source: The experiment's name or file, for messages.
        name: The task's name, or module:function.
        function: The task's function.
        arguments: All its arguments but those of `RUN_ARGUMENTS`.
        data_keys: The arguments that are given in the table `data`.
        seed: The seed of the run.
    """

    source: str
    name: str
    function: Callable[..., tasks.Task]
    arguments: Table
    data_keys: tuple[str, ...]
    seed: int

    @classmethod
    def from_experiment(cls, source: str, experiment: Experiment) -> Self:
        """Find the task's function, and check the tables `task` and `data` against it."""
        from_task = dict(experiment.task)
        name = from_task.pop("name", None)
        with config_errors(source):
            function = find_task(name)
        from_data = {TASK_ARGUMENTS.get(key, key): value for key, value in experiment.data.items()}
        for key in from_data.keys() & from_task.keys():
            raise ConfigError(
                f"{source}: {key} is given in [task] and in [data]; one of them is enough"
            )
        with config_errors(source, f"task {name}: "):
            declared = declared_settings(function, without=RUN_ARGUMENTS)
        keys = {TASK_ARGUMENTS.get(key, key): f"data.{key}" for key in experiment.data}
        with config_errors(source):
            given = read_arguments(declared, "task", {**from_data, **from_task}, keys)
        arguments = {setting.name: setting.default for setting in declared} | given
        return cls(source, name, function, arguments, tuple(from_data), experiment.seed)

    def __call__(self, data_dir: Path | None) -> tasks.Task:
        """Load the task; `data_dir` is where its data is, if not in the usual place."""
        from_run = {"seed": self.seed, "data_dir": data_dir}
        for key in RUN_ARGUMENTS:
            if key not in inspect.signature(self.function).parameters:
                del from_run[key]
        with config_errors(self.source, f"task {self.name}: "):
            task = self.function(**self.arguments, **from_run)
        if not isinstance(task, tasks.Task):
            raise ConfigError(
                f"{self.source}: task {self.name} made a {type(task).__name__}; "
                "it must make a fedbilevel.tasks.Task"
            )
        return task

    def files(self) -> list[str]:
        """Return the arguments that name a file or a folder, by their annotation.

        Nobody but who runs the experiment may have them opened.
        """
        hints = get_type_hints(self.function)
        found = []
        for name, value in self.arguments.items():
            if value is not None and Path in (hints.get(name), *get_args(hints.get(name))):
                found.append(name)
        return found

    def check_for_nodes(self) -> None:
        """Refuse a task that names files, which nodes of a real federation do not open."""
        for name in self.files():
            raise ConfigError(
                f"{self.source}: task.{name} is a path, which nodes do not open; "
                "on a federation each client loads its own data, see --client-data of join"
            )

    def tables(self) -> Table:
        """Return the tables `task` and, unless it is empty, `data`, with all arguments."""
        task = {"name": self.name}
        for key, value in self.arguments.items():
            if key not in (*self.data_keys, "data"):
                task[key] = value
        data: Table = {}
        if "data" in self.arguments:
            data["name"] = self.arguments["data"]
        for key in self.data_keys:
            if key != "data":
                data[key] = self.arguments[key]
        if data:
            return {"task": task, "data": data}
        return {"task": task}


def find_task(name: str | None) -> Callable[..., tasks.Task]:
    """Return the function of a task, by the task's name or as module:function."""
    if name is None:
        raise ValueError(
            f"task is missing; it must name a task ({', '.join(tasks.names())}) "
            "or be module:function"
        )
    if ":" in name:
        return import_function("task", name)
    return tasks.get(name)


def add_code_to_path(source: str, experiment: Experiment) -> str | None:
    """Let the modules be imported that an experiment names; return their folder if it has one.

    They lie in the folder `code` of the experiment, or else beside its file. An experiment that
    names none changes nothing. The path keeps the folder at its end, because such a module may
    import its neighbours later, and must not hide an installed package.
    """
    sections = experiment.algorithms
    names = [experiment.task.get("name"), experiment.algorithm.get("name"), *experiment.compare]
    names += [section.algorithm for section in sections.values()]
    names += [section.task.get("name") for section in sections.values()]
    if not any(":" in name for name in names if name):
        return None
    file = Path(source)
    folder = experiment.code
    if folder is None and file.suffix == ".toml" and file.is_file():
        folder = str(file.parent.resolve())
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    return folder


def import_function(setting: str, name: str) -> Callable[..., Any]:
    """Import a function of the user's code.

    Whoever names a function has its module run. Functions of Python's standard library are refused,
    because `os:system` makes no task; all others are the user's responsibility.

    Args:
        setting: The setting that names the function, for messages.
        name: Module:function; the module may lie in the working folder, or beside the experiment.

    Returns:
        The function.

    Raises:
        ValueError: If it cannot be imported, is not a function, or is part of Python.

    Examples:
        >>> import_function("task", "fedbilevel.tasks.quadratic:quadratic").__name__
        'quadratic'
    """
    function = _import_object(setting, name)
    if not callable(function):
        raise ValueError(f"{setting} is {name!r}, which is not a function")
    return function  # type: ignore[no-any-return]


def _import_object(setting: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"{setting} is {name!r}, which is in Python's standard library; "
            "it must be a function of your own"
        )
    if os.getcwd() not in sys.path:
        # Last, so that no file there hides an installed module. This is not undone, because the
        # module may import its neighbours later.
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module's code may raise anything
        raise ValueError(f"{setting} is {name!r}, which cannot be imported: {error}") from error


def settings_table(instance: Any) -> Table:
    """Return the fields of a dataclass as a table from which it can be built again."""
    table = {}
    for field in dataclasses.fields(instance):
        table[field.name] = _to_toml(getattr(instance, field.name))
    if isinstance(instance, stages.Stage):
        return {"stage": instance.name, **table}
    for choice, kinds in (("schedule", schedules.KINDS), ("model", delays.MODELS)):
        for name, kind in kinds.items():
            if isinstance(instance, kind):
                return {choice: name, **table}
    return table


def _to_toml(value: Any) -> Any:
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [settings_table(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return settings_table(value)
    return value


def environment_table(environment: Environment) -> Table:
    """Return an environment as a table, without conditions that are off."""
    table = settings_table(environment)
    table = {key: value for key, value in table.items() if value not in (None, ())}
    if isinstance(environment.local_steps, list):
        table["local_steps"] = {"clients": environment.local_steps}
    table["batch_size"] = environment.batch_size or "full"
    return table
