"""The tables of a report: the ranking, costs by phase and by client, differing settings."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedbilevel.report._axes import AXES, Spread, spread
from fedbilevel.report._curves import Group, column, evaluated, judged_by
from fedbilevel.runs.folder import RunFolder, Table
from fedbilevel.runs.metric import TEST_ACCURACY, Metric

PHASE_COSTS = ("rounds", "bytes_up", "bytes_down", "samples", "gradients", "flops", "peak_bytes")
CLIENT_COSTS = ("flops", "bytes_up", "bytes_down")
WAYS = (0.5, 0.8, 0.9, 0.95, 0.99)  # from the start to the best end, where no targets are given
TARGET_DIGITS = 3


@dataclass(frozen=True)
class Row:
    """A row of the ranked table.

    `cost[axis][target]` is over the seeds that reached the target, None if none did.
    """

    label: str
    seeds: int
    statuses: dict[str, int]
    metric: Metric
    finals: dict[str, Spread | None]
    flops: Spread | None
    peak: Spread | None
    cost: dict[str, dict[float, Spread | None]]

    @property
    def final(self) -> Spread | None:
        """The last values of the metric that the runs are judged by."""
        return self.finals.get(self.metric.name)

    def reached(self, axis: str) -> dict[float, Spread]:
        """Return the costs of the targets that every seed reached, the hardest target last."""
        costs = {}
        for target, cost in self.cost[axis].items():
            if cost is not None and cost.count == self.seeds:
                costs[target] = cost
        return costs


def table_rows(groups: Sequence[Group]) -> list[Row]:
    """Return a row of the ranked table per group, in the order of the groups."""
    runs = [run for group in groups for run in group.runs]
    metric = judged_by(runs)
    if not metric.targets or (metric == TEST_ACCURACY and not _is_ever_reached(metric, runs)):
        metric = replace(metric, targets=_chosen_targets(metric, groups))
    names = [metric.name, "upper_loss", "test_accuracy", *evaluated(runs)]
    return [_table_row(group, metric, list(dict.fromkeys(names))) for group in groups]


def _is_ever_reached(metric: Metric, runs: Iterable[RunFolder]) -> bool:
    """Whether some run reaches the easiest target of a metric at some time."""
    best = metric.best(value for run in runs for value in column(run, metric.name))
    return best is not None and metric.is_reached(best, metric.targets[0])


def _chosen_targets(metric: Metric, groups: Iterable[Group]) -> list[float]:
    """Return targets on the way from the start to the best end; none if nothing has improved.

    The way is that of the logarithm if the values are positive and span more than a decade.
    """
    starts = []
    ends = []
    for group in groups:
        columns = [column(run, metric.name) for run in group.runs]
        known = [values[np.isfinite(values)] for values in columns]
        starts += [float(values[0]) for values in known if len(values)]
        ends.append(float(np.mean([values[-1] for values in known if len(values)] or [np.nan])))
    best = metric.best(ends)
    if best is None:
        return []
    start = float(np.median(starts))
    if metric.sign * (start - best) <= 0:
        return []
    targets = []
    for way in WAYS:
        target = float(f"{_on_the_way(start, best, way):.{TARGET_DIGITS}g}")
        if metric.is_reached(best, target):
            targets.append(target)
    return targets


def _on_the_way(start: float, end: float, way: float) -> float:
    """Return the value after a fraction of the way between two values."""
    if min(start, end) > 0 and max(start, end) > 10 * min(start, end):
        return float(start ** (1 - way) * end**way)
    return start + way * (end - start)


def _table_row(group: Group, metric: Metric, names: Sequence[str]) -> Row:
    runs = group.runs
    costs_of_runs = [_costs_to_targets(run, metric) for run in runs]
    cost: dict[str, dict[float, Spread | None]] = {}
    for axis in AXES:
        cost[axis] = {}
        for target in metric.targets:
            cost[axis][target] = spread(costs[axis][target] for costs in costs_of_runs)
    return Row(
        label=group.label,
        seeds=len(runs),
        statuses=dict(Counter(run.status for run in runs)),
        metric=metric,
        finals={name: spread(_final(run, name) for run in runs) for name in names},
        flops=spread(_final(run, "flops") for run in runs),
        peak=spread([max(_final(run, "peak_bytes") for run in runs)]),
        cost=cost,
    )


def _final(run: RunFolder, metric: str) -> float:
    if not run.history:
        return np.nan
    return float(column(run, metric)[-1])


def _costs_to_targets(run: RunFolder, metric: Metric) -> dict[str, dict[float, float]]:
    """Return the cost to each target along each axis, NaN if the run never reached it."""
    values = column(run, metric.name)
    costs = {}
    for axis in AXES:
        cost = column(run, axis)
        costs[axis] = dict.fromkeys(metric.targets, np.nan)
        for target in metric.targets:
            reached_at = np.flatnonzero(metric.sign * values <= metric.sign * target)
            if reached_at.size:
                costs[axis][target] = float(cost[reached_at[0]])
    return costs


def rank(rows: Iterable[Row], axis: str) -> list[Row]:
    """Sort rows by the hardest target that every seed reached, then by the cost to it.

    Rows that are equal so far are sorted by the final value of the metric, then by final loss.
    """

    def sort_key(row: Row) -> tuple[float, float, float, float]:
        reached = row.reached(axis)
        hardest, cost = 0, None
        for number, target in enumerate(row.metric.targets, start=1):
            if target in reached:
                hardest, cost = number, reached[target]
        return (
            -hardest,
            _mean_or(0.0, cost),
            row.metric.sign * _mean_or(row.metric.sign * np.inf, row.final),
            _mean_or(np.inf, row.finals.get("upper_loss")),
        )

    return sorted(rows, key=sort_key)


def _mean_or(default: float, value: Spread | None) -> float:
    if value is None:
        return default
    return value.mean


def config_differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the settings that differ between groups, except seed and algorithm.

    Returns:
        By dotted key the value of each group, None where it has none.
    """
    configs = [dict(_flatten(group.runs[0].config)) for group in groups]
    keys: set[str] = set().union(*configs)
    differences = {}
    for key in sorted(keys - {"seed", "algorithm.name"}):
        values = [config.get(key) for config in configs]
        if any(value != values[0] for value in values):
            differences[key] = values
    return differences


