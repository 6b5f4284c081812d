"""Federated bilevel optimization on PyTorch: min_x F(x, y*(x)), y*(x) = argmin_y G(x, y), over many clients' data."""

from fedbilevel import algorithms, nets, schedules, tasks
from fedbilevel.environment import Environment
from fedbilevel.federation import SimulatedFederation
from fedbilevel.hypergradient import finite_difference, hypergradient, solve_lower
from fedbilevel.problem import Batch, ClientData, Problem, split_module
from fedbilevel.solve import Result, solve
from fedbilevel.tree import Tree

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ClientData",
    "Environment",
    "Problem",
    "Result",
    "SimulatedFederation",
    "Tree",
    "algorithms",
    "finite_difference",
    "hypergradient",
    "nets",
    "schedules",
    "solve",
    "solve_lower",
    "split_module",
    "tasks",
]
