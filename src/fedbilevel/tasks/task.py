"""What a learning task is: a problem with its clients and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of the tasks are listed without importing PyTorch
    from fedbilevel.core.client_data import ClientData
    from fedbilevel.core.problem import Problem
    from fedbilevel.core.tree import Tree
    from fedbilevel.runs.metric import Metric


@dataclass(frozen=True)
class Task:
    """A learning task: everything that `fb.solve` needs, ready-made.

    Args:
        problem: The bilevel problem.
        clients: The data of each client.
        evaluate: `evaluate(x, y)` returns the metrics by which methods are compared on this task,
            such as `test_accuracy`.
        evaluate_client: `evaluate_client(x, y, client)` returns metrics of one client at its own x
            and y, on its own data; runs report how they are distributed over the clients.
        metric: The one by which they are ranked; by default `test_accuracy` if `evaluate` returns
            it, else the upper loss.
        options: Options that were found out as the task was built, such as the digest of its data;
            the config of a run records them.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("quadratic", clients=4)
        >>> result = fb.solve(task.problem, task.clients, rounds=5, evaluate=task.evaluate)
        >>> sorted(result.history[-1])[:3]
        ['bytes_down', 'bytes_up', 'flops']
    """

    problem: Problem
    clients: Sequence[ClientData]
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] | None = None
    evaluate_client: Callable[[Tree, Tree, int], Mapping[str, float]] | None = None
    metric: Metric | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