def shared_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the settings that all groups share, as nested tables."""
    names = {group.runs[0].config["algorithm"]["name"] for group in groups}
    left_out = {"seed", *config_differences(groups)}
    if len(names) > 1:
        left_out.add("algorithm.name")
    return _without(groups[0].runs[0].config, left_out)


def _without(table: Mapping[str, Any], left_out: Container[str], prefix: str = "") -> Table:
    """Return a table without the keys that are named with the tables around them."""
    kept: Table = {}
    for key, value in table.items():
        if isinstance(value, dict):
            inner = _without(value, left_out, f"{prefix}{key}.")
            if inner:
                kept[key] = inner
        elif prefix + key not in left_out:
            kept[key] = value
    return kept


def unusual(values: Sequence[Any]) -> list[bool]:
    """Return which values differ from the one that more than half of all are, if there is one."""
    for usual in values:
        differ = [value != usual for value in values]
        if sum(differ) < len(values) / 2:
            return differ
    return [False] * len(values)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def phase_costs(group: Group) -> dict[str, dict[str, float]]:
    """Return what each phase cost, mean over the finished seeds of a group.

    A phase that a seed never entered cost it nothing.
    """
    ledgers = [run.summary["ledger"] for run in group.runs if run.summary is not None]
    costs: dict[str, dict[str, float]] = {}
    for ledger in ledgers:
        for phase in ledger:
            if phase not in costs:
                costs[phase] = {c: _mean_phase_cost(ledgers, phase, c) for c in PHASE_COSTS}
    return costs


def _mean_phase_cost(ledgers: Iterable[Mapping[str, Any]], phase: str, cost: str) -> float:
    values = []
    for ledger in ledgers:
        if phase in ledger:
            values.append(ledger[phase].get(cost, np.nan))  # older runs count fewer costs
        else:
            values.append(0.0)
    return float(np.mean(values))


def client_costs(group: Group) -> list[dict[str, float]]:
    """Return what a client paid, mean over the finished seeds of a group.

    Returns:
        An entry for all clients with the same peak memory, sorted by it; `clients` is their number.
    """
    same_peak: dict[float, list[dict[str, float]]] = defaultdict(list)
    finished = [run.summary for run in group.runs if run.summary is not None]
    for summary in finished:
        for entry in summary.get("clients", []):  # older runs have none
            same_peak[entry["peak_bytes"]].append(entry)
    costs = []
    for peak, entries in sorted(same_peak.items()):
        counts = [entry["clients"] for entry in entries]
        means = {"clients": sum(counts) / len(finished), "peak_bytes": peak}
        for cost in CLIENT_COSTS:
            means[cost] = float(np.average([entry[cost] for entry in entries], weights=counts))
        costs.append(means)
    return costs
