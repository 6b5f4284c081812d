"""A method's estimate of the hypergradient, read off its first step on x while y stays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Algorithm
from fedbilevel.runs.run import Run

# Settings of a double-loop method under which y stays, and x takes one step.
Y_STAYS: dict[str, Any] = {"lr_x": 0.1, "lr_y": 1e-12, "lower_steps": 1, "upper_steps": 1}


def load_quadratic(**options: Any) -> Any:
    """Four heterogeneous clients of condition number 3, unless the options say otherwise."""
    return fb.tasks.load("quadratic", **{"clients": 4, "condition": 3.0, "seed": 6} | options)


def pooled_matrices(task: Any) -> list[Tensor]:
    """A, B, c, e, t, D of the pooled quadratic.

    At x = y = 0 an estimate of the hypergradient is -t + B' p, with p an estimate of -A^-1 e.
    """
    return task._means("uniform")  # type: ignore[no-any-return]


def first_direction(
    task: Any, algorithm: Algorithm, draws: list[int] | None = None, cohort: list[int] | None = None
) -> Tensor:
    """The direction of the first step on x, under the settings `Y_STAYS`.

    Args:
        task: The task.
        algorithm: The method; it must have a setting lr_x.
        draws: What the server draws, instead of random numbers.
        cohort: The cohort of every exchange, instead of a random one.
    """
    fed = fb.simulated_federation(task.problem, task.clients)
    if draws is not None:
        remaining = iter(draws)
        fed.draw = lambda count: next(remaining)  # type: ignore[method-assign]
    if cohort is not None:
        fed.sample = lambda: cohort  # type: ignore[method-assign]
    run = Run(algorithm, fed, {})
    run.advance()
    moved = task.problem.x["x"] - run.state.x["x"]
    return moved / algorithm.lr_x  # type: ignore[attr-defined, no-any-return]
