"""Regularization: learn one coefficient per feature of a logistic regression.

lower: cross-entropy on training data + 1/2 sum_j softplus(x_j) ||W_j||^2 + ridge/2 ||y||^2,
upper: cross-entropy on validation data, with y = (W, bias).

W_j are the weights of feature j, one per class. Softplus makes the coefficients positive. It is
about exp(x_j) for small coefficients and linear for large ones; the curvature of exp would soon
outgrow every step size for y. The ridge makes the lower level strongly convex for every x, in the
bias too.

Departure from the paper: Li et al., "Anarchic federated bilevel optimization", use the term x_j
W_j, with which the lower level has no minimum in general.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import cross_entropies, load_partitioned
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
    """Build the task of learning regularization coefficients, x, of a logistic regression, y.

    Every x_j starts at 0, a coefficient of log 2.

    Args:
        data: "breast-cancer", "covertype", or images ("digits", "mnist", "cifar10").
        partition: How samples are partitioned among clients: "iid", "shards" or "dirichlet".
        clients: The number of clients.
        validation: The fraction of each client's samples that the upper level uses.
        alpha: The concentration of "dirichlet".
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        samples: Use only this many training samples, the first ones.
        test_samples: Use only this many test samples, the first ones.
        seed: The seed of the partition.
        data_dir: Where the files of the data set are; see `fedbilevel.data.load`.

    Returns:
        The task. Its metrics: `train_accuracy`, `test_accuracy` and `test_loss`, the cross-entropy
        on the test set.

    Raises:
        ValueError: An option is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("regularization", clients=4)
        >>> task.problem.x["coefficients"].shape
        torch.Size([30])
    """
    checks.positive("ridge", ridge)
    dataset = load_partitioned(
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
        return cross_entropies(scores(x, y, inputs), labels).mean()

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = F.softplus(x["coefficients"]) @ (y["weight"] ** 2).sum(1)
        return upper(x, y, batch) + 0.5 * penalty + 0.5 * ridge * dot(y, y)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        inputs, labels = (tensor.to(y["bias"].device) for tensor in dataset.test)
        metrics = dataset.accuracies(scores, x, y)
        metrics["test_loss"] = float(upper(x, y, (inputs, labels)))
        return metrics

    features = dataset.inputs[0].numel()
    y = {"weight": torch.zeros(features, dataset.classes), "bias": torch.zeros(dataset.classes)}
    problem = Problem(upper=upper, lower=lower, x={"coefficients": torch.zeros(features)}, y=y)
    return Task(problem, dataset.clients(), evaluate)
