"""The tables of a report: the ranking, costs by phase and by client, differing settings."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbilevel.report._axes import AXES, Spread, spread
from fedbilevel.report._curves import Group, column
from fedbilevel.runs.folder import RunFolder

TARGETS = (0.8, 0.9, 0.93, 0.95, 0.97)  # test accuracies
PHASE_COSTS = ("rounds", "bytes_up", "bytes_down", "samples", "gradients", "flops", "peak_bytes")
CLIENT_COSTS = ("flops", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Row:
    """A row of the ranked table.

    `cost[axis][target]` is over the seeds that reached the target, None if none did.
    """

    label: str
    seeds: int
    statuses: dict[str, int]
    accuracy: Spread | None
    loss: Spread | None
    flops: Spread | None
    peak: Spread | None
    cost: dict[str, dict[float, Spread | None]]

    def reached(self, axis: str) -> dict[float, Spread]:
        """Return the costs of the targets that every seed reached."""
        costs = {}
        for target, cost in self.cost[axis].items():
            if cost is not None and cost.count == self.seeds:
                costs[target] = cost
        return costs


def table_rows(groups: Iterable[Group]) -> list[Row]:
    """Return a row of the ranked table per group, in the order of the groups."""
    return [_table_row(group) for group in groups]


def _table_row(group: Group) -> Row:
    runs = group.runs
    costs_of_runs = [_costs_to_targets(run) for run in runs]
    cost: dict[str, dict[float, Spread | None]] = {}
    for axis in AXES:
        cost[axis] = {}
        for target in TARGETS:
            cost[axis][target] = spread(costs[axis][target] for costs in costs_of_runs)
    return Row(
        label=group.label,
        seeds=len(runs),
        statuses=dict(Counter(run.status for run in runs)),
        accuracy=spread(_final(run, "test_accuracy") for run in runs),
        loss=spread(_final(run, "upper_loss") for run in runs),
        flops=spread(_final(run, "flops") for run in runs),
        peak=spread([max(_final(run, "peak_bytes") for run in runs)]),
        cost=cost,
    )


def _final(run: RunFolder, metric: str) -> float:
    if not run.history:
        return np.nan
    return float(column(run, metric)[-1])


def _costs_to_targets(run: RunFolder) -> dict[str, dict[float, float]]:
    """Return the cost to each target along each axis, NaN if the run never reached it."""
    accuracy = column(run, "test_accuracy")
    costs = {}
    for axis in AXES:
        cost = column(run, axis)
        costs[axis] = dict.fromkeys(TARGETS, np.nan)
        for target in TARGETS:
            reached_at = np.flatnonzero(accuracy >= target)
            if reached_at.size:
                costs[axis][target] = float(cost[reached_at[0]])
    return costs


def rank(rows: Iterable[Row], axis: str) -> list[Row]:
    """Sort rows by the highest target that every seed reached, then by the cost to it.

    Rows that are equal so far are sorted by final accuracy, then by final loss.
    """

    def sort_key(row: Row) -> tuple[float, float, float, float]:
        target, cost = max(row.reached(axis).items(), default=(0.0, None))
        return (
            -target,
            _mean_or(0.0, cost),
            -_mean_or(0.0, row.accuracy),
            _mean_or(np.inf, row.loss),
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
