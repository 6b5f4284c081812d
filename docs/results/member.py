"""One run of battery.py, in a process of its own; it needs no schema of experiments."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedbilevel.runs import folder as folders
from fedbilevel.runs.recorder import Recorder

EXTRA = "extra.json"  # what a member measures once, at its end
ERRORS = "error.log"


def run_member(path: Path) -> None:
    """Run the member in a folder, or resume it; what it prints goes to a file in the folder."""
    with (path / ERRORS).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    config = tomllib.loads((path / folders.CONFIG).read_text())
    torch.set_num_threads(1)
    task, run = build_run(config)
    signal.signal(signal.SIGTERM, lambda *_: run.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the battery stops its members itself
    recorder = Recorder(run, path, config, resume=True, checkpoint_every=20)
    for _ in recorder:
        pass
    if run.status == "interrupted":
        return
    if config["task"]["name"] == "hyper-cleaning" and path.parent.parent.name == "hyper-cleaning":
        extra = pooled_accuracies(task, run.result.x["weights"], config["task"]["ridge"])
        folders.write_atomically(path / EXTRA, json.dumps(extra))
    shutil.rmtree(path / "checkpoint")  # a finished run needs none, and many would be large


def build_run(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Build the task and the run of a resolved config, as `experiments.runner` does."""
    from fedbilevel import algorithms, tasks
    from fedbilevel.core.settings import build, declared_settings, read_arguments
    from fedbilevel.federation.environment import Environment
    from fedbilevel.runs.run import Run
    from fedbilevel.runs.simulation import simulated_federation

    data = dict(config.get("data", {}))
    if "name" in data:
        data["data"] = data.pop("name")
    arguments = {**config["task"], **data, "seed": config["seed"]}
    function = tasks.get(arguments.pop("name"))
    task = function(**read_arguments(declared_settings(function), "task", arguments))
    settings = dict(config["algorithm"])
    algorithm = build(algorithms.get(settings.pop("name")), "algorithm", settings)
    device = config["device"]
    runtime = config["runtime"]
    fed = simulated_federation(
        task.problem.to(device),
        task.clients,
        build(Environment, "environment", config["environment"]),
        weights=config["weights"],
        seed=config["seed"],
        device=device,
        mode=runtime["mode"],
        memory=runtime.get("memory"),
        precision=runtime["precision"],
    )
    limits = {"rounds": config["rounds"], **config.get("stop", {})}
    target = limits.pop("test_accuracy", None)
    return task, Run(algorithm, fed, limits, task.evaluate, config["every"], target)


def pooled_accuracies(task: Any, weights: Any, ridge: float) -> dict[str, float]:
    """Return test accuracies of hyper-cleaning with the lower level of all clients solved.

    The lower level is solved with equal weights, with the correct labels only, and with the learnt
    weights, by L-BFGS in float64 for W = P A, where P makes the inputs' second moments nearly the
    identity.
    """
    import fedbilevel as fb

    columns = zip(*(client.train for client in task.clients), strict=True)
    inputs, labels, positions = (torch.cat(column) for column in columns)
    inputs = inputs.flatten(1).double()
    batch = (inputs, labels, positions)
    eigenvalues, basis = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    P = basis / (eigenvalues + 1000 * ridge).sqrt()
    key = torch.tensor(0)  # the loss draws nothing

    def accuracy(x: Any) -> float:
        A = torch.zeros(len(P), 10, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [A], max_iter=400, tolerance_grad=1e-6, history_size=20, line_search_fn="strong_wolfe"
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = task.problem.lower({"weights": x.double()}, {"classifier": P @ A}, batch, key)
            loss.backward()
            return loss

        optimizer.step(closure)
        y = fb.Tree(classifier=(P @ A).detach().float())
        return float(task.evaluate(fb.Tree(weights=x), y)["test_accuracy"])

    weights = weights.cpu()
    return {
        "all_labels": accuracy(torch.full_like(weights, 40.0)),
        "correct_labels": accuracy(torch.where(task.corrupted, -40.0, 40.0)),
        "learnt_weights": accuracy(weights),
    }
