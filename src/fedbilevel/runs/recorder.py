"""Writes a run to a folder (config.toml, metrics.jsonl, checkpoint/, summary.json), and resumes it.

A killed run resumes from its last checkpoint: `Recorder._restore` sets the state, and the lines of
metrics.jsonl after the checkpoint are cut off. If the last checkpoint is damaged, or a file does
not agree with it, the run resumes from the one before.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedbilevel.core import devices, ranks
from fedbilevel.core.tree import Tree, is_finite
from fedbilevel.runs import checkpoint
from fedbilevel.runs.folder import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    PREVIOUS_CHECKPOINT,
    SUMMARY,
    check_metrics,
    check_writable,
    digest_of,
    read_record,
    sync,
    without_none,
    write_atomically,
)
from fedbilevel.runs.metric import Metrics, last_number
from fedbilevel.runs.run import Run

LOCK_WAIT_S = 3.0  # the members of a comparison that was killed may take a moment to end
TARGET_ACCURACIES = ("0.8", "0.9", "0.93", "0.95", "0.97")
FINAL_COSTS = (
    "bytes_up",
    "bytes_down",
    "samples",
    "gradients",
    "flops",
    "peak_bytes",
    "virtual_s",
    "wall_s",
)


log = logging.getLogger("fedbilevel")


class Recorder:
    """Iterates over a run, and records it in a folder on the way.

    Iterating over a recorder yields the same metrics as iterating over its run. A run that was
    killed at any moment and then resumed leaves the same files as one that was never killed: a
    checkpoint holds the state of the algorithm and of the federation, and the length that
    metrics.jsonl had; later lines of that file are dropped and written again.

    The last checkpoint but one is kept. A run whose last checkpoint is damaged, or whose metrics or
    client memories do not agree with it, resumes from the one before, and says so.

    A run that fails before its first checkpoint removes what it has written. One process at a time
    may write to a folder. Under `torchrun` all ranks iterate, and the first one writes.

    Args:
        run: The run.
        path: The folder, which is created if necessary.
        config: The resolved experiment, for config.toml; a resumed run must have the same one,
            except for its budget and title.
        resume: Whether to continue the run in the folder, if there is one.
        checkpoint_every: The number of iterations between two checkpoints. There is always one
            after the first evaluation and one at the end.

    Raises:
        FileExistsError: If the folder holds a run and `resume` is false.
        ValueError: If the run in the folder has other settings or no undamaged checkpoint, or, when
            the iteration starts, if another process is writing or has written to the folder.
        OSError: While iterating, if a file cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import fedbilevel as fb
        >>> from fedbilevel.runs.recorder import Recorder
        >>> from fedbilevel.runs.run import Run
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> run = Run(fb.algorithms.SimFBO(), fed, {"rounds": 2})
        >>> config = {"algorithm": {"name": "simfbo"}, "seed": 0}
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     for metrics in Recorder(run, Path(runs, "first"), config):
        ...         print("round", metrics["round"])
        ...     sorted(file.name for file in Path(runs, "first").iterdir())
        round 0
        round 1
        round 2
        ['checkpoint', 'config.toml', 'metrics.jsonl', 'summary.json']
    """

    def __init__(
        self,
        run: Run,
        path: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        checkpoint_every: int = 10,
    ) -> None:
        self.run = run
        self.path = path
        self.config = config
        self.checkpoint_every = checkpoint_every
        self.checkpoint = path / CHECKPOINT
        self._previous = path / PREVIOUS_CHECKPOINT
        self._metrics_bytes = 0  # the length of metrics.jsonl at the checkpoint
        if run.given_metric is not None:
            self.config = {**config, "metric": run.given_metric.table()}
        self._metrics_digest = blake2b(digest_size=16)
        self._versions = devices.versions(run.fed.device)
        self._has_saved = False
        run.fed.transport.store_in(self.checkpoint.parent)
        check_writable(path, config, resume)
        self._found = self._files_of_a_run()
        self._restored_from: Path | None = None
        if any(self._found):
            self._restored_from = self._restore_newest()

    def __iter__(self) -> Iterator[Metrics]:
        self.run.after_iteration = self._save_if_due
        evaluations = iter(self.run)
        if not self.run.history:
            # Evaluate before any file is created: a run that cannot start leaves nothing behind.
            evaluations = itertools.chain([next(evaluations)], evaluations)
        if ranks.rank() == 0:
            yield from self._record(evaluations)
        else:
            yield from self._iterate_without_writing(evaluations)

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run so far, as it is written to summary.json.

        Returns:
            The algorithm, task, data and seed; how the run ended; the accuracy, and the rounds that
            it took to reach certain accuracies; the costs, in total, by group of clients and by
            phase; and the metrics of single clients at the last evaluation.
        """
        run = self.run
        accuracies = []
        rounds_to: dict[str, float | None] = dict.fromkeys(TARGET_ACCURACIES)
        for metrics in run.history:
            accuracy = metrics.get("test_accuracy", math.nan)
            if not is_finite(accuracy):
                continue
            accuracies.append(accuracy)
            for target in TARGET_ACCURACIES:
                if rounds_to[target] is None and accuracy >= float(target):
                    rounds_to[target] = metrics["round"]
        last = run.history[-1]
        return {
            "algorithm": run.algorithm.name,
            "label": self.config.get("label") or run.algorithm.name,
            "task": self.config.get("task", {}).get("name"),
            "data": self.config.get("data", {}).get("name"),
            "seed": run.fed.seed,
            "status": run.status,
            "reason": run.reason,
            "rounds": run.fed.ledger.rounds,
            "final_test_accuracy": accuracies[-1] if accuracies else None,
            "best_test_accuracy": max(accuracies, default=None),
            "rounds_to": rounds_to,
            "metric": self._judgement(),
            "evaluated": run.evaluated,
            **{key: last[key] for key in FINAL_COSTS},
            "refused_replies": run.fed.ledger.refused_replies,
            "lost_tasks": run.fed.ledger.lost_tasks,
            "clients": run.fed.ledger.clients.groups(),
            "client_metrics": run.client_metrics.summary() if run.client_metrics else {},
            "ledger": {name: asdict(cost) for name, cost in run.fed.ledger.phases.items()},
        }

    def _judgement(self) -> dict[str, Any]:
        """Return the metric of the run, its last and best value, and the rounds to its targets."""
        metric = self.run.metric
        history = self.run.history
        rounds_to: dict[str, float | None] = {f"{target:g}": None for target in metric.targets}
        for metrics in reversed(history):
            for target in metric.targets:
                if metric.is_reached(metrics.get(metric.name, math.nan), target):
                    rounds_to[f"{target:g}"] = metrics["round"]
        final = last_number(history, metric.name)
        return {
            "name": metric.name,
            "direction": metric.direction,
            "final": final if math.isfinite(final) else None,
            "best": metric.best(metrics.get(metric.name, math.nan) for metrics in history),
            "rounds_to": rounds_to,
        }

    def _record(self, evaluations: Iterable[Metrics]) -> Iterator[Metrics]:
        with self._locked_folder():
            with self._add_folder_to_errors():
                self._metrics_file = (self.path / METRICS).open("ab")
            try:
                self._prepare_files()
                for metrics in evaluations:
                    self._write(metrics)
                    yield metrics
                summary = json.dumps(self.summary(), indent=2) + "\n"
                self._save(summary)
                with self._add_folder_to_errors():
                    write_atomically(self.path / SUMMARY, summary)
            finally:
                with suppress(OSError):  # a full disk has already been reported by a write
                    self._metrics_file.close()

    def _iterate_without_writing(self, evaluations: Iterable[Metrics]) -> Iterator[Metrics]:
        """Iterate on a rank that writes nothing: checkpoints collect the state of all ranks."""
        for metrics in evaluations:
            self._save_if_first()
            yield metrics
        self._save()

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Hold the folder as its only writer; leave nothing in a new one without a checkpoint."""
        is_new = not self.path.exists()
        # The lock is released in the thread that ends the iteration, which may be another one.
        lock = FileLock(self.checkpoint.parent / "lock", thread_local=False)
        with self._add_folder_to_errors():
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            try:
                held = lock.acquire(timeout=LOCK_WAIT_S)
            except Timeout:
                raise ValueError(f"{self.path} is being written by another process") from None
        with held:
            if self._files_of_a_run() != self._found:
                raise ValueError(f"{self.path} was written by another process in the meantime")
            try:
                yield
            finally:
                self._found = self._files_of_a_run()
                if is_new and not self._has_saved:
                    self._remove_own_files()

    def _files_of_a_run(self) -> list[tuple[int, int, int] | None]:
        """Return what tells whether a run has written a checkpoint or a summary meanwhile."""
        found: list[tuple[int, int, int] | None] = []
        for file in (self.checkpoint, self._previous, self.path / SUMMARY):
            try:
                stat = file.stat()
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
            else:
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found

    def _remove_own_files(self) -> None:
        """Remove what this run has written, and folders that are empty then."""
        for file in (self.path / METRICS, self.path / CONFIG, *self.checkpoint.parent.glob("*")):
            with suppress(OSError):
                file.unlink()
        for folder in (self.checkpoint.parent, self.path):
            with suppress(OSError):
                folder.rmdir()

    @contextmanager
    def _add_folder_to_errors(self) -> Iterator[None]:
        """Let errors of the operating system name the folder."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def _prepare_files(self) -> None:
        """Write the config; of a resumed run, drop what is newer than the checkpoint."""
        with self._add_folder_to_errors():
            if self._restored_from == self._previous:
                os.replace(self._previous, self.checkpoint)
            self._metrics_file.truncate(self._metrics_bytes)
            self._metrics_file.seek(self._metrics_bytes)
            (self.path / SUMMARY).unlink(missing_ok=True)
            write_atomically(self.path / CONFIG, tomli_w.dumps(without_none(self.config)))

    def _write(self, metrics: Metrics) -> None:
        with self._add_folder_to_errors():
            line = json.dumps(_nan_to_none(metrics)).encode() + b"\n"
            self._metrics_file.write(line)
            self._metrics_file.flush()
        self._metrics_digest.update(line)
        self._save_if_first()

    def _save_if_first(self) -> None:
        if len(self.run.history) == 1:
            self._save()

    def _save_if_due(self) -> None:
        if self.run.fed.iteration % self.checkpoint_every == 0:
            self._save()

    def _save(self, summary: str | None = None) -> None:
        """Write a checkpoint; all ranks must call this, because it collects the state of all.

        Args:
            summary: The summary that will be written next, at the end of the run.
        """
        run = self.run
        federation = run.fed.snapshot()
        if ranks.rank() != 0:
            return
        good_state = None
        if run.good_state is not run.state:
            good_state = dict(run.good_state._asdict())
        value = {
            "state": dict(run.state._asdict()),
            "good": good_state,
            "federation": federation,
            "clients": {"number": len(run.fed), "start": self._client_start()},
            "status": run.status,
            "reason": run.reason,
            "evaluated": run.evaluated,
            "client_metrics": self._client_metrics(),
        }
        record = {
            "config": without_none(self.config),
            "metrics_bytes": self._metrics_file.tell(),
            "metrics_digest": self._metrics_digest.hexdigest(),
            "summary": None if summary is None else digest_of(summary.encode()),
            "versions": self._versions,
        }
        with self._add_folder_to_errors():
            sync(self._metrics_file)
            checkpoint.save(self.checkpoint, value, record, self._previous)
        self._has_saved = True

    def _client_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return the last metrics of single clients: a resumed run may end without new ones."""
        return list(self.run.client_metrics.latest.items()) if self.run.client_metrics else []

    def _client_start(self) -> dict[str, Tree]:
        """Return where the variables of the clients start: few clients may have taken part."""
        problem = self.run.fed.problem
        return {"x": problem.client_part(problem.x), "y": problem.client_part(problem.y)}

    def _restore_newest(self) -> Path:
        """Restore the last checkpoint, or the one before if that fails; return its file."""
        try:
            self._restore(self.checkpoint)
        except (ValueError, OSError) as error:
            if not self._previous.exists():
                raise
            try:
                self._restore(self._previous)
            except (ValueError, OSError):
                raise error from None
            log.warning("%s; the run resumes from the checkpoint before", error)
            return self._previous
        return self.checkpoint

    def _restore(self, file: Path) -> None:
        """Set the run to the state of a checkpoint."""
        saved = checkpoint.load(file)
        record = read_record(file)
        metrics = (self.path / METRICS).read_bytes()
        check_metrics(self.path, record, metrics)
        run = self.run
        state_type = type(run.state)
        if saved["state"].keys() != set(state_type._fields):
            raise ValueError(f"{file} is not a checkpoint of {run.algorithm.name}")
        state, good_state = tree_map_only(
            Tensor, lambda tensor: tensor.to(run.fed.device), (saved["state"], saved["good"])
        )
        run.fed.restore(saved["federation"])
        run.state = state_type(**state)
        run.good_state = run.state
        if good_state is not None:
            run.good_state = state_type(**good_state)
        run.evaluated = saved.get("evaluated", [])
        if run.client_metrics:
            run.client_metrics.latest = dict(saved.get("client_metrics", []))
        self._metrics_bytes = record["metrics_bytes"]
        lines = metrics[: self._metrics_bytes]
        self._metrics_digest = blake2b(lines, digest_size=16)
        run.history = [_none_to_nan(json.loads(line)) for line in lines.splitlines()]
        if saved["status"] == "diverged":  # a run that was interrupted or completed may continue
            run.status = "diverged"
            run.reason = saved["reason"]
        self._warn_of_other_versions(record["versions"])

    def _warn_of_other_versions(self, before: Mapping[str, str]) -> None:
        """Warn if the run was saved under other versions, which may round differently."""
        changes = []
        for name, now in self._versions.items():
            if before.get(name) != now:
                changes.append(f"{name} {before.get(name)}, now {now}")
        if changes:
            log.warning(
                "%s was saved under %s: results may differ by rounding",
                self.path,
                ", ".join(changes),
            )


def _nan_to_none(metrics: Metrics) -> dict[str, float | None]:
    """Return metrics as JSON can hold them: numbers that are not finite become null."""
    return {key: value if is_finite(value) else None for key, value in metrics.items()}


def _none_to_nan(metrics: Mapping[str, float | None]) -> Metrics:
    """Return metrics from JSON with NaN for null."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}
