"""Step sizes by trial: the same two-dimensional search and the same effort for every method."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.markup import escape
from rich.table import Table

from fedbilevel.cli.compare import Comparison, show
from fedbilevel.cli.track import optional
from fedbilevel.core import rng
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.config import Config
from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import (
    check_same_settings,
    holds_run,
    without_none,
    write_atomically,
)

REACH = 10.0  # scales lie between 1 / REACH and REACH


class Scales(NamedTuple):
    """What multiplies the step sizes of the upper level (x), and of the lower level and the linear system (y)."""

    x: float = 1.0
    y: float = 1.0


class Trial(NamedTuple):
    """A run under scales of its own; `loss` is infinite unless it completed."""

    number: int
    scales: Scales
    status: str
    loss: float
    accuracy: float | None
    config: dict[str, Any]


class Tuning(Comparison):
    """Trials `<method>/trial-<k>`: those of one method in turn, the methods side by side.

    Trial 0 has the method's own settings. All that is known of a trial lies in its folder, and the draw of trial k
    depends on the seed, on k and on the trials before it alone: killed at any moment and resumed, a search ends as one
    that was never killed. `experiment` is what tuned.toml gives the best settings to.
    """

    extensible = ()  # with another budget, other trials would have been drawn

    def __init__(
        self,
        folder: Path,
        methods: Mapping[str, Config],
        trials: int,
        experiment: Mapping[str, Any],
        data_dir: Path | None,
        resume: bool,
        jobs: int,
    ) -> None:
        self.optuna = optional("optuna", "tune")
        self.methods, self.trials, self.experiment = methods, trials, without_none(experiment)
        begun = {}
        for name, config in methods.items():
            own = config.table["algorithm"]
            if {"x", "y"} - {_level(key) for key in own}:
                raise ValueError(
                    f"{name} does not have a step size for each level; there is nothing to tune"
                )
            for k, path in _numbered(folder / name):
                scales = _scales(_read(path)["algorithm"], own) if k else Scales()
                begun[f"{name}/trial-{k}"] = _member(config, scales)
        super().__init__(folder, begun, data_dir, resume, jobs)
        for path in filter(holds_run, folder.glob("*/trial-0")):
            if path.parent.name not in methods:  # tuned.toml holds it too
                check_same_settings(path, config.table, ignoring=("algorithm", "environment", "runtime"))
        for name in methods:
            self._follow(name)

    def _follow(self, name: str) -> None:
        """Once all trials of a method have ended, its next one."""
        method = name.split("/")[0]
        known = {name for name in self.members if name.startswith(f"{method}/")}
        k = next(k for k in range(len(known) + 1) if f"{method}/trial-{k}" not in known)
        if k >= self.trials or not known <= self.ended.keys():
            return
        before = [
            t
            for t in _trials(self.folder / method)
            if t.number < k and t.status in ("completed", "diverged")
        ]
        if k and not before:
            return  # its own settings have failed: nothing is known to go on from
        config = self.methods[method]
        scales = self._draw(before, config.experiment.seed, k) if k else Scales()
        self.members[f"{method}/trial-{k}"] = _member(config, scales)
        self.waiting.append(f"{method}/trial-{k}")

    def _draw(self, before: Sequence[Trial], seed: int, k: int) -> Scales:
        """The scales that promise most under a Gaussian process of the loss.

        A diverged trial counts as the worst of the others. Losses are cut off as far above their median as the best is
        below it: one huge loss would make all others look alike.
        """
        optuna = self.optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        worst = max((trial.loss for trial in before if math.isfinite(trial.loss)), default=0.0)
        losses = sorted(min(trial.loss, worst) for trial in before)
        cap = 2 * losses[len(losses) // 2] - losses[0]
        space = dict.fromkeys(
            Scales._fields, optuna.distributions.FloatDistribution(1 / REACH, REACH, log=True)
        )
        history = [
            optuna.trial.create_trial(
                params=t.scales._asdict(), distributions=space, value=min(t.loss, cap)
            )
            for t in before
        ]
        number = int(rng.integers(rng.fold_in(rng.root(seed, "tune"), k), 0, 2**32 - 1))
        samplers = optuna.samplers
        for sampler in (
            samplers.GPSampler(seed=number, n_startup_trials=1),
            samplers.RandomSampler(seed=number),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study = optuna.create_study(sampler=sampler)
                study.add_trials(history)
                drawn = study.ask(space).params
            scales = Scales(**{level: _round(scale, 3) for level, scale in drawn.items()})
            if scales not in [
                t.scales for t in before
            ]:  # they would give the same run again: any others tell more
                break
        return scales

    def _report(self, quiet: bool, as_json: bool) -> int:
        """The table of all trials in the folder, whichever call they are from, and tuned.toml from the best."""
        methods = {}
        for path in sorted(self.folder.glob("*/trial-0")):
            methods[path.parent.name] = _trials(path.parent)
        best = _best(methods)
        tuned = None
        if best:
            counts = {name: len(trials) for name, trials in methods.items()}
            file = self.folder / "tuned.toml"
            write_atomically(file, self._tuned(best, counts))
            tuned = str(file)
        rows = []
        for name, trials in methods.items():
            rows += [self._row(name, trial, best.get(name)) for trial in trials]
        if as_json:
            print(json.dumps({"trials": rows, "tuned": tuned}))
        elif not quiet:
            show(_listing(rows))
            if tuned:
                print(f"tuned: {tuned}")
        if any(status.startswith("failed") for status in self.ended.values()):
            return 2
        return 0 if self.methods.keys() <= best.keys() else 3

    def _row(self, name: str, trial: Trial, best: Trial | None) -> dict[str, Any]:
        return {
            "algorithm": name,
            "trial": trial.number,
            "scale_x": trial.scales.x,
            "scale_y": trial.scales.y,
            "upper_loss": trial.loss if math.isfinite(trial.loss) else None,
            "test_accuracy": trial.accuracy,
            "status": self.ended.get(f"{name}/trial-{trial.number}", trial.status),
            "best": trial is best,
        }

    def _tuned(self, best: Mapping[str, Trial], counts: Mapping[str, int]) -> str:
        """The experiment with the best settings of every method, on seeds other than the one they were tuned on."""
        seed, rounds = (next(iter(best.values())).config[key] for key in ("seed", "rounds"))
        comment = [
            f"Step sizes tuned on seed {seed}, {rounds} rounds a trial: one scale for the upper level (x), one for the",
            "lower level and the linear system (y). The upper loss on the clients' validation data, mean over the last",
            "quarter of the evaluations, decided.",
        ]
        sections = dict(self.experiment.get("algorithms", {}))
        for name, (number, scales, _, loss, _, config) in best.items():
            comment += [
                f"{name}: trial {number} of {counts[name]}, x {scales.x:g}, y {scales.y:g}, loss {loss:.6g}"
            ]
            settings = {key: value for key, value in config["algorithm"].items() if key != "name"}
            what = {
                key: value
                for key, value in sections.get(name, {}).items()
                if key in ("algorithm", "task", "data")
            }
            sections[name] = {**what, **settings, "environment": config["environment"]}
        title = f"{self.experiment.get('title', '')} (step sizes tuned)".strip()
        compare = [name for name in self.experiment.get("compare", []) if name in best]
        compare += [name for name in best if name not in compare]
        changed = {"title": title, "seed": seed + 1, "compare": compare, "algorithms": sections}
        return "".join(f"# {line}\n" for line in comment) + tomli_w.dumps(
            {**self.experiment, **changed}
        )


def _numbered(path: Path) -> list[tuple[int, Path]]:
    """The trials of a method that have begun, in their order."""
    begun = [
        (file.parent.name.removeprefix("trial-"), file.parent)
        for file in path.glob(f"trial-*/{folders.CONFIG}")
    ]
    return sorted((int(number), path) for number, path in begun if number.isdecimal())


def _read(path: Path) -> dict[str, Any]:
    return configs.read(str(path / folders.CONFIG))[1]


def _trials(path: Path) -> list[Trial]:
    """A method's trials as they lie on disk; its own settings, which the scales multiply, are those of trial 0."""
    own = (
        _read(path / "trial-0")["algorithm"]
        if (path / "trial-0" / folders.CONFIG).exists()
        else None
    )
    return [_trial(k, folder, own) for k, folder in _numbered(path) if own]


