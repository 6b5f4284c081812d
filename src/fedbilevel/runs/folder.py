"""The folder of a run on disk: its files, how to find and read it, and whether a run may use it.

A run folder holds `config.toml` (the resolved experiment), `metrics.jsonl` (one evaluation per
line), `checkpoint/` (from which a killed run resumes) and, once the run has ended, `summary.json`.

A checkpoint carries a record of the other files: the config, the length and the digest of the
metrics, and the digest of the summary. Whoever reads a run folder compares its files with it.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from fedbilevel.runs.metric import Metric, default_metric

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint/latest.safetensors"
PREVIOUS_CHECKPOINT = "checkpoint/previous.safetensors"
EXTENSIBLE = ("rounds", "stop", "title", "metric", "code")  # what may differ when a run is resumed

SUMMARY_PARTS = ("ledger", "final_test_accuracy")  # what reports and searches need
GROUP_PARTS = {"clients", "bytes_up", "bytes_down", "flops", "peak_bytes"}  # of a group of clients

Table = dict[str, Any]  # as TOML and JSON hold it


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder, without its checkpoint.

    Args:
        path: The folder.
        config: The resolved experiment.
        history: The metrics of each evaluation; `None` stands for a number that is not finite.
        summary: The summary, or `None` if the run has not ended.
    """

    path: Path
    config: Table
    history: list[Table]
    summary: Table | None

    @property
    def algorithm(self) -> str:
        """The label under which the experiment ran the algorithm, or else the algorithm's name."""
        return str(self.config.get("label") or self.config["algorithm"]["name"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def metric(self) -> Metric:
        """The metric that the run is judged by."""
        measured: Table = {}
        for metrics in self.history:
            measured |= {name: value for name, value in metrics.items() if value is not None}
        return metric_of(self.config, measured)

    @property
    def status(self) -> str:
        """How the run ended, or "unfinished"."""
        if self.summary is None:
            return "unfinished"
        return str(self.summary["status"])


def metric_of(config: Mapping[str, Any], measured: Mapping[str, Any]) -> Metric:
    """Return the metric that a recorded run is judged by.

    Args:
        config: Its config.toml.
        measured: One of its evaluations.

    Returns:
        The metric in the config, else the default one.

    Examples:
        >>> metric_of({"metric": {"name": "rmse", "direction": "minimize"}}, {}).name
        'rmse'
    """
    table = config.get("metric")
    if isinstance(table, Mapping):
        return Metric(**table)
    return default_metric(measured)


def node_model(folder: Path, client: int) -> Path:
    """Return the file in which a node keeps the model of its client when a study has ended.

    Args:
        folder: What the node's machine keeps of the run, as `fedbilevel state` lists it.
        client: The client.

    Returns:
        A safetensors file.

    Examples:
        >>> node_model(Path("ab12"), 3).name
        'model-3.safetensors'
    """
    return folder / f"model-{client}.safetensors"


def find(paths: Iterable[Path | str]) -> list[Path]:
    """Find the run folders at or below the given paths.

    Args:
        paths: Run folders, or folders that hold some.

    Returns:
        The run folders as absolute paths, sorted, each of them once.

    Raises:
        FileNotFoundError: If one of the paths is not a folder, or holds no run.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     for seed in (0, 1):
        ...         out = f"{runs}/seed-{seed}"
        ...         _ = fb.solve(task.problem, task.clients, "simfbo", rounds=1, seed=seed, out=out)
        ...     [path.name for path in find([runs])]
        ['seed-0', 'seed-1']
    """
    run_folders: set[Path] = set()
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path} is not a folder: expected a run folder or a folder that holds some"
            )
        candidates = [file.parent for file in path.rglob(METRICS)]
        below = {folder.resolve() for folder in candidates if (folder / CONFIG).is_file()}
        if not below:
            raise FileNotFoundError(
                f"{path} holds no run: expected {CONFIG} and {METRICS} in it or in a folder below"
            )
        run_folders |= below
    return sorted(run_folders)


def read(path: Path | str) -> RunFolder:
    """Read a run folder.

    A killed run may leave an incomplete last line in its metrics; that line is left out. The files
    are compared with the record in the checkpoint, if there is one.

    Args:
        path: The run folder.

    Returns:
        The run's config, history and summary.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file does not hold what it should; the message names the file.

    Examples:
        >>> import tempfile
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = fb.solve(task.problem, task.clients, "simfbo", rounds=2, out=out)
        ...     run = read(out)
        >>> run.algorithm, run.status, len(run.history)
        ('simfbo', 'completed', 3)
    """
    path = Path(path)
    # The record comes first: the metrics of a run that is under way only become longer.
    record = _newest_record(path)
    config = _read_config(path / CONFIG)
    metrics = (path / METRICS).read_bytes()
    summary = _read_summary(path / SUMMARY, record)
    if record is not None:
        _check_config(path, record, config)
        check_metrics(path, record, metrics)
    history = _parse_metrics(path / METRICS, metrics)
    return RunFolder(path, config, history, summary)


