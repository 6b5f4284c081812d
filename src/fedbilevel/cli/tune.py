"""Step sizes by trial, the same search and the same effort for every method."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbilevel import rng
from fedbilevel.cli.compare import Comparison
from fedbilevel.cli.track import optional
from fedbilevel.runs import config as configs
from fedbilevel.runs import folder as folders
from fedbilevel.runs.config import Config
from fedbilevel.runs.record import check_same, holds_run, replace, without_none

REACH = 10.0  # a scale is between 1 / REACH and REACH
STARTUP = 4  # trials before the sampler trusts its model


class Scales(NamedTuple):
    """What multiplies the step sizes of the upper level (x), and of the lower level and the linear system (y)."""

    x: float = 1.0
    y: float = 1.0


class Trial(NamedTuple):
    """A run with its scales; `loss` is the mean upper loss over the last quarter of its evaluations.

    A single evaluation swings with the clients that took part last. Without an end of its own, it is infinite.
    """

    number: int
    scales: Scales
    status: str
    loss: float
    accuracy: float | None
    config: dict[str, Any]


class Tuning(Comparison):
    """Trials <method>/trial-<k> below `folder`: the methods side by side, the trials of each in turn.

    Trial 0 has the method's own settings. What is known about the others lies in their folders, and a draw depends on
    the seed, its number and the trials before it alone: killed and resumed, a search comes to the same end.
    """

    def __init__(
        self,
        folder: Path,
        methods: Mapping[str, Config],
        trials: int,
        experiment: dict[str, Any],
        data_dir: Path | None,
        resume: bool,
        jobs: int,
    ) -> None:
        self.optuna = optional("optuna", "tune")
        self.methods, self.trials, self.experiment = methods, trials, without_none(experiment)
        found = {}
        for name, config in methods.items():
            for path in sorted(folder.glob(f"{name}/trial-*/{folders.CONFIG}")):
                settings = configs.read(str(path))[1]["algorithm"]
                own = path.parent.name == "trial-0"
                scales = Scales() if own else _scales(settings, config.table["algorithm"])
                found[f"{name}/{path.parent.name}"] = _member(config, scales)
        super().__init__(folder, found, data_dir, resume, jobs)
        self._check_effort()
        for name in methods:
            self._follow(name)

    def _check_effort(self) -> None:
        """All trials in a folder have the same budget and conditions, those of other methods too."""
        for path in filter(holds_run, self.folder.glob("*/trial-*")):
            name = str(path.relative_to(self.folder))
            if name in self.members:
                check_same(path, self.members[name].table, but=())
            elif path.parent.name not in self.methods:
                own = next(iter(self.methods.values())).table
                check_same(path, own, but=("algorithm", "environment", "runtime"))

    def _follow(self, name: str) -> None:
        """When all trials of a method have ended, its next one."""
        method = name.split("/")[0]
        path, config = self.folder / method, self.methods[method]
        known = {name for name in self.members if name.startswith(f"{method}/")}
        k = next(k for k in range(len(known) + 1) if f"{method}/trial-{k}" not in known)
        if k >= self.trials or not all(name in self.ended for name in known):
            return
        done = [trial for trial in _trials(path) if trial.number < k and trial.status in ("completed", "diverged")]
        if k and not done:  # nothing was learnt, not even with the method's own settings
            return
        member = _member(config, self._draw(done, config.experiment.seed, k) if k else Scales())
        self.members[f"{method}/trial-{k}"] = member
        self.waiting.append(f"{method}/trial-{k}")

    def _draw(self, done: Sequence[Trial], seed: int, k: int) -> Scales:
        optuna = self.optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = {level: optuna.distributions.FloatDistribution(1 / REACH, REACH, log=True) for level in Scales._fields}
        finite = [trial.loss for trial in done if math.isfinite(trial.loss)]
        worst = max(finite, default=0.0)
        past = [
            optuna.trial.create_trial(params=trial.scales._asdict(), distributions=space, value=min(trial.loss, worst))
            for trial in done
        ]
        number = int(rng.integers(rng.fold_in(rng.root(seed, "tune"), k), 0, 2**32 - 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.GPSampler(seed=number, n_startup_trials=STARTUP)
            study = optuna.create_study(sampler=sampler)
            study.add_trials(past)
            drawn = study.ask(space).params
        return Scales(**{level: _round(value, 3) for level, value in drawn.items()})

    def _report(self, quiet: bool, as_json: bool) -> int:
        """The table of all trials in the folder, and tuned.toml from the best ones."""
        methods = {path.parent.name: _trials(path.parent) for path in sorted(self.folder.glob("*/trial-0"))}
        best = {
            name: min(trials, key=lambda trial: trial.loss)
            for name, trials in methods.items()
            if any(math.isfinite(trial.loss) for trial in trials)
        }
        file = self.folder / "tuned.toml"
        if best:
            replace(file, self._tuned(methods, best))
        if as_json:
            told = {name: [_row(trial, best.get(name), self.ended) for trial in of] for name, of in methods.items()}
            print(json.dumps({"trials": told, "tuned": str(file) if best else None}))
        elif not quiet:
            (Console() if sys.stdout.isatty() else Console(width=140)).print(_table(methods, best, self.ended))
            if best:
                print(f"tuned: {file}")
        if any(status.startswith("failed") for status in self.ended.values()):
            return 2
        return 0 if all(name in best for name in self.methods) else 3

    def _tuned(self, methods: Mapping[str, list[Trial]], best: Mapping[str, Trial]) -> str:
        """The experiment with the best settings of every method, for other seeds than the one tuned on."""
        seed, rounds = (next(iter(best.values())).config[key] for key in ("seed", "rounds"))
        comment = [
            f"Step sizes tuned on seed {seed}, {rounds} rounds a trial: one scale for the upper level (x),",
            "one for the lower level and the linear system (y). The upper loss on the clients' validation data,",
            "mean over the last quarter of the evaluations, decided.",
        ]
        sections = dict(self.experiment.get("algorithms", {}))
        for name, trial in best.items():
            comment.append(
                f"{name}: trial {trial.number} of {len(methods[name])}, scales x {trial.scales.x:g} and "
                f"y {trial.scales.y:g}, upper loss {trial.loss:.6g}"
            )
            settings = {key: value for key, value in trial.config["algorithm"].items() if key != "name"}
            sections[name] = {**settings, "environment": trial.config["environment"]}
        listed = [name for name in self.experiment.get("compare", []) if name in best]
        table = {
            **self.experiment,
            "title": f"{self.experiment.get('title', '')} (step sizes tuned)".strip(),
            "seed": seed + 1,
            "compare": listed + [name for name in best if name not in listed],
            "algorithms": sections,
        }
        return "".join(f"# {line}\n" for line in comment) + tomli_w.dumps(table)


def _trials(path: Path) -> list[Trial]:
    """The trials of one method, as they lie on disk; the first tells what the scales of the others multiply."""
    found = {int(file.parent.name.removeprefix("trial-")): file for file in path.glob(f"trial-*/{folders.CONFIG}")}
    if 0 not in found:
        return []
    own = configs.read(str(found[0]))[1]["algorithm"]
    return [_trial(k, found[k].parent, own) for k in sorted(found)]


def _trial(number: int, path: Path, own: Mapping[str, Any]) -> Trial:
    table = configs.read(str(path / folders.CONFIG))[1]
    scales = _scales(table["algorithm"], own)
    if not (path / folders.METRICS).exists():
        return Trial(number, scales, "unfinished", math.inf, None, table)
    run = folders.read(path)
    losses = [metrics["upper_loss"] for metrics in run.history]
    last = losses[-math.ceil(len(losses) / 4) :]
    loss = sum(last) / len(last) if run.status == "completed" else math.inf
    accuracy = run.summary["final_test_accuracy"] if run.summary else None
    return Trial(number, scales, run.status, loss, accuracy, table)


def _level(setting: str) -> str | None:
    words = setting.split("_")
    if "lr" not in words or setting == "server_lr":  # the latter serves both levels
        return None
    return "x" if "x" in words else "y"


def _member(config: Config, scales: Scales) -> Config:
    """A method's settings times the scales."""
    if scales == Scales():
        return config
    settings = {
        key: _scaled(value, getattr(scales, level)) if (level := _level(key)) else value
        for key, value in config.table["algorithm"].items()
    }
    return configs.resolve("the trial", {**config.table, "algorithm": settings})


