"""The search for step sizes: what a trial is, which one comes next, and the best one as a file.

A trial is a run whose step sizes are those of the experiment times two scales, one for each level.
All that is known of a trial is in its run folder `trial-K`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedbilevel.core import rng
from fedbilevel.core.extras import import_extra
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.config import Config
from fedbilevel.experiments.schema import Table
from fedbilevel.experiments.steps import round_to, scale_settings, step_size_level
from fedbilevel.runs import folder as folders

SCALE_LIMIT = 10.0  # scales lie between 1 / SCALE_LIMIT and SCALE_LIMIT
EDGE = 0.95  # a scale that is nearer to the limit than this factor lies on the edge
SCALE_DIGITS = 3


class Scales(NamedTuple):
    """The factors of a trial's step sizes.

    Args:
        x: Factor of the step sizes of the upper level.
        y: Factor of the step sizes of the lower level: of y, of the linear system, and of u.
    """

    x: float = 1.0
    y: float = 1.0


class Trial(NamedTuple):
    """A trial and its result.

    Args:
        number: The number of the trial; number 0 has the algorithm's own settings.
        scales: The factors of its step sizes.
        status: How its run has ended, or "unfinished".
        loss: The upper loss on validation data, mean over the last quarter of the evaluations. It
            is infinite unless the run has completed.
        metric: The metric that the run is judged by; empty if the run has not ended.
        final: Its last value, if there is one.
        config: The resolved experiment.
    """

    number: int
    scales: Scales
    status: str
    loss: float
    metric: str
    final: float | None
    config: Table


# Step sizes and their scales.


def check_tunable(label: str, config: Config) -> None:
    """Refuse an algorithm that does not have a step size for each level."""
    levels = {step_size_level(setting) for setting in config.table["algorithm"]}
    if not levels >= {"x", "y"}:
        raise ValueError(
            f"{label} does not have a step size for each level; there is nothing to tune"
        )


def scale_step_sizes(config: Config, scales: Scales) -> Config:
    """Return the config with its step sizes multiplied by the scales of their levels."""
    if scales == Scales():
        return config
    settings = scale_settings(config.table["algorithm"], *scales)
    return configs.resolve("trial", {**config.table, "algorithm": settings})


def scales_between(settings: Mapping[str, Any], unscaled: Mapping[str, Any]) -> Scales:
    """Return the scales that `scale_step_sizes` was called with.

    A quotient of step sizes gives them exactly, because they have few digits.

    Args:
        settings: The algorithm's settings after scaling.
        unscaled: Its settings before.
    """
    scales = {}
    for key, value in settings.items():
        level = step_size_level(key)
        if level is not None:
            quotient = _magnitude(value) / _magnitude(unscaled[key])
            scales[level] = round_to(quotient, SCALE_DIGITS)
    return Scales(**scales)


def _magnitude(step_size: Any) -> float:
    """Return a step size, or the first number of its bounds or its schedule."""
    if isinstance(step_size, Mapping):
        step_size = step_size["start"]
    if isinstance(step_size, (list, tuple)):
        step_size = step_size[0]
    return float(step_size)


# Trials in folders.


def trial_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the trials of an algorithm that have begun: number and run folder, in their order."""
    numbered = []
    for file in folder.glob(f"trial-*/{folders.CONFIG}"):
        number = file.parent.name.removeprefix("trial-")
        if number.isdecimal():
            numbered.append((int(number), file.parent))
    return sorted(numbered)


def read_config(path: Path) -> Table:
    """Read the config of a trial, which may not have evaluated anything yet."""
    _, table = configs.read(str(path / folders.CONFIG))
    return table


def read_trials(folder: Path) -> list[Trial]:
    """Read the trials of an algorithm from its folder.

    The settings that their scales multiply are those of trial 0; without it there are none.
    """
    if not (folder / "trial-0" / folders.CONFIG).exists():
        return []
    unscaled = read_config(folder / "trial-0")["algorithm"]
    return [_read_trial(number, path, unscaled) for number, path in trial_folders(folder)]


def _read_trial(number: int, path: Path, unscaled: Table) -> Trial:
    config = read_config(path)
    scales = scales_between(config["algorithm"], unscaled)
    if not (path / folders.METRICS).exists():
        return Trial(number, scales, "unfinished", math.inf, "", None, config)
    run = folders.read(path)
    loss = math.inf
    if run.status == "completed":
        # A mean over several evaluations, because each depends on the last clients sampled.
        last_quarter = run.history[-math.ceil(len(run.history) / 4) :]
        loss = sum(metrics["upper_loss"] for metrics in last_quarter) / len(last_quarter)
    metric = ""
    final = None
    if run.summary:
        metric = run.metric.name
        final = run.summary["metric"]["final"]
    return Trial(number, scales, run.status, loss, metric, final, config)


