"""The trials of `fedbilevel tune`: processes, the table of trials, and tuned.toml."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedbilevel import report
from fedbilevel.cli.comparison import Comparison, format_value, print_table
from fedbilevel.cli.options import called_command
from fedbilevel.core.extras import import_extra
from fedbilevel.experiments.config import Config
from fedbilevel.experiments.tune import (
    Scales,
    Trial,
    best_trials,
    check_tunable,
    draw_scales,
    edge_warnings,
    read_config,
    read_trials,
    scale_step_sizes,
    scales_between,
    trial_folders,
    tuned_experiment,
)
from fedbilevel.runs import folder as folders
from fedbilevel.runs.folder import check_same_settings, holds_run, without_none, write_atomically


class Tuning(Comparison):
    """Runs trials `ALGORITHM/trial-K`: one after another per algorithm, algorithms side by side.

    The scales of trial K depend on the seed, on K and on the trials before it only, and all that is
    known of those is in their folders. A search that was killed and resumed therefore ends as one
    that was not.

    Args:
        folder: The folder of the search.
        methods: The config of each algorithm, by its label.
        trials: The number of trials per algorithm.
        experiment: The experiment that tuned.toml gives the best settings to.
        data_dir: Folder of the data sets. None: the default folder.
        resume: Whether to resume the trials in the folder.
        jobs: How many runs at the same time.

    Raises:
        FileExistsError: If the folder holds trials that are not to be resumed.
        ValueError: If optuna is not installed, if an algorithm has no step sizes to tune, or if a
            trial in the folder has other settings.
    """

    extensible = ()  # another budget would have led to other draws

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
        import_extra("optuna", "tune")  # an error shows here, not after the first trial
        self.methods = methods
        self.trials = trials
        self.experiment = without_none(experiment)
        begun = {}
        for label, config in methods.items():
            check_tunable(label, config)
            for number, path in trial_folders(folder / label):
                scales = Scales()
                if number:
                    settings = read_config(path)["algorithm"]
                    scales = scales_between(settings, config.table["algorithm"])
                begun[f"{label}/trial-{number}"] = scale_step_sizes(config, scales)
        super().__init__(folder, begun, data_dir, resume, jobs)
        self._check_other_algorithms()
        for label in methods:
            self._add_trial(label)

    def _check_other_algorithms(self) -> None:
        """Refuse algorithms of an earlier call that were tuned on another problem.

        tuned.toml holds their settings too.
        """
        *_, config = self.methods.values()  # the problem is that of every config
        for path in self.folder.glob("*/trial-0"):
            if path.parent.name not in self.methods and holds_run(path):
                own = ("algorithm", "label", "environment", "runtime")
                check_same_settings(path, config.table, ignoring=own)

    def _after_member(self, name: str) -> None:
        self._add_trial(name.split("/")[0])

    def _add_trial(self, label: str) -> None:
        """Add the next trial of an algorithm, once all of its trials so far have ended."""
        known = {name for name in self.members if name.startswith(f"{label}/")}
        number = 0
        while f"{label}/trial-{number}" in known:
            number += 1
        if number >= self.trials or not known <= self.ended.keys():
            return
        config = self.methods[label]
        scales = Scales()
        if number:
            before = []
            for trial in read_trials(self.folder / label):
                if trial.number < number and trial.status in ("completed", "diverged"):
                    before.append(trial)
            if not before:
                return  # the algorithm's own settings have failed: nothing is known to build on
            scales = draw_scales(before, config.experiment.seed, number)
        self.members[f"{label}/trial-{number}"] = scale_step_sizes(config, scales)
        self.waiting.append(f"{label}/trial-{number}")

    def _report(self, quiet: bool, as_json: bool) -> int:
        """Print all trials in the folder, also of earlier calls, and write tuned.toml."""
        trials = {}
        for path in sorted(self.folder.glob("*/trial-0")):
            trials[path.parent.name] = read_trials(path.parent)
        best = best_trials(trials)
        tuned = None
        if best:
            counts = {label: len(of_algorithm) for label, of_algorithm in trials.items()}
            file = self.folder / "tuned.toml"
            write_atomically(file, tuned_experiment(self.experiment, best, counts))
            tuned = str(file)
        warnings = edge_warnings(best)
        page = self._write_page()
        rows = []
        for label, of_algorithm in trials.items():
            for trial in of_algorithm:
                rows.append(self._row(label, trial, trial is best.get(label)))
        if as_json:
            print(json.dumps({"trials": rows, "tuned": tuned, "warnings": warnings}))
        elif not quiet:
            print_table(_trial_table(rows))
            for warning in warnings:
                print(f"warning: {warning}")
            if tuned:
                print(f"tuned: {tuned}")
            if page:
                print(f"report: {page}")
        if any(status.startswith("failed") for status in self.ended.values()):
            return 2
        if self.methods.keys() - best.keys():
            return 3
        return 0

    def _write_page(self) -> Path | None:
        """Write a page about all trials that have evaluated anything past the start."""
        drawn = []
        for path in sorted(self.folder.glob("*/trial-*")):
            if holds_run(path) and len(folders.read(path).history) > 1:
                drawn.append(path)
        if not drawn:
            return None
        page = self.folder / "report.html"
        report.write_page(drawn, page, called_command())
        return page

    def _row(self, label: str, trial: Trial, is_best: bool) -> dict[str, Any]:
        loss = None
        if math.isfinite(trial.loss):
            loss = trial.loss
        return {
            "algorithm": label,
            "trial": trial.number,
            "scale_x": trial.scales.x,
            "scale_y": trial.scales.y,
            "upper_loss": loss,
            "metric": trial.metric,
            "final": trial.final,
            "status": self.ended.get(f"{label}/trial-{trial.number}", trial.status),
            "best": is_best,
        }


def _trial_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    judges = {row["metric"] for row in rows} - {"", "upper_loss"}
    table = Table(
        title="upper loss on validation data, mean over the last quarter of the evaluations; "
        "* is the best"
    )
    for heading in ("algorithm", "trial", "scale x", "scale y", "upper loss"):
        table.add_column(heading, no_wrap=True)
    for name in sorted(judges):
        table.add_column(f"final {name.removeprefix('test_').replace('_', ' ')}", no_wrap=True)
    table.add_column("status")
    for row in rows:
        loss = "-"
        if row["upper_loss"] is not None:
            loss = f"{row['upper_loss']:.6g}"
        if row["best"]:
            loss += " *"
        finals = []
        for name in sorted(judges):
            known = name == row["metric"] and row["final"] is not None
            finals.append(format_value(name, row["final"]) if known else "-")
        table.add_row(
            escape(row["algorithm"]),
            str(row["trial"]),
            f"{row['scale_x']:g}",
            f"{row['scale_y']:g}",
            loss,
            *finals,
            escape(row["status"]),
        )
    return table
