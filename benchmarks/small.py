"""Small problems, and FedAvg: what people try first.

An iteration of SimFBO on a quadratic of twenty variables is compared with the same arithmetic as a
hand-written PyTorch loop. A round of FedAvg on MNIST is compared with a plain loop over clients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import fedbilevel as fb
from benchmarks.measure import Row, describe, seconds
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.process import relaxed_garbage_collection
from fedbilevel.runs.run import Run

WARM_UP = 60  # iterations, after which every step is traced
ITERATIONS = 20  # per measurement of the small problem


def advance(run: Run, iterations: int) -> Callable[[], None]:
    """Return a function that advances a run, as between two evaluations."""
    for _ in range(WARM_UP):
        run.advance()

    def go() -> None:
        for _ in range(iterations):
            run.fed.mark()
            run.advance()

    return go


def handwritten(task: fb.tasks.Task) -> Callable[[], None]:
    """SimFBO on one client, without anything around its arithmetic."""
    problem = task.problem
    client = task.clients[0]
    settings = fb.algorithms.SimFBO()
    x = problem.x["x"].clone()
    y = problem.y["y"].clone()
    z = torch.zeros_like(y)

    def go() -> None:
        nonlocal x, y, z
        for _ in range(ITERATIONS):
            x.requires_grad_()
            y.requires_grad_()
            g = problem.lower({"x": x}, {"y": y}, client.train, ())
            (g_y,) = torch.autograd.grad(g, y, create_graph=True)
            f = problem.upper({"x": x}, {"y": y}, client.val, ())
            d_x, minus_d_z = torch.autograd.grad(f - g_y @ z, (x, y), materialize_grads=True)
            with torch.no_grad():
                x = x - settings.lr_x * d_x
                y = y - settings.lr_y * g_y
                z = z + settings.lr_z * minus_d_z
                z = z * (settings.radius / z.norm()).clamp(max=1.0)

    return go


def small_problem() -> Row:
    """Compare an iteration with the hand-written one."""
    task = fb.tasks.load("quadratic", clients=1, dim_x=20, dim_y=20)
    fed = fb.simulated_federation(task.problem, task.clients)
    functions = {
        "simfbo": advance(Run(fb.algorithms.SimFBO(), fed, {}), ITERATIONS),
        "by hand": handwritten(task),
    }
    with relaxed_garbage_collection():  # as in `fb.solve`
        times = {name: s / ITERATIONS for name, s in seconds(functions, repeats=30).items()}
    detail = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items())
    name = "an iteration of simfbo on 20 variables, one client / by hand in PyTorch"
    return Row(name, times["simfbo"] / times["by hand"], "at most 1.5", detail)


def directions() -> Row:
    """Compare the oracle's directions, as they run before they are traced, with plain autograd."""
    task = fb.tasks.load("quadratic", clients=1, dim_x=20, dim_y=20)
    problem = task.problem
    client = task.clients[0]
    oracle = Oracle(problem)
    x, y = problem.start
    z = 0.1 * y
    batch = fb.Batch(client.train, client.val)

    def with_autograd() -> None:
        for _ in range(ITERATIONS):
            leaf_x = x["x"].detach().requires_grad_()
            leaf_y = y["y"].detach().requires_grad_()
            g = problem.lower({"x": leaf_x}, {"y": leaf_y}, client.train, ())
            (g_y,) = torch.autograd.grad(g, leaf_y, create_graph=True)
            f = problem.upper({"x": leaf_x}, {"y": leaf_y}, client.val, ())
            torch.autograd.grad(f - g_y @ z["y"], (leaf_x, leaf_y), materialize_grads=True)

    def with_oracle() -> None:
        for _ in range(ITERATIONS):
            oracle.directions(x, y, z, batch)

    functions = {"directions": with_oracle, "autograd": with_autograd}
    times = {name: s / ITERATIONS for name, s in seconds(functions, repeats=30).items()}
    detail = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items())
    name = "oracle.directions on 20 variables, not traced / plain autograd"
    return Row(name, times["directions"] / times["autograd"], "", detail)


def fedavg_by_hand(task: fb.tasks.Task, steps: int, batch: int) -> Callable[[], None]:
    """A round of FedAvg as a loop over ten clients, each with its own copy of the network."""
    server = fb.nets.mlp(784, 200, 10)
    generator = torch.Generator().manual_seed(0)

    def go() -> None:
        cohort = torch.randperm(len(task.clients), generator=generator)[:10]
        total = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for i in cohort.tolist():
            images, labels = task.clients[i].train
            net = fb.nets.mlp(784, 200, 10)
            net.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            for _ in range(steps):
                rows = torch.randperm(len(images), generator=generator)[:batch]
                optimizer.zero_grad()
                F.cross_entropy(net(images[rows]), labels[rows]).backward()
                optimizer.step()
            for name, value in net.state_dict().items():
                total[name] += value / len(cohort)
        server.load_state_dict(total)

    return go


def fedavg() -> list[Row]:
    """Compare a round of FedAvg with a loop over clients."""
    if not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        print("left out: FedAvg on MNIST, because MNIST is not in $FEDBILEVEL_DATA")
        return []
    task = fb.tasks.load("hyper-representation", data="mnist", clients=100, hidden=200, ridge=0.0)
    environment = fb.Environment(participation=10, local_steps=10, batch_size=64)
    fed = fb.simulated_federation(task.problem, task.clients, environment)
    functions = {
        "loop": fedavg_by_hand(task, steps=10, batch=64),
        "fedavg": advance(Run(fb.algorithms.FedAvg(), fed, {}), 1),
    }
    times = seconds(functions, repeats=30)
    name = "a loop over clients / a round of fedavg, MNIST, 10 of 100 clients, 10 steps of batch 64"
    return [Row(name, times["loop"] / times["fedavg"], "at least 1.5", describe(times))]


def rows() -> list[Row]:
    """Compare small problems and FedAvg with plain PyTorch."""
    return [small_problem(), directions(), *fedavg()]
