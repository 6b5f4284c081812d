"""Metrics of single clients: how they are distributed, and those of each client."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.report._axes import Spread, spread
from fedbilevel.report._curves import Array, Group
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.metric import smaller_is_better

# What is said of a distribution; the keys are those of `fedbilevel.runs.clients.distribution`.
COLUMNS = {
    "mean": "Mean",
    "median": "Median",
    "p10": "Worst tenth",
    "worst": "Worst",
    "spread": "Spread",
}
LINES = {key: COLUMNS[key] for key in ("median", "p10", "worst")}  # drawn over rounds


def _metrics_of(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the metrics of single clients in the summary of a run."""
    metrics: dict[str, dict[str, Any]] = (run.summary or {}).get("client_metrics", {})
    return metrics  # older runs have none


def personal_metrics(groups: Sequence[Group]) -> list[str]:
    """Return the names of the metrics of single clients."""
    names: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            names |= dict.fromkeys(_metrics_of(run))
    return list(names)


def final_values(group: Group, name: str) -> Array:
    """Return the last values of a metric, of the clients of all seeds."""
    values = [_metrics_of(run).get(name, {}).get("values", []) for run in group.runs]
    return np.array([value for of_run in values for value in of_run], dtype=np.float64)


def distributions(groups: Sequence[Group], name: str) -> list[tuple[str, dict[str, Spread | None]]]:
    """Return how the last values are distributed, by the label of a curve and by column."""
    rows = []
    for group in groups:
        found = [of_run[name] for of_run in map(_metrics_of, group.runs) if name in of_run]
        if found:
            rows.append(
                (group.label, {key: spread(each[key] for each in found) for key in COLUMNS})
            )
    return rows


Clients = list[tuple[int, list[float | None]]]


def client_values(group: Group, names: Sequence[str]) -> Clients:
    """Return every client of the first seed with its last value of each metric."""
    table: dict[int, list[float | None]] = {}
    metrics = _metrics_of(group.runs[0])
    for column, name in enumerate(names):
        entry = metrics.get(name, {"clients": [], "values": []})
        for client, value in zip(entry["clients"], entry["values"], strict=True):
            table.setdefault(client, [None] * len(names))[column] = value
    return sorted(table.items())


def worst(clients: Clients, name: str, count: int) -> Clients:
    """Return the clients with the worst values of the first metric, which has this name."""
    sign = -1 if smaller_is_better(name) else 1

    def goodness(client: tuple[int, list[float | None]]) -> float:
        first = client[1][0]
        if first is None:
            return np.inf
        return sign * first

    return sorted(sorted(clients, key=goodness)[:count])