def _scaled(value: Any, scale: float) -> Any:
    """A step size, its bounds or its schedule, times `scale`."""
    if isinstance(value, Mapping):
        return {key: _scaled(item, scale) if key in ("start", "end") else item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scaled(item, scale) for item in value]
    return _round(value * scale, 9)


def _scales(settings: Mapping[str, Any], own: Mapping[str, Any]) -> Scales:
    """The other way round: they have three digits, so that a quotient gives them back."""
    found = {}
    for key, value in settings.items():
        if level := _level(key):
            found[level] = _round(_number(value) / _number(own[key]), 3)
    return Scales(**found)


def _number(value: Any) -> float:
    value = value["start"] if isinstance(value, Mapping) else value
    return float(value[0] if isinstance(value, (list, tuple)) else value)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _row(trial: Trial, best: Trial | None, ended: Mapping[str, str]) -> dict[str, Any]:
    name = f"{trial.config['algorithm']['name']}/trial-{trial.number}"
    return {
        "trial": trial.number,
        "scale_x": trial.scales.x,
        "scale_y": trial.scales.y,
        "upper_loss": trial.loss if math.isfinite(trial.loss) else None,
        "test_accuracy": trial.accuracy,
        "status": ended.get(name, trial.status),
        "best": trial is best,
    }


def _table(methods: Mapping[str, list[Trial]], best: Mapping[str, Trial], ended: Mapping[str, str]) -> Table:
    table = Table(title="upper loss of each trial, mean over the last quarter of its evaluations; * marks the best")
    for heading in ("algorithm", "trial", "scale x", "scale y", "upper loss", "final accuracy", "status"):
        table.add_column(heading, no_wrap=heading != "status")
    for name, trials in methods.items():
        for trial in trials:
            row = _row(trial, best.get(name), ended)
            loss = f"{trial.loss:.6g}{' *' if row['best'] else ''}" if row["upper_loss"] is not None else "-"
            accuracy = f"{trial.accuracy:.2%}" if trial.accuracy is not None else "-"
            scales = f"{trial.scales.x:g}", f"{trial.scales.y:g}"
            table.add_row(escape(name), str(trial.number), *scales, loss, accuracy, escape(row["status"]))
    return table
