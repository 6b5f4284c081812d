"""Data hyper-cleaning: learn a weight per training sample, so that wrong labels count less.

lower: mean over a batch of sigmoid(x_j) CE_j + ridge/2 ||y||^2,
upper: cross-entropy on validation data.

The classifier is linear, without a bias. It starts at 0, and so do all x_j: every weight starts at
1/2.

References:
    Franceschi et al., "Forward and reverse gradient-based hyperparameter optimization", 2017;
    federated by Jiao et al., "Asynchronous distributed bilevel optimization" (ADBO), 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, root, uniform
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import cross_entropies, load_partitioned
from fedbilevel.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class HyperCleaning(Task):
    """A task of hyper-cleaning that knows the truth.

    Attributes:
        corrupted: Per training sample, whether it has a wrong label; the samples of client 0 come
            first. With `owner="server"` entry j belongs to `x["weights"][j]`.
        sizes: How many training samples each client has. With `owner="client"` the sample j of a
            client has the weight `x["weights"][j]` of its own x.
    """

    corrupted: Tensor
    sizes: list[int]


def hyper_cleaning(
    *,
    data: str = "digits",
    partition: str = "iid",
    clients: int = 18,
    validation: float = 0.5,
    alpha: float | None = None,
    noise: float = 0.4,
    ridge: float = 1e-3,
    owner: Literal["server", "client"] = "server",
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> HyperCleaning:
    """Build the task of finding wrong labels: a weight per sample, x, and a classifier, y.

    Samples are partitioned by their true labels, and validation labels are never changed.

    Args:
        data: "digits", "mnist", "cifar10", "covertype" or "breast-cancer".
        partition: How samples are partitioned among clients: "iid", "shards" or "dirichlet".
        clients: The number of clients.
        validation: The fraction of each client's samples that the upper level uses.
        alpha: The concentration of "dirichlet".
        noise: The probability that a training label is changed to one of the other classes, all
            equally likely. Papers that draw from all classes leave some labels unchanged: their
            rate r with 10 classes is 0.9 r here.
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        owner: Who has the weights: the "server", one vector that every client receives, or every
            "client" those of its own samples, which it sends to nobody.
        samples: Use only this many training samples, the first ones.
        test_samples: Use only this many test samples, the first ones.
        seed: The seed of the partition and of the wrong labels.
        data_dir: Where the files of the data set are; see `fedbilevel.data.load`.

    Returns:
        The task. Its metrics: `train_accuracy`, `test_accuracy` and, where some labels are wrong,
        `f1` of "x_j < 0" (a weight below its start) and `auc` of -x_j as predictors of wrong
        labels; with `owner="client"` these two of each client, as a distribution.

    Raises:
        ValueError: An option is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-cleaning", clients=4, noise=0.4)
        >>> round(float(task.corrupted.float().mean()), 1)
        0.4
    """
    from sklearn.metrics import f1_score, roc_auc_score

    if not 0 <= checks.number("noise", noise) < 1:
        raise ValueError(f"noise is {noise}; it must be at least 0 and below 1")
    checks.non_negative("ridge", ridge)
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
    train = torch.cat([train for train, _ in dataset.splits])
    noisy_labels, corrupted = corrupt(dataset.labels[train], dataset.classes, noise, seed)
    # A training sample carries its position in x["weights"].
    sizes = [len(part) for part, _ in dataset.splits]
    parts = torch.arange(len(train)).split(sizes)
    positions = parts
    weights = len(train)
    if checks.one_of("owner", owner, ("server", "client")) == "client":
        positions = tuple(torch.arange(size) for size in sizes)
        weights = max(sizes)
    client_data = [
        ClientData(
            train=(dataset.inputs[part], noisy_labels[rows], position),
            val=(dataset.inputs[val], dataset.labels[val]),
        )
        for (part, val), rows, position in zip(dataset.splits, parts, positions, strict=True)
    ]

    def scores(x: Tree, y: Tree, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) @ y["classifier"]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return cross_entropies(scores(x, y, inputs), labels).mean()

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, labels, position = batch
        losses = cross_entropies(scores(x, y, inputs), labels)
        return (x["weights"][position].sigmoid() * losses).mean() + 0.5 * ridge * dot(y, y)

    def found(corrupted: Tensor, weights: Tensor) -> dict[str, float]:
        """Return how well small weights predict wrong labels."""
        if corrupted.all() or not corrupted.any():
            return {}
        suspicion = -weights.cpu()
        return {
            "f1": float(f1_score(corrupted, suspicion > 0, zero_division=0.0)),
            "auc": float(roc_auc_score(corrupted, suspicion)),
        }

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        metrics = dataset.accuracies(scores, x, y)
        if owner == "server":
            metrics |= found(corrupted, x["weights"])
        return metrics

    def evaluate_client(x: Tree, y: Tree, client: int) -> dict[str, float]:
        return found(corrupted[parts[client]], x["weights"][: sizes[client]])

    start = {"classifier": torch.zeros(dataset.inputs[0].numel(), dataset.classes)}
    x = {"weights": torch.zeros(weights)}
    problem = Problem(upper=upper, lower=lower, x=x, y=start, owner={"weights": owner})
    return HyperCleaning(
        problem,
        client_data,
        evaluate,
        evaluate_client if owner == "client" else None,
        corrupted=corrupted,
        sizes=sizes,
    )


def corrupt(labels: Tensor, classes: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Change each label to another class with probability `noise`.

    Args:
        labels: The true labels.
        classes: How many classes there are.
        noise: The probability of a change.
        seed: The seed of the changes.

    Returns:
        The labels after the change, and which of them differ from the true ones.
    """
    key = root(seed, "label noise")
    corrupted = uniform(fold_in(key, 0), labels.shape) < noise
    shift = 1 + (uniform(fold_in(key, 1), labels.shape) * (classes - 1)).long()
    return torch.where(corrupted, (labels + shift) % classes, labels), corrupted
