"""Metrics of single clients, each at its own x and y, and how they are distributed over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbilevel.core.rng import root, subset
from fedbilevel.core.tree import Tree
from fedbilevel.federation import Federation

EvaluateClient = Callable[[Tree, Tree, int], Mapping[str, float]]
"""From the whole x and y of one client and its number to metrics by name."""

MAX_CLIENTS = 1000  # that are evaluated


class ClientMetrics:
    """Evaluates clients at their own x and y, and summarises what comes out.

    In a federation of more than 1,000 clients, 1,000 are evaluated, drawn once for a run.

    Args:
        evaluate: Evaluates one client.
        fed: The federation; it must be a simulation if clients own variables.

    Attributes:
        clients: The clients that are evaluated.
        latest: The values of the last evaluation, by name, one per client.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.runs.clients import ClientMetrics
        >>> task = fb.tasks.load("quadratic", clients=3)
        >>> fed = fb.simulated_federation(task.problem, task.clients)
        >>> metrics = ClientMetrics(lambda x, y, client: {"accuracy": 0.25 * client}, fed)
        >>> metrics(*task.problem.start)["accuracy_worst"]
        0.0
    """

    def __init__(self, evaluate: EvaluateClient, fed: Federation) -> None:
        self.evaluate = evaluate
        self.fed = fed
        count = min(len(fed), MAX_CLIENTS)
        self.clients = sorted(subset(root(fed.seed, "client metrics"), len(fed), count))
        self.latest: dict[str, list[float]] = {}

    def __call__(self, x: Tree, y: Tree) -> dict[str, float]:
        """Evaluate the clients.

        Args:
            x: The server's part of x.
            y: The server's part of y.

        Returns:
            What `distribution` says of each metric.
        """
        self.latest = {}
        for client in self.clients:
            with torch.no_grad():
                metrics = self.evaluate(*self.fed.personal(client, x, y), client)
            for name, value in as_numbers("evaluate_client", metrics).items():
                self.latest.setdefault(name, []).append(value)
        summary: dict[str, float] = {}
        for name, values in self.latest.items():
            summary |= distribution(name, values)
        return summary


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return how a metric is distributed over clients.

    Args:
        name: The metric. One whose name contains "loss" or "error" is better the smaller it is, any
            other the larger.
        values: One value per client.

    Returns:
        Under `name` the mean, and with a suffix "_median", "_worst", "_p10" (the value that the
        worst tenth of the clients does not exceed; of losses, does not fall below) and "_spread"
        (the standard deviation).

    Examples:
        >>> distribution("accuracy", [0.5, 0.7, 0.9])["accuracy_worst"]
        0.5
        >>> distribution("test_loss", [0.5, 0.7, 0.9])["test_loss_worst"]
        0.9
    """
    smaller_is_better = "loss" in name or "error" in name
    worst_tenth = 0.9 if smaller_is_better else 0.1
    worst = max(values) if smaller_is_better else min(values)
    return {
        name: float(np.mean(values)),
        f"{name}_median": float(np.median(values)),
        f"{name}_worst": worst,
        f"{name}_p10": float(np.quantile(values, worst_tenth)),
        f"{name}_spread": float(np.std(values)),
    }


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
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        number = value
        if isinstance(value, (Tensor, np.generic)) and value.ndim == 0:
            number = value.item()
        if not isinstance(number, (int, float)):
            raise TypeError(f"{source} returned {name} = {value!r}; a metric must be a number")
        numbers[name] = number
    return numbers
