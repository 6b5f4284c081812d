"""Models for clients that come after training: a few gradient steps from the common model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fedbilevel.algorithms.fedavg import Train
from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.federation.environment import Environment
from fedbilevel.runs.simulation import simulated_federation


class Adapt(Train):
    """Gradient steps on the lower loss whose outcome is each client's own."""

    summed = False


def adapt(
    problem: Problem,
    clients: Sequence[ClientData],
    x: Tree,
    y: Tree,
    *,
    steps: int = 10,
    lr: float = 0.1,
    batch_size: int | None = None,
    train: Literal["y", "both"] = "y",
    seed: int = 0,
) -> list[tuple[Tree, Tree]]:
    """Return the models of clients that were not there in training.

    A new client has the server's x and y, and starts its own variables where the problem starts
    them. It takes gradient steps on its lower loss,

        y_i <- y_i - lr grad_y g_i(x, y_i),

    and nobody else learns from them.

    Args:
        problem: The problem that was solved.
        clients: The data of the new clients; the lower loss sees the training data alone.
        x: The server's x: `x` of a result or of a loaded run.
        y: The server's y.
        steps: The number of steps.
        lr: Their step size.
        batch_size: Samples per step; None for all of a client's.
        train: What is fitted: "y", or "both", the whole model.
        seed: The seed of the batches.

    Returns:
        The whole x and y of each client.

    Raises:
        ValueError: An argument is out of range, or clients own variables of x, which are learnt
            together with the server's, or a part of y.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=5, hidden=8, owner="client")
        >>> result = fb.solve(task.problem, task.clients[:4], "simfbo", rounds=5)
        >>> ((x, y),) = fb.adapt(task.problem, task.clients[4:], result.x, result.y, steps=20)
        >>> start = task.evaluate_client(x, fb.Tree(task.problem.y), 4)["test_loss"]
        >>> task.evaluate_client(x, y, 4)["test_loss"] < start
        True
    """
    checks.one_of("train", train, ("y", "both"))
    checks.integer("steps", steps, least=1)
    checks.positive("lr", lr)
    if "x" in problem.client_levels:
        raise ValueError(
            f"owner gives {min(problem.client_names & problem.x.keys())!r} of x to the clients; "
            "a new client cannot learn it by itself"
        )
    owned = problem.client_names & problem.y.keys()
    if train == "y" and owned and owned != problem.y.keys():
        raise ValueError(
            f"owner leaves {min(problem.y.keys() - owned)!r} of y to the server; "
            "the clients must own all of y or none"
        )
    x, y = problem.client_point(x, y, {})
    fed = simulated_federation(
        replace(problem, owner={}),
        clients,
        Environment(batch_size=batch_size),
        seed=seed,
        device=str(next(iter(y.values())).device),
    )
    phase = Adapt(steps=steps, lr_x=lr, lr_y=lr, train=train)
    moved = {reply.client: reply.values for reply in fed.ask(phase, range(len(fed)), x=x, y=y)}
    models = []
    for client in range(len(fed)):
        change = moved[client]
        models.append((fed.problem.project(x + change["dx"]), y + change["dy"]))
    return models
