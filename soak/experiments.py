"""Random small experiments, for every registered method."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

import fedbilevel as fb
from fedbilevel.experiments import config as configs
from fedbilevel.experiments.runner import build_federation, load_task
from fedbilevel.federation import Federation
from soak.junk import Table
from tests.support.tool import Outcome, assert_refused, invoke, write

CLIENTS = 3
SMALL_NET: Table = {"data": "digits", "samples": 60, "hidden": 4}
TASKS: dict[str, Table] = {
    "quadratic": {"name": "quadratic", "samples": 4, "noise": 0.3, "dim_x": 3, "dim_y": 2},
    "loss-tuning": {"name": "loss-tuning", **SMALL_NET},
    "shared heads": {"name": "hyper-representation", **SMALL_NET},
    "own heads": {"name": "hyper-representation", **SMALL_NET, "owner": "client"},
    "few-shot": {"name": "few-shot", "data": "digits", "ways": 2, "hidden": 4, "episodes": 4},
}
STAGES = [{"stage": "clip", "norm": 0.5}, {"stage": "half"}]
DELAYS = [
    {"model": "lognormal", "mean": 2.0},
    {"model": "pareto", "mean": 1.0, "shape": 1.5},
]
METHODS = fb.algorithms.names()


class Method(NamedTuple):
    """A method, the `TASKS` that it solves, and those of them that it solves on submodels."""

    name: str
    tasks: list[str]
    on_submodels: list[str]


@functools.cache
def method(name: str) -> Method:
    """Return a registered method; every method solves one of the tasks at least."""
    tasks = [task for task in TASKS if _is_valid(name, task, 1.0)]
    on_submodels = [task for task in tasks if _is_valid(name, task, 0.5)]
    assert tasks, f"{name} solves none of {', '.join(TASKS)}; add a task to soak/experiments.py"
    return Method(name, tasks, on_submodels)


def _is_valid(name: str, task: str, capacity: float) -> bool:
    fed = _federation(task, capacity)
    try:
        fb.algorithms.get(name)().check(fed.problem, fed.environment)
    except ValueError:
        return False
    return True


@functools.cache
def _federation(task: str, capacity: float) -> Federation:
    """Return a federation of a task, on which no method runs."""
    table = {
        "task": {"clients": CLIENTS, **TASKS[task]},
        "environment": {"batch_size": 2, "capacity": capacity},
        "runtime": {"threads": 1},
    }
    config = configs.resolve("soak", table)
    return build_federation(config, load_task(config))


def draw_experiment(draw: random.Random, name: str, most_rounds: int) -> Table:
    """Draw an experiment with a method; some of them contradict themselves and are refused."""
    chosen = method(name)
    task = draw.choice(chosen.tasks)
    if "quadratic" in chosen.tasks and draw.random() < 0.5:  # it is the fastest
        task = "quadratic"
    environment: Table = {
        "participation": draw.choice([1.0, 2, 0.7]),
        "local_steps": draw.choice([1, 2, [1, 3], {"clients": [1, 3, 2]}]),
        "batch_size": draw.choice([2, 2, "full"]),
    }
    if draw.random() < 0.5:
        environment["delay"] = draw.choice(DELAYS)
        if draw.random() < 0.5:
            environment["stragglers"] = {"clients": 1, "slowdown": 4.0}
        if draw.random() < 0.3:
            environment["deadline"] = 8.0
    if draw.random() < 0.3:
        fault = draw.choice(["drop", "duplicate", "corrupt"])
        environment["faults"] = {fault: 0.1}
        if "delay" in environment:
            environment["faults"]["leave"] = 0.1
    if draw.random() < 0.2:
        environment |= {"norm_factor": draw.choice([1.5, 100.0]), "strikes": 3}
    if task in chosen.on_submodels and draw.random() < 0.7:
        environment["capacity"] = draw.choice([0.5, [1.0, 0.5]])
    elif draw.random() < 0.3:
        environment["stages"] = draw.sample(STAGES, draw.randint(1, 2))
    if not fb.algorithms.get(name).has_server:
        for condition in ("deadline", "faults", "norm_factor", "stages"):
            environment.pop(condition, None)
        environment["topology"] = draw.choice(["ring", "grid", "complete", "erdos-renyi 0.5"])
    if task == "few-shot":
        environment["batch_size"] = 2
    return {
        "task": {"clients": CLIENTS, **TASKS[task]},
        "algorithm": {"name": name, **_settings(draw, name)},
        "environment": environment,
        "rounds": draw.randint(1, most_rounds),
        "every": draw.choice([1, 2, 5, {"samples": 50.0}]),
        "seed": draw.randrange(100),
        "weights": draw.choice(["uniform", "samples"]),
        "checkpoint_every": draw.randint(1, 6),
        "runtime": {"threads": 1, "mode": draw.choice(["stack", "stack", "loop"])},
    }


def _settings(draw: random.Random, name: str) -> Table:
    """Settings that give a method state of another kind, and now and then a schedule."""
    settings: Table = {}
    if draw.random() < 0.3:
        settings["lr_x"] = {"schedule": "power", "start": 0.01}
    variants: dict[str, list[Table]] = {
        "afbo": [
            {"memory": "client"},
            {"max_delay": 3},
            {"aphe": "server", "memory": "server"},
            {"hypergradient": "printed"},
        ],
        "afl": [{"variant": "cd"}, {"max_delay": 3}],
        "unifbo": [{"barrier": False}],
        "sdbo": [{"plane_every": 3}],
        "adbo": [{"plane_every": 3, "max_delay": 4}],
    }
    if name in variants and draw.random() < 0.6:
        settings |= draw.choice(variants[name])
    return settings


def write_valid(
    draw: random.Random, name: str, folder: Path, most_rounds: int, **changes: Any
) -> tuple[Path, Outcome]:
    """Draw experiments until one is not refused, write it, and run it undisturbed.

    Args:
        draw: The source of randomness.
        name: The method.
        folder: Gets the experiment `a.toml` and the run `whole`.
        most_rounds: The largest budget.
        **changes: Keys of the experiment to replace.

    Returns:
        The experiment's file, and how the run ended.
    """
    while True:
        table = {**draw_experiment(draw, name, most_rounds), **changes}
        file = write(folder / "a.toml", tomli_w.dumps(table))
        outcome = invoke("run", file, "--out", folder / "whole", "--quiet")
        if outcome.code != 2:
            assert outcome in ((0, "", ""), (3, "", "")), outcome
            return file, outcome
        assert_refused(outcome)