def _best(methods: Mapping[str, Sequence[Trial]]) -> dict[str, Trial]:
    """The trial of least loss of each method that has completed one."""
    best = {}
    for name, trials in methods.items():
        least = min(trials, key=lambda trial: trial.loss, default=None)
        if least and math.isfinite(least.loss):
            best[name] = least
    return best


def _trial(number: int, path: Path, own: Mapping[str, Any]) -> Trial:
    """The loss is the mean over the last quarter of the evaluations: each one swings with the clients before it."""
    config = _read(path)
    scales = _scales(config["algorithm"], own)
    if not (path / folders.METRICS).exists():
        return Trial(number, scales, "unfinished", math.inf, None, config)
    run = folders.read(path)
    losses = [metrics["upper_loss"] for metrics in run.history]
    last = losses[-math.ceil(len(losses) / 4) :]
    loss = sum(last) / len(last) if run.status == "completed" else math.inf
    accuracy = run.summary["final_test_accuracy"] if run.summary else None
    return Trial(number, scales, run.status, loss, accuracy, config)


def _level(setting: str) -> str | None:
    """Whose step size a setting is, by its name; the linear system's go with the lower level's."""
    words = setting.split("_")
    if "lr" in words and "x" in words:
        return "x"
    return (
        "y" if "lr" in words and {"y", "z", "neumann"} & set(words) else None
    )  # `server_lr` serves both levels


