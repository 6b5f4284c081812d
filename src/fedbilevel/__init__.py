"""Federated bilevel optimization on PyTorch: min_x F(x, y*(x)), y*(x) = argmin_y G(x, y), over many clients' data."""

import os
from typing import Any

# Waiting threads that spin starve each other on a machine that is shared: rounds were seen to take ten times as long.
# The library that torch's threads come from reads this once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fedbilevel import algorithms, delays, linear, memory, nets, schedules, stages, tasks
from fedbilevel.diagnosis import check
from fedbilevel.environment import Environment
from fedbilevel.hypergradient import finite_difference, hypergradient, solve_lower
from fedbilevel.problem import Batch, ClientData, Problem, split_module
from fedbilevel.simulation import simulated_federation
from fedbilevel.solve import Result, solve
from fedbilevel.tree import Tree

memory.keep_freed()

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ClientData",
    "Environment",
    "Problem",
    "Result",
    "Tree",
    "algorithms",
    "check",
    "delays",
    "finite_difference",
    "hypergradient",
    "linear",
    "load_run",
    "nets",
    "schedules",
    "simulated_federation",
    "solve",
    "solve_lower",
    "split_module",
    "stages",
    "tasks",
]


def __getattr__(name: str) -> Any:
    """What needs more than torch is imported when it is asked for."""
    if name == "load_run":
        from fedbilevel.runs.load import load_run

        return load_run
    raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}")
