"""Hyper-representation: learn a backbone (upper level) on which each head (lower level) fits the training data best.

lower: cross-entropy on training data + ridge/2 ||y||^2,        upper: cross-entropy on validation data
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.problem import Problem, split_module
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import deal
from fedbilevel.tasks.task import Task


def hyper_representation(
    *,
    data: str = "digits",
    partition: str = "iid",
    clients: int = 100,
    validation: float = 0.25,
    alpha: float | None = None,
    model: str = "mlp",
    hidden: int = 200,
    head_layers: int = 1,
    dropout: float = 0.0,
    ridge: float = 1e-3,
    norm_penalty: float = 0.0,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Task:
    """data: digits, mnist, cifar10. partition: iid, shards, dirichlet (with `alpha`). model: mlp, cnn, resnet18.

    `validation` is the share of each client's samples on the upper level: .25 of 600 is the 450/150 of SimFBO and
    ASFBO. `head_layers`: how many fully connected layers of the cnn (LeNet-5) are the lower level. `samples` and
    `test_samples` keep only the first so many. FedNest's published code has validation .5 for iid and .2 for shards,
    dropout .5 (mlp only) and, in place of the ridge, norm_penalty .1: norm_penalty/2 times the sum of the head tensors'
    norms.
    """
    checks.non_negative("ridge", ridge)
    checks.non_negative("norm_penalty", norm_penalty)
    dealt = deal(
        data,
        data_dir,
        partition,
        alpha,
        clients,
        validation,
        samples=samples,
        test_samples=test_samples,
        seed=seed,
    )
    net = dealt.network(model, hidden, seed, head_layers, dropout)
    _, x, y = split_module(net, lower="head.")
    predict = split_module(deepcopy(net).eval(), lower="head.").apply
    below, above = nets.stem(net)

    def embed(x: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        features, targets = batch
        with nets.randomness(rng):
            return F.cross_entropy(above({**x, **y}, features), targets)

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        loss = upper(x, y, batch, rng)
        if ridge:
            loss = loss + 0.5 * ridge * dot(y, y)
        if norm_penalty:
            loss = (
                loss
                + 0.5 * norm_penalty * torch.stack([tensor.norm() for tensor in y.values()]).sum()
            )
        return loss

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        return dealt.accuracies(predict, x, y)

    return Task(Problem(upper=upper, lower=lower, x=x, y=y, embed=embed), dealt.clients(), evaluate)