def _member(config: Config, scales: Scales) -> Config:
    """A method's run with its step sizes times the scales."""
    if scales == Scales():
        return config
    settings = config.table["algorithm"]
    levels = {key: level for key in settings if (level := _level(key))}
    scaled = {key: _scaled(settings[key], getattr(scales, level)) for key, level in levels.items()}
    return configs.resolve("trial", {**config.table, "algorithm": {**settings, **scaled}})


def _scaled(value: Any, scale: float) -> Any:
    """A step size, its bounds or its schedule, times `scale`."""
    if isinstance(value, Mapping):
        return {
            key: _scaled(item, scale) if key in ("start", "end") else item
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_scaled(item, scale) for item in value]
    return _round(value * scale, 9)


def _scales(settings: Mapping[str, Any], own: Mapping[str, Any]) -> Scales:
    """The way back: scales have three digits, so that a quotient of step sizes gives them exactly."""
    levels = {level: key for key in settings if (level := _level(key))}
    return Scales(
        **{
            level: _round(_size(settings[key]) / _size(own[key]), 3)
            for level, key in levels.items()
        }
    )


def _size(step: Any) -> float:
    """The number that tells how long a step, its bounds or its schedule is."""
    first = (
        step["start"]
        if isinstance(step, Mapping)
        else step[0]
        if isinstance(step, (list, tuple))
        else step
    )
    return float(first)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _listing(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="upper loss on validation data, mean over the last quarter of the evaluations; * is the best"
    )
    for heading in (
        "algorithm",
        "trial",
        "scale x",
        "scale y",
        "upper loss",
        "final accuracy",
        "status",
    ):
        table.add_column(heading, no_wrap=heading != "status")
    for row in rows:
        loss = (
            "-"
            if row["upper_loss"] is None
            else f"{row['upper_loss']:.6g}{' *' if row['best'] else ''}"
        )
        accuracy = "-" if row["test_accuracy"] is None else f"{row['test_accuracy']:.2%}"
        scales = f"{row['scale_x']:g}", f"{row['scale_y']:g}"
        table.add_row(
            escape(row["algorithm"]),
            str(row["trial"]),
            *scales,
            loss,
            accuracy,
            escape(row["status"]),
        )
    return table
