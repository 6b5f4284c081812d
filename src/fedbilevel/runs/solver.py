"""`solve`: run an algorithm on a problem and its clients, and write down what happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel import algorithms
from fedbilevel.algorithms import Algorithm
from fedbilevel.core import checks, devices, ranks
from fedbilevel.core.problem import ClientData, Problem
from fedbilevel.federation import Federation
from fedbilevel.federation.environment import Environment
from fedbilevel.runs.run import Evaluate, Result, Run
from fedbilevel.runs.simulation import simulated_federation


def solve(
    problem: Problem,
    clients: Sequence[ClientData],
    algorithm: str | Algorithm | None = None,
    *,
    rounds: int,
    environment: Environment | None = None,
    weights: str | Sequence[float] = "uniform",
    seed: int = 0,
    device: str = "cpu",
    federation: Federation | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    every: int = 1,
) -> Result:
    """Solve a federated bilevel problem; the docs of each algorithm say what it does.

    rounds: a budget of communication rounds; no iteration starts once it is reached. device: cpu, cuda, or auto.
    evaluate(x, y) returns a dict of numbers that is added to the metrics, before round 0 and at the end of the first
    iteration at or after each multiple of `every`. algorithm: "simfbo" by default. federation: instead of a simulated
    one that is made from environment, weights and seed. out: the run leaves a folder (metrics, checkpoint, summary);
    `resume=True` goes on with the one in it.
    """
    if resume and out is None:
        raise ValueError("resume is True but out is not given; a run goes on in its folder")
    method = (
        algorithms.get(algorithm)()
        if isinstance(algorithm, str)
        else algorithm or algorithms.SimFBO()
    )
    if federation is None:
        device = ranks.device(devices.chosen(device))
        federation = simulated_federation(
            problem.to(device), clients, environment, weights=weights, seed=seed, device=device
        )
    elif environment is not None:
        raise ValueError("federation is given and so is environment; a federation has its own")
    checks.integer("rounds", rounds, least=0)
    checks.integer("every", every, least=1)
    run = Run(method, federation, {"rounds": rounds}, evaluate, {"rounds": every})
    for _ in run if out is None else _recorded(run, Path(out), resume):
        pass
    return run.result


def _recorded(run: Run, folder: Path, resume: bool) -> Iterable[dict[str, Any]]:
    """The run, written down; its losses are Python functions, so config.toml tells what ran but cannot run it again."""
    from fedbilevel.runs.recorder import Recorder  # needs more than torch

    fed = run.fed
    config = {
        "title": "started from Python",
        "task": {"name": "python"},
        "algorithm": {"name": run.algorithm.name, **_plain(run.algorithm)},
        "environment": _plain(fed.environment),
        "rounds": run.limits["rounds"],
        "every": run.every,
        "seed": fed.seed,
        "device": fed.device.split(":")[0] if ranks.size() > 1 else fed.device,
    }
    return Recorder(run, folder, config, resume)


def _plain(settings: Any) -> dict[str, Any]:
    """A dataclass as a table; what is not plain (a schedule, a delay) is told, not stored."""
    plain = (bool, int, float, str, type(None))
    table: dict[str, Any] = {}
    for key, value in vars(settings).items():
        if isinstance(value, (list, tuple)):
            table[key] = [entry if isinstance(entry, plain) else repr(entry) for entry in value]
        else:
            table[key] = value if isinstance(value, plain) else repr(value)
    return table