def _read_config(file: Path) -> Table:
    try:
        config = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("name"), str):
        raise ValueError(f"{file}: algorithm is {algorithm!r}, expected a table with a name")
    if not isinstance(config.get("seed"), int):
        raise ValueError(f"{file}: seed is {config.get('seed')!r}, expected an integer")
    return config


def _parse_metrics(file: Path, content: bytes) -> list[Table]:
    lines = content.splitlines()
    history = []
    for number, line in enumerate(lines, start=1):
        try:
            evaluation = json.loads(line)
        except (ValueError, RecursionError):
            evaluation = None
        if isinstance(evaluation, dict):
            history.append(evaluation)
        elif number < len(lines):  # only the last line of a killed run may be incomplete
            raise ValueError(f"{file}, line {number}: {line[:40]!r} is not a JSON object")
    return history


def _read_summary(file: Path, record: Table | None) -> Table | None:
    if not file.exists():
        return None
    content = file.read_bytes()
    if record is not None and record["summary"] not in (None, digest_of(content)):
        raise ValueError(
            f"{file} is damaged: it is not the one that the run has written; "
            "--resume writes a new one"
        )
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(summary, dict) or "status" not in summary:
        raise ValueError(f"{file} is not a summary: expected a JSON object with a status")
    for part in SUMMARY_PARTS:
        if part not in summary:
            raise ValueError(f"{file} lacks {part!r}; --resume writes a new summary")
    if damaged := _damaged_part(summary):
        raise ValueError(f"{file} is damaged in {damaged!r}; --resume writes a new summary")
    return summary


def _damaged_part(summary: Table) -> str:
    """Return the name of a part that no run has written so; empty if there is none."""
    for part in ("ledger", "client_metrics"):
        tables = summary.get(part, {})  # older runs have no client_metrics, nor clients
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            return part
    groups = summary.get("clients", [])
    if not isinstance(groups, list):
        return "clients"
    for group in groups:
        if not isinstance(group, dict) or not group.keys() >= GROUP_PARTS:
            return "clients"
    metric = summary.get("metric", {"final": None})
    if not isinstance(metric, dict) or "final" not in metric:
        return "metric"
    return ""


# The record in a checkpoint.


def digest_of(content: bytes) -> str:
    """Return the digest under which the contents of a file are recorded."""
    return blake2b(content, digest_size=16).hexdigest()


def read_record(checkpoint: Path) -> Table:
    """Read the record in a checkpoint, without reading its tensors.

    Args:
        checkpoint: The file, in the safetensors format: the length of a header, and the header.

    Returns:
        The table that `checkpoint.save` was given as `record`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, or holds no record.
    """
    try:
        with checkpoint.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > checkpoint.stat().st_size:
                raise ValueError(f"a header of {length} bytes is longer than the file")
            metadata = json.loads(file.read(length))["__metadata__"]
        text = metadata["record"]
        if metadata["record_digest"] != digest_of(text.encode()):
            raise ValueError("the record does not match its digest")
        record: Table = json.loads(text)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{checkpoint} is damaged, or is not the checkpoint of a run") from error
    return record


def _newest_record(path: Path) -> Table | None:
    """Return the record of the newest checkpoint that has one; None if no checkpoint has."""
    for name in (CHECKPOINT, PREVIOUS_CHECKPOINT):
        with suppress(OSError, ValueError):
            return read_record(path / name)
    return None


def check_metrics(path: Path, record: Mapping[str, Any], metrics: bytes) -> None:
    """Check that metrics begin with those that were there at a checkpoint.

    Args:
        path: The run folder.
        record: The record in the checkpoint.
        metrics: The contents of metrics.jsonl.

    Raises:
        ValueError: If they do not.
    """
    length = record["metrics_bytes"]
    if len(metrics) < length:
        raise ValueError(f"{path / METRICS} has lost lines that were there at the checkpoint")
    if digest_of(metrics[:length]) != record["metrics_digest"]:
        raise ValueError(
            f"{path / METRICS} is damaged: its first {length} bytes are not those that were there "
            "at the checkpoint"
        )


def holds_run(path: Path) -> bool:
    """Whether a run has written a checkpoint, a summary, or several evaluations to this folder."""
    files = (CHECKPOINT, PREVIOUS_CHECKPOINT, SUMMARY)
    return any((path / name).exists() for name in files) or _has_evaluations(path / METRICS)


def _has_evaluations(metrics: Path) -> bool:
    """Whether a run got beyond its first evaluation, after which it writes a checkpoint."""
    return metrics.is_file() and metrics.read_bytes().count(b"\n") > 1