def best_trials(trials: Mapping[str, Sequence[Trial]]) -> dict[str, Trial]:
    """Return the trial of least loss of each algorithm that has completed one."""
    best = {}
    for label, of_algorithm in trials.items():
        least = min(of_algorithm, key=lambda trial: trial.loss, default=None)
        if least and math.isfinite(least.loss):
            best[label] = least
    return best


def edge_warnings(best: Mapping[str, Trial]) -> list[str]:
    """Return a sentence for each best trial that lies on the edge of the box of scales.

    Better settings may lie outside then.

    Args:
        best: The best trial of each algorithm.

    Returns:
        The sentences, each of which names the algorithm and the level.
    """
    found = []
    for label, trial in best.items():
        for level, scale in trial.scales._asdict().items():
            if max(scale, 1 / scale) >= EDGE * SCALE_LIMIT:
                found.append(
                    f"{label}: the best scale of {level} is {scale:g}, on the edge of the search "
                    f"({1 / SCALE_LIMIT:g} to {SCALE_LIMIT:g}); tune tuned.toml again"
                )
    return found


# The next trial, and the outcome.


def draw_scales(trials: Sequence[Trial], seed: int, number: int) -> Scales:
    """Draw the scales of the next trial, the most promising under a Gaussian process of the loss.

    The draw depends on the arguments only. A diverged trial counts as the worst of the others.
    Losses are cut off as far above their median as the best one is below it, because one huge loss
    would make all others look alike.

    Args:
        trials: The earlier trials, at least one.
        seed: The seed of the experiment.
        number: The number of the trial.

    Returns:
        Scales that no earlier trial has, as far as a second, random draw avoids them.
    """
    optuna = import_extra("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    worst = max((trial.loss for trial in trials if math.isfinite(trial.loss)), default=0.0)
    losses = sorted(min(trial.loss, worst) for trial in trials)
    cutoff = 2 * losses[len(losses) // 2] - losses[0]
    scale = optuna.distributions.FloatDistribution(1 / SCALE_LIMIT, SCALE_LIMIT, log=True)
    space = dict.fromkeys(Scales._fields, scale)
    history = []
    for trial in trials:
        past = optuna.trial.create_trial(
            params=trial.scales._asdict(), distributions=space, value=min(trial.loss, cutoff)
        )
        history.append(past)
    key = rng.fold_in(rng.root(seed, "tune"), number)
    sampler_seed = int(rng.integers(key, 0, 2**32 - 1))
    for sampler in (
        optuna.samplers.GPSampler(seed=sampler_seed, n_startup_trials=1),
        optuna.samplers.RandomSampler(seed=sampler_seed),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(sampler=sampler)
            study.add_trials(history)
            drawn = study.ask(space).params
        scales = Scales(round_to(drawn["x"], SCALE_DIGITS), round_to(drawn["y"], SCALE_DIGITS))
        # Runs repeat to the bit: the same scales again would tell nothing new.
        if scales not in [trial.scales for trial in trials]:
            break
    return scales


def tuned_experiment(
    experiment: Mapping[str, Any], best: Mapping[str, Trial], counts: Mapping[str, int]
) -> str:
    """Return an experiment with the best settings of every algorithm, as TOML.

    Its seed is another than that of the trials, so that a comparison is not biased towards them.

    Args:
        experiment: The experiment that the settings are written into, as TOML can hold it.
        best: The best trial of each algorithm, at least one.
        counts: The number of trials of each algorithm.
    """
    tuning = next(iter(best.values())).config
    comment = [
        f"Step sizes tuned on seed {tuning['seed']}, {tuning['rounds']} rounds per trial: one",
        "scale for the upper level (x), one for the lower level and the linear system (y). The",
        "best trial has the least upper loss on the clients' validation data, mean over the last",
        "quarter of the evaluations.",
    ]
    sections = dict(experiment.get("algorithms", {}))
    for label, trial in best.items():
        scales = f"x {trial.scales.x:g}, y {trial.scales.y:g}"
        comment.append(
            f"{label}: trial {trial.number} of {counts[label]}, {scales}, loss {trial.loss:.6g}"
        )
        section = {}
        for key in ("algorithm", "task", "data"):
            if key in sections.get(label, {}):
                section[key] = sections[label][key]
        section |= trial.config["algorithm"]
        del section["name"]
        section["environment"] = trial.config["environment"]
        sections[label] = section
    compare = [label for label in experiment.get("compare", []) if label in best]
    compare += [label for label in best if label not in compare]
    comment += [f"warning: {warning}" for warning in edge_warnings(best)]
    changes = {
        "title": f"{experiment.get('title', '')} (step sizes tuned)".strip(),
        "seed": tuning["seed"] + 1,
        "compare": compare,
        "algorithms": sections,
    }
    lines = [f"# {line}\n" for line in comment]
    return "".join(lines) + tomli_w.dumps({**experiment, **changes})
