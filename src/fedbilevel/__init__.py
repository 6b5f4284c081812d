"""Federated bilevel optimization on PyTorch.

Clients that keep their data solve

    min_x F(x, y*(x))   with   y*(x) = argmin_y G(x, y)

together, where F and G are weighted means of the clients' upper and lower losses. `solve` runs an
algorithm on a `Problem` and the `ClientData` of its clients:

    >>> import fedbilevel as fb
    >>> task = fb.tasks.load("quadratic", clients=4)
    >>> result = fb.solve(task.problem, task.clients, "simfbo", rounds=5)
    >>> result.status
    'completed'

Importing this package imports neither PyTorch nor anything else, and changes nothing in the
process: each public name is imported from its module when it is first used.
"""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel import algorithms as algorithms
    from fedbilevel import data as data
    from fedbilevel import nets as nets
    from fedbilevel import tasks as tasks
    from fedbilevel.core import linear as linear
    from fedbilevel.core import schedules as schedules
    from fedbilevel.core.client_data import Batch as Batch
    from fedbilevel.core.client_data import ClientData as ClientData
    from fedbilevel.core.hypergradient import finite_difference as finite_difference
    from fedbilevel.core.hypergradient import hypergradient as hypergradient
    from fedbilevel.core.hypergradient import solve_lower as solve_lower
    from fedbilevel.core.modules import split_module as split_module
    from fedbilevel.core.problem import Problem as Problem
    from fedbilevel.core.process import configure_process as configure_process
    from fedbilevel.core.tree import Tree as Tree
    from fedbilevel.core.weighting import weighted as weighted
    from fedbilevel.data.clients import clients as clients
    from fedbilevel.diagnostics.check import check as check
    from fedbilevel.diagnostics.methods import advise as advise
    from fedbilevel.diagnostics.value import value as value
    from fedbilevel.estimators.logistic import FederatedLogistic as FederatedLogistic
    from fedbilevel.federation import delays as delays
    from fedbilevel.federation import stages as stages
    from fedbilevel.federation.environment import Environment as Environment
    from fedbilevel.runs import callbacks as callbacks
    from fedbilevel.runs.adapt import adapt as adapt
    from fedbilevel.runs.load import load_run as load_run
    from fedbilevel.runs.metric import Metric as Metric
    from fedbilevel.runs.result import Result as Result
    from fedbilevel.runs.run import Run as Run
    from fedbilevel.runs.simulation import simulated_federation as simulated_federation
    from fedbilevel.runs.solver import Interrupted as Interrupted
    from fedbilevel.runs.solver import solve as solve
    from fedbilevel.tasks.linear_model import linear_model as linear_model

__version__ = "0.1.0"

# The home of each public name: "module", or "module:attribute". It must match the imports above.
_HOMES = {
    "Batch": "core.client_data:Batch",
    "ClientData": "core.client_data:ClientData",
    "Environment": "federation.environment:Environment",
    "FederatedLogistic": "estimators.logistic:FederatedLogistic",
    "Interrupted": "runs.solver:Interrupted",
    "Metric": "runs.metric:Metric",
    "Problem": "core.problem:Problem",
    "Result": "runs.result:Result",
    "Run": "runs.run:Run",
    "Tree": "core.tree:Tree",
    "adapt": "runs.adapt:adapt",
    "advise": "diagnostics.methods:advise",
    "algorithms": "algorithms",
    "callbacks": "runs.callbacks",
    "check": "diagnostics.check:check",
    "clients": "data.clients:clients",
    "configure_process": "core.process:configure_process",
    "data": "data",
    "delays": "federation.delays",
    "finite_difference": "core.hypergradient:finite_difference",
    "hypergradient": "core.hypergradient:hypergradient",
    "linear": "core.linear",
    "linear_model": "tasks.linear_model:linear_model",
    "load_run": "runs.load:load_run",
    "nets": "nets",
    "schedules": "core.schedules",
    "simulated_federation": "runs.simulation:simulated_federation",
    "solve": "runs.solver:solve",
    "solve_lower": "core.hypergradient:solve_lower",
    "split_module": "core.modules:split_module",
    "stages": "federation.stages",
    "tasks": "tasks",
    "value": "diagnostics.value:value",
    "weighted": "core.weighting:weighted",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        module = sys.modules[__name__]  # with it, Python suggests a name that is close
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=module
        )
    module_name, _, attribute = _HOMES[name].partition(":")
    collecting = gc.isenabled()
    gc.disable()  # otherwise PyTorch's 300,000 objects are traversed again and again
    try:
        value: object = import_module(f"{__name__}.{module_name}")
    finally:
        if collecting:
            gc.enable()
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