def check_writable(path: Path, config: Mapping[str, Any], resume: bool) -> None:
    """Check that a run may be written to a folder.

    Args:
        path: The folder, which need not exist.
        config: The resolved experiment of the run.
        resume: Whether the run may continue one that is already there.

    Raises:
        FileExistsError: If the folder holds a run that is not to be resumed, or a file of somebody
            else's that has the name of one of ours.
        ValueError: If the run in the folder has other settings, or no checkpoint.
    """
    if not holds_run(path):
        _check_foreign_files(path)
        return
    if not resume:
        raise FileExistsError(
            f"{path} already holds a run; resume it with --resume or give another folder with --out"
        )
    if not any((path / name).exists() for name in (CHECKPOINT, PREVIOUS_CHECKPOINT)):
        raise ValueError(
            f"{path / CHECKPOINT} is missing, so that the run cannot be resumed; "
            "give another folder with --out"
        )
    check_same_settings(path, config)


def _check_foreign_files(path: Path) -> None:
    """Refuse to overwrite what a run that was killed early cannot have left."""
    foreign = None
    if (path / CONFIG).is_file():
        try:
            _read_config(path / CONFIG)
        except ValueError:
            foreign = path / CONFIG
    elif (path / METRICS).is_file() and (path / METRICS).stat().st_size:
        foreign = path / METRICS  # a run writes its config first
    if foreign is not None:
        raise FileExistsError(
            f"{foreign} was not written by a run, which would overwrite it; "
            "give another folder with --out"
        )


def check_same_settings(
    path: Path, config: Mapping[str, Any], ignoring: Sequence[str] = EXTENSIBLE
) -> None:
    """Check that the run in a folder has the same settings as another, up to its budget.

    The settings of the run are those in its checkpoint; its config.toml must agree with them.

    Args:
        path: The run folder.
        config: The resolved experiment to compare with.
        ignoring: Keys of the experiment that may differ.

    Raises:
        ValueError: If a setting differs; the message names the setting and both values.
    """
    record = _newest_record(path)
    if record is None:
        recorded = _read_config(path / CONFIG)
    else:
        recorded = record["config"]
    difference = first_difference(recorded, without_none(config), ignoring)
    if difference:
        key, before, now = difference
        raise ValueError(
            f"{path} was run with {key} = {before!r}, not {now!r}; "
            "a run is resumed under its own settings"
        )
    if record is None:
        return
    try:
        present = tomllib.loads((path / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):  # resuming writes it again
        return
    _check_config(path, record, present)


def _check_config(path: Path, record: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Check that a config.toml is that of the run, up to its budget."""
    difference = first_difference(record["config"], config, EXTENSIBLE)
    if difference:
        key, before, now = difference
        raise ValueError(
            f"{path / CONFIG} was changed: {key} is {now!r} there, and was {before!r} in the run; "
            "a run keeps its own settings (without the file, --resume writes it again)"
        )


def first_difference(
    recorded: Mapping[str, Any], current: Mapping[str, Any], ignoring: Sequence[str]
) -> tuple[str, Any, Any] | None:
    """Return the first setting that differs and its two values, or None.

    A setting that is "auto" now is one that the run has chosen.

    Args:
        recorded: The resolved experiment of a run.
        current: The one to compare it with.
        ignoring: Keys of the experiment that may differ.
    """
    before = _flatten(recorded)
    now = _flatten(current)
    # Names come first: another algorithm explains why its settings differ.
    for key in sorted({*before, *now}, key=lambda key: (not key.endswith(".name"), key)):
        if key.split(".")[0] in ignoring or now.get(key) == "auto":
            continue
        if before.get(key) != now.get(key):
            return key, before.get(key), now.get(key)
    return None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Return a nested table as one with dotted keys."""
    flat: Table = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def without_none(table: Mapping[str, Any]) -> Table:
    """Return a nested table as TOML can hold it: without `None`, and with lists for tuples."""
    return {key: _for_toml(value) for key, value in table.items() if value is not None}


def _for_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_none(value)
    if isinstance(value, (list, tuple)):
        return [_for_toml(entry) for entry in value]
    return value


def write_atomically(path: Path, content: str | bytes, previous: Path | None = None) -> None:
    """Write a file so that a reader, a kill or a power cut leaves either the old or the new one.

    The contents are on the disk before the name is theirs. The folder is not synced: a power cut
    may bring the old file back, which is whole too.

    Args:
        path: The file, which is replaced if it exists.
        content: Its contents; text is written as UTF-8.
        previous: Where the file that is replaced is kept.

    Raises:
        OSError: If the file cannot be written.
    """
    if isinstance(content, str):
        content = content.encode()
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            sync(file)
        if previous is not None and path.exists():
            _keep(path, previous)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync(file: IO[bytes]) -> None:
    """Write to the disk what was written to a file, so that it survives a power cut."""
    file.flush()
    os.fsync(file.fileno())


def _keep(path: Path, previous: Path) -> None:
    """Keep a file that is about to be replaced under a second name."""
    previous.unlink(missing_ok=True)
    try:
        os.link(path, previous)  # the file is never missing under its own name
    except OSError:  # a file system without hard links
        os.replace(path, previous)
