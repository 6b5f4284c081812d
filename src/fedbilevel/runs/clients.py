"""Metrics of single clients, each at its own x and y, and how they are distributed over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.core.rng import root, subset
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation
from fedbilevel.runs.metric import smaller_is_better

EvaluateClient = Callable[[Tree, Tree, int], Mapping[str, float]]
"""From the whole x and y of one client and its number to metrics by name."""

MAX_CLIENTS = 1000  # that are evaluated


class ClientMetrics:
    """Evaluates clients at their own x and y, and summarises what comes out.

    In a federation of more than 1,000 clients, 1,000 are evaluated, drawn once for a run. In a
    simulation `evaluate` is called here; a client on another machine evaluates itself, as the task
    of its experiment says, and sends the numbers.

    Args:
        evaluate: Evaluates one client.
        fed: The federation.

    Attributes:
        clients: The clients that are evaluated.
        latest: What the last evaluation returned, by client; real clients may not have answered.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.runs.clients import ClientMetrics
        >>> task = fb.tasks.load("quadratic", clients=3)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> metrics = ClientMetrics(lambda x, y, client: {"accuracy": 0.25 * client}, fed)
        >>> metrics(*task.problem.start)["accuracy_worst"]
        0.0
        >>> metrics.summary()["accuracy"]["values"]
        [0.0, 0.25, 0.5]
    """

    def __init__(self, evaluate: EvaluateClient, fed: Federation) -> None:
        self.evaluate = evaluate
        self.fed = fed
        count = min(len(fed), MAX_CLIENTS)
        self.clients = sorted(subset(root(fed.seed, "client metrics"), len(fed), count))
        self.latest: dict[int, dict[str, float]] = {}

    def __call__(self, x: Tree, y: Tree) -> dict[str, float]:
        """Evaluate the clients.

        Args:
            x: The server's part of x.
            y: The server's part of y.

        Returns:
            What `distribution` says of each metric, by name, the mean without a suffix.
        """
        if self.fed.transport.reads_own:
            self.latest = {client: self._evaluate(client, x, y) for client in self.clients}
        else:
            self.latest = self.fed.transport.client_metrics(self.clients, x, y)
        flat: dict[str, float] = {}
        for name, (_, values) in self._by_metric().items():
            flat |= with_suffixes(name, distribution(name, values))
        return flat

    def _evaluate(self, client: int, x: Tree, y: Tree) -> dict[str, float]:
        with torch.no_grad():
            metrics = self.evaluate(*self.fed.personal(client, x, y), client)
        return as_numbers("evaluate_client", metrics)

    def _by_metric(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the clients that have each metric, and their values."""
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for client, metrics in self.latest.items():
            for name, value in metrics.items():
                clients, values = columns.setdefault(name, ([], []))
                clients.append(client)
                values.append(value)
        return columns

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return the last evaluation, for the summary of a run.

        Returns:
            For each metric what `distribution` says, and "clients" and their "values".
        """
        return {
            name: {**distribution(name, values), "clients": clients, "values": values}
            for name, (clients, values) in self._by_metric().items()
        }


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return how a metric is distributed over clients.

    Args:
        name: The metric; `smaller_is_better` says in which direction it is better.
        values: One value per client.

    Returns:
        "mean", "median", "worst", "p10" (the value that the worst tenth of the clients does not
        exceed; of losses, does not fall below) and "spread" (the standard deviation).

    Examples:
        >>> distribution("accuracy", [0.5, 0.7, 0.9])["worst"]
        0.5
        >>> distribution("test_loss", [0.5, 0.7, 0.9])["worst"]
        0.9
    """
    if smaller_is_better(name):
        worst_tenth = 0.9
        worst = max(values)
    else:
        worst_tenth = 0.1
        worst = min(values)
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "worst": worst,
        "p10": float(np.quantile(values, worst_tenth)),
        "spread": float(np.std(values)),
    }


def with_suffixes(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return a distribution as metrics: the mean under its name, the others with a suffix.

    Args:
        name: The metric.
        values: What `distribution` returned.

    Returns:
        Numbers by name.

    Examples:
        >>> with_suffixes("accuracy", {"mean": 0.5, "worst": 0.1})
        {'accuracy': 0.5, 'accuracy_worst': 0.1}
    """
    return {name if key == "mean" else f"{name}_{key}": value for key, value in values.items()}


def as_numbers(source: str, metrics: Mapping[str, object]) -> dict[str, float]:
    """Return metrics as numbers of Python.

    Args:
        source: The function that returned them, for messages.
        metrics: Numbers, or tensors and arrays of one number, by name.

    Returns:
        Numbers by name.

    Raises:
        TypeError: A value is not a number.

    Examples:
        >>> as_numbers("evaluate", {"accuracy": torch.tensor(0.5)})
        {'accuracy': 0.5}
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{source} returned {metrics!r:.80}; it must return a dict of numbers")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        number = value
        if isinstance(value, (Tensor, np.generic)) and value.ndim == 0:
            number = value.item()
        if not isinstance(number, (int, float)):
            raise TypeError(f"{source} returned {name} = {value!r}; a metric must be a number")
        numbers[name] = number
    return numbers
