"""Regularization coefficients: learn one for every feature of a logistic regression.

lower: cross-entropy on training data + 1/2 sum_j softplus(x_j) ||W_j||^2 + ridge/2 ||y||^2,    y = (W, bias)
upper: cross-entropy on validation data

W_j are the weights of feature j, one a class. Softplus makes the coefficients positive: exp(x_j) where they are small,
linear where they are large (the curvature of exp would soon outgrow every step size for y). The ridge makes the lower
level strongly convex whatever x is, in the bias too. Li et al., "Anarchic federated bilevel optimization", print the
term as x_j W_j, with which the lower level has no minimum in general.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import deal
from fedbilevel.tasks.task import Task


def regularization(
    *,
    data: str = "breast-cancer",
    partition: str = "iid",
    clients: int = 18,
    validation: float = 0.5,
    alpha: float | None = None,
    ridge: float = 1e-4,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Task:
    """data: breast-cancer, covertype, or images. partition: iid, shards, dirichlet (with `alpha`).

    Every x_j starts at 0: a coefficient of log 2. Metrics: accuracies and the cross-entropy on the test set.
    """
    checks.positive("ridge", ridge)
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

    def scores(x: Tree, y: Tree, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) @ y["weight"] + y["bias"]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(scores(x, y, inputs), labels)

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = F.softplus(x["coefficients"]) @ (y["weight"] ** 2).sum(1)
        return upper(x, y, batch) + 0.5 * penalty + 0.5 * ridge * dot(y, y)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        inputs, labels = (tensor.to(y["bias"].device) for tensor in dealt.test)
        return {**dealt.accuracies(scores, x, y), "test_loss": float(upper(x, y, (inputs, labels)))}

    features = dealt.inputs[0].numel()
    y = {"weight": torch.zeros(features, dealt.classes), "bias": torch.zeros(dealt.classes)}
    problem = Problem(upper=upper, lower=lower, x={"coefficients": torch.zeros(features)}, y=y)
    return Task(problem, dealt.clients(), evaluate)
