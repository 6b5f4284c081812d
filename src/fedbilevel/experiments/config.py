"""Reads experiments and resolves them: from a TOML file and options to exactly one run.

An experiment passes three modules on its way: `schema` says which keys it may have, `overrides`
reduces it to the run of one algorithm, and `parts` builds what its tables describe. Only the last
one needs PyTorch, so that a mistake in the file or in an option shows before PyTorch is imported.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import tasks
from fedbilevel.core import checks
from fedbilevel.experiments.overrides import parse_setting, reduce_to_run, shrink
from fedbilevel.experiments.schema import ConfigError as ConfigError
from fedbilevel.experiments.schema import Experiment, expand_names, validate
from fedbilevel.experiments.schema import Table as Table
from fedbilevel.runs.metric import TEST_ACCURACY, Metric

if TYPE_CHECKING:
    from fedbilevel.algorithms import Algorithm
    from fedbilevel.experiments.parts import TaskLoader
    from fedbilevel.federation.conduct import Conduct
    from fedbilevel.federation.environment import Environment


@dataclasses.dataclass(frozen=True)
class Config:
    """A resolved experiment: one run, with everything that it is made of.

    Args:
        table: The resolved experiment as a table, with all defaults filled in. It is recorded as
            config.toml, and describes the same run again.
        experiment: The validated experiment.
        algorithm: The algorithm with its settings.
        environment: The conditions under which clients take part.
        load_task: Loads the task; its argument is the folder with the data, or `None`.
        conduct: The rules of conduct with nodes of a real federation.
    """

    table: Table
    experiment: Experiment
    algorithm: Algorithm
    environment: Environment
    load_task: TaskLoader
    conduct: Conduct

    @property
    def label(self) -> str:
        """The label of the algorithm's section in the experiment, or else the algorithm's name."""
        return self.experiment.label or self.algorithm.name

    @property
    def limits(self) -> dict[str, float]:
        """The budget of the run, for `Run`."""
        stop = self.experiment.stop.model_dump(
            exclude_none=True, exclude={"test_accuracy", "metric", "patience"}
        )
        return {"rounds": self.experiment.rounds, **stop}

    @property
    def metric(self) -> Metric | None:
        """The metric that the experiment names, `None` if it leaves that to the task."""
        judge = self.experiment.metric
        if judge is not None:
            return Metric(judge.name, judge.direction, judge.targets)
        if self.experiment.stop.test_accuracy is not None:
            return TEST_ACCURACY
        return None

    @property
    def every(self) -> dict[str, float]:
        """The distance between two evaluations, for `Run`."""
        return self.experiment.every.model_dump(exclude_none=True)


def names() -> list[str]:
    """Return the names of the experiments that come with the package, sorted."""
    files = [file.name for file in _library().iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read(experiment: str) -> tuple[str, Table]:
    """Read an experiment.

    Args:
        experiment: The name of an experiment that comes with the package, or the path of a TOML
            file.

    Returns:
        The name or path, which messages of `resolve` begin with, and the table of the experiment.

    Raises:
        ConfigError: If there is no such experiment, or if it does not fit the schema.

    Examples:
        >>> source, table = read("digits")
        >>> table["compare"]
        ['simfbo', 'shrofbo', 'asfbo', 'la-asfbo']
    """
    path = Path(experiment)
    if path.suffix in (".csv", ".parquet"):
        raise ConfigError(
            f"{path} is a table; an experiment is a TOML file that names it: "
            f'task = {{ name = "table", path = "{path}", by = "...", target = "..." }}'
        )
    if experiment in names():
        source = experiment
        text = (_library() / f"{experiment}.toml").read_text("utf-8")
    elif path.suffix == ".toml" or path.exists():
        source = str(path)
        text = _read_text(path)
    else:
        if experiment in tasks.names():
            raise ConfigError(
                f"{experiment!r} is a task, which an experiment names: task = {experiment!r} in a "
                f"TOML file, or --task {experiment} beside the name of an experiment"
            )
        hint = checks.suggestion(experiment, names())
        raise ConfigError(
            f"experiment {experiment!r}{hint} is neither a file nor one of {', '.join(names())}"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "" if path.suffix == ".toml" else "; an experiment is a TOML file"
        raise ConfigError(f"{source}: {error}{hint}") from None
    expand_names(source, table)
    validate(source, table)
    return source, table


def _library() -> Traversable:
    return resources.files("fedbilevel") / "experiments" / "library"


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; an experiment is a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def resolve(
    source: str,
    table: Table,
    *,
    algorithm: str | None = None,
    settings: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
    smoke: bool = False,
) -> Config:
    """Resolve an experiment to one run.

    Settings win over overrides, these over the algorithm's section `[algorithms.LABEL]`, and that
    over the rest of the table.

    Args:
        source: The experiment's name or file, for messages.
        table: The table of the experiment; `read` returns both.
        algorithm: The name of the algorithm to run, or the label of a section. By default it is the
            experiment's own, or the first that it compares.
        settings: Changes as "KEY=VALUE" with a dotted key and a value in TOML, as after `--set`.
        overrides: Changes as dotted keys with their values.
        smoke: Whether to reduce the run to a second: two clients on small data, and two rounds
            unless the settings or overrides give their number.

    Returns:
        The run with its parts; only the task is not loaded yet.

    Raises:
        ConfigError: If a key is unknown, or a value is not allowed.

    Examples:
        >>> config = resolve(*read("digits"), algorithm="asfbo", settings=["algorithm.lr_x=0.2"])
        >>> config.algorithm.name, config.algorithm.lr_x
        ('asfbo', 0.2)
        >>> config.table["environment"]["participation"]
        5
    """
    changes = [*(overrides or {}).items(), *map(parse_setting, settings)]
    table = reduce_to_run(source, table, algorithm, changes)
    experiment = validate(source, table)
    if smoke:
        experiment = validate(source, shrink(table, dict(changes).get("rounds", 2)))
    return _build(source, experiment)


def _build(source: str, experiment: Experiment) -> Config:
    """Build the parts of a run, and the table that describes them completely."""
    import torch

    from fedbilevel.core import devices
    from fedbilevel.experiments import parts
    from fedbilevel.federation.conduct import Conduct
    from fedbilevel.federation.environment import Environment

    with parts.config_errors(source):
        device = devices.resolve_device(experiment.device)
    experiment = experiment.model_copy(update={"device": device})
    code = parts.add_code_to_path(source, experiment)
    # The task comes first, because the module of a user's task may register the algorithm.
    load_task = parts.TaskLoader.from_experiment(source, experiment)
    settings = dict(experiment.algorithm)
    algorithm_name = settings.pop("name")
    algorithm = parts.build_algorithm(source, "algorithm", algorithm_name, settings)
    environment = parts.build_settings(source, "environment", Environment, experiment.environment)
    parts.check_other_algorithms(source, experiment)
    conduct = parts.build_settings(source, "conduct", Conduct, experiment.conduct)
    table = {
        **experiment.model_dump(exclude_none=True, exclude={"algorithms", "compare", "data"}),
        **load_task.tables(),
        "algorithm": {"name": algorithm_name, **parts.settings_table(algorithm)},
        "environment": parts.environment_table(environment),
        "runtime": {
            "threads": torch.get_num_threads(),
            "memory": devices.stack_bytes(device),
            **experiment.runtime.model_dump(exclude_none=True),
        },
    }
    if code is not None:
        table["code"] = code
    if not experiment.conduct:
        del table["conduct"]
    return Config(table, experiment, algorithm, environment, load_task, conduct)
