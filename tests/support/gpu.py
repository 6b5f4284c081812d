"""Imitate on a CPU what is different on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fedbilevel as fb
from fedbilevel import algorithms
from fedbilevel.core.nests import unflatten
from fedbilevel.core.rng import fold_in, normal, root, uniform
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, dot
from fedbilevel.execution.stacked._cuda_graphs import CudaGraphs
from fedbilevel.federation import Federation, replies
from fedbilevel.federation.replies import Replies
from fedbilevel.federation.task import Sums
from fedbilevel.runs.run import Run
from fedbilevel.tasks.quadratic import quadratic


def imitate_gpu(fed: Federation) -> None:
    """Use stacks of constant size, pooled samples, and replies that are summed on the device."""
    executor = fed.transport.executor  # type: ignore[attr-defined]
    executor.on_gpu = True
    executor.sample_store.on_gpu = True
    executor.inputs.on_gpu = True
    executor.step_runner.graphs = executor.graphs


def disable_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs as they are instead of capturing them as CUDA graphs."""

    def run(
        self: CudaGraphs, _: str, __: str, ___: Any, program: Any, leaves: Any, form: Any
    ) -> Any:
        return program(unflatten(leaves, form))

    monkeypatch.setattr(CudaGraphs, "run", run)


class PretendCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def defer_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave summed replies pending, as on a GPU: nobody waits to learn which are finite."""
    add_sums = Replies.add_sums

    def add_sums_from_gpu(
        self: Replies, received: Any, sums: Sums, submodel: Submodel | None = None
    ) -> None:
        finite = sums.finite.as_subclass(PretendCuda)
        add_sums(self, received, sums._replace(finite=finite), submodel)

    disable_capture(monkeypatch)
    monkeypatch.setattr(Replies, "add_sums", add_sums_from_gpu)
    monkeypatch.setattr(replies, "fetch_async", lambda tensor: lambda: tensor)


def network_problem(
    clients: int, hidden: int, dropout: float = 0.0
) -> tuple[fb.Problem, list[fb.ClientData]]:
    """An MLP with a backbone, and clients with 30 random samples to train and 10 to validate."""
    net = fb.nets.mlp(16, hidden, 3, dropout=dropout)
    _, x, y = fb.split_module(net, lower="head.")
    below, above = fb.nets.stem(net)

    def embed(x: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        with fb.nets.randomness(rng):
            return F.cross_entropy(above({**x, **y}, batch[0]), batch[1])

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        return upper(x, y, batch, rng) + 0.01 * dot(y, y)

    def side(key: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        return normal(key, (samples, 16)), torch.arange(samples) % 3

    data = []
    for client in range(clients):
        key = fold_in(root(0, "gpu"), client)
        data.append(fb.ClientData(side(fold_in(key, 0), 30), side(fold_in(key, 1), 10)))
    return fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=embed), data


def run_with_bad_replies(name: str, probability: float, like_a_gpu: bool, every: int = 10) -> Run:
    """A run of 30 rounds in which some replies are not finite.

    Args:
        name: the algorithm.
        probability: of a gradient that is not finite.
        like_a_gpu: whether to imitate a GPU.
        every: rounds between evaluations.
    """
    task = quadratic(clients=5, samples=6, noise=0.5, seed=1)

    def lower(x: Tree, y: Tree, batch: Any, rng: torch.Tensor) -> torch.Tensor:
        good = (uniform(rng, (), torch.float64) >= probability).double()
        # The square root is finite at 0, and its gradient is not.
        return task.problem.lower(x, y, batch, rng) + (good + 0 * dot(y, y)).sqrt()

    problem = fb.Problem(upper=task.problem.upper, lower=lower, x=task.problem.x, y=task.problem.y)
    environment = fb.Environment(local_steps=(1, 3), participation=4)
    fed = fb.simulated_federation(problem, task.clients, environment)
    if like_a_gpu:
        imitate_gpu(fed)
    return Run(algorithms.get(name)(), fed, {"rounds": 30}, every={"rounds": every})


def check_same_run(one: Run, other: Run) -> None:
    """Check that two runs have the same state, up to rounding, and the same costs."""
    leaves = [pytree.tree_leaves(run.state) for run in (one, other)]
    for a, b in zip(*leaves, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.allclose(a.double().cpu(), b.double().cpu(), rtol=1e-10, atol=1e-12)
    assert one.fed.ledger.phases == other.fed.ledger.phases
