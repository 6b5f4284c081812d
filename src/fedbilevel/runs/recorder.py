"""A run that leaves a folder behind: config.toml, metrics.jsonl, checkpoint/, summary.json."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedbilevel.core import ranks
from fedbilevel.core.tree import is_finite
from fedbilevel.runs import checkpoint
from fedbilevel.runs.folder import CHECKPOINT, CONFIG, METRICS, SUMMARY
from fedbilevel.runs.folder import read as read_folder
from fedbilevel.runs.run import Run

TARGETS = ("0.8", "0.9", "0.93", "0.95", "0.97")
SPENT = (
    "bytes_up",
    "bytes_down",
    "samples",
    "gradients",
    "flops",
    "peak_bytes",
    "virtual_s",
    "wall_s",
)
EXTENSIBLE = ("rounds", "stop")  # what may differ when a run goes on


class Recorder:
    """Iterates over a run as the run does, and writes everything down on the way.

    Killed at any moment and resumed, a run ends with the files of one that was never killed: the checkpoint holds the
    state, the runtime's counters and how long metrics.jsonl was, and what was written after it is written again.
    """

    def __init__(
        self,
        run: Run,
        path: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        checkpoint_every: int = 10,
    ) -> None:
        self.run, self.path, self.config, self.checkpoint_every = (
            run,
            path,
            config,
            checkpoint_every,
        )
        self.checkpoint = path / CHECKPOINT
        self._length = 0  # of metrics.jsonl, up to the checkpoint
        run.fed.transport.keep_in(self.checkpoint.parent)
        check_folder(path, config, resume)
        if self.checkpoint.exists():
            self._restore(checkpoint.load(self.checkpoint))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.run.after = self._between_iterations
        evaluations = iter(self.run)
        first = (
            [] if self.run.history else [next(evaluations)]
        )  # what fails here fails before anything is written
        if ranks.rank():  # the first rank writes; the others take part in its checkpoints
            for metrics in itertools.chain(first, evaluations):
                self._save_first()
                yield metrics
            self._save()
            return
        with self._folder():
            with self._writing():
                self.metrics = (self.path / METRICS).open("ab")
            try:
                self._start()
                for metrics in itertools.chain(first, evaluations):
                    self._write(metrics)
                    yield metrics
                self._save()
                with self._writing():
                    replace(self.path / SUMMARY, json.dumps(self.summary(), indent=2) + "\n")
            finally:
                with suppress(OSError):  # a full disk was told of when it was written to
                    self.metrics.close()

    def _start(self) -> None:
        with self._writing():
            self.metrics.truncate(self._length)
            self.metrics.seek(self._length)
            (self.path / SUMMARY).unlink(missing_ok=True)
            replace(self.path / CONFIG, tomli_w.dumps(without_none(self.config)))

    def _write(self, metrics: Mapping[str, Any]) -> None:
        with self._writing():
            self.metrics.write(json.dumps(_finite(metrics)).encode() + b"\n")
            self.metrics.flush()
        self._save_first()

    def _save_first(self) -> None:
        if len(self.run.history) == 1:
            self._save()

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """The run's folder, for one writer; it goes again if the run could not even start."""
        new = not self.path.exists()
        with self._writing():
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            lock = (self.checkpoint.parent / "lock").open("ab")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.path} is being written by another process") from None
            try:
                yield
            finally:
                if new and not self.checkpoint.exists():
                    shutil.rmtree(self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def summary(self) -> dict[str, Any]:
        run, last = self.run, self.run.history[-1]
        accuracies = [
            (m["round"], a) for m in run.history if is_finite(a := m.get("test_accuracy", math.nan))
        ]
        reached = {
            target: next((r for r, a in accuracies if a >= float(target)), None)
            for target in TARGETS
        }
        return {
            "algorithm": run.algorithm.name,
            "label": self.config.get("label") or run.algorithm.name,
            "task": self.config.get("task", {}).get("name"),
            "data": self.config.get("data", {}).get("name"),
            "seed": run.fed.seed,
            "status": run.status,
            "reason": run.reason,
            "rounds": run.fed.ledger.rounds,
            "final_test_accuracy": accuracies[-1][1] if accuracies else None,
            "best_test_accuracy": max(a for _, a in accuracies) if accuracies else None,
            "rounds_to": reached,
            **{key: last[key] for key in SPENT},
            "refused_replies": run.fed.ledger.refused_replies,
            "lost_tasks": run.fed.ledger.lost_tasks,
            "clients": run.fed.ledger.clients.groups(),
            "ledger": {name: asdict(cost) for name, cost in run.fed.ledger.phases.items()},
        }

    def _between_iterations(self) -> None:
        if self.run.fed.iteration % self.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        run, federation = self.run, self.run.fed.snapshot()
        if ranks.rank():
            return
        value = {
            "state": dict(run.state._asdict()),
            "good": None if run.good is run.state else dict(run.good._asdict()),
            "federation": federation,
            "metrics_bytes": self.metrics.tell(),
            "status": run.status,
            "reason": run.reason,
        }
        with self._writing():
            checkpoint.save(self.checkpoint, value)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        run = self.run
        kind = type(run.state)
        if saved["state"].keys() != set(kind._fields):
            raise ValueError(f"{self.checkpoint} is not a checkpoint of {run.algorithm.name}")
        state, good = tree_map_only(
            Tensor, lambda t: t.to(run.fed.device), (saved["state"], saved["good"])
        )
        run.state = kind(**state)
        run.good = run.state if good is None else kind(**good)
        run.fed.restore(saved["federation"])
        self._length = saved["metrics_bytes"]
        lines = (self.path / METRICS).read_bytes()[: self._length]
        if len(lines) < self._length:
            raise ValueError(
                f"{self.path / METRICS} has lost lines that were there at the checkpoint"
            )
        run.history = [_numbers(json.loads(line)) for line in lines.splitlines()]
        if saved["status"] == "diverged":
            run.status, run.reason = saved["status"], saved["reason"]


def holds_run(path: Path) -> bool:
    return (path / CHECKPOINT).exists() or (path / SUMMARY).exists()


def check_folder(path: Path, config: Mapping[str, Any], resume: bool) -> None:
    """Whether a run may be written there: a new one, or the same one if it is to go on."""
    if holds_run(path):
        if not resume:
            raise FileExistsError(
                f"{path} holds a run already; go on with --resume or give another folder with --out"
            )
        if (path / CHECKPOINT).exists():
            check_same(path, config)


def check_same(path: Path, config: Mapping[str, Any], but: Sequence[str] = EXTENSIBLE) -> None:
    """A run goes on under its own settings; only its budget may be raised."""
    then, now = _flat(read_folder(path).config), _flat(without_none(config))
    for key in sorted({*then, *now}, key=lambda key: (not key.endswith(".name"), key)):
        if key.split(".")[0] not in but and then.get(key) != now.get(key):
            raise ValueError(
                f"{path} was run with {key} = {then.get(key)!r}, not {now.get(key)!r}; "
                "a run goes on with its own settings"
            )


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is not finite becomes null."""
    return {key: value if is_finite(value) else None for key, value in metrics.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is not set is left out."""
    return {
        key: without_none(value)
        if isinstance(value, Mapping)
        else list(value)
        if isinstance(value, tuple)
        else value
        for key, value in table.items()
        if value is not None
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat
