"""Data hyper-cleaning: learn a weight for every training sample, so that those with a wrong label count for nothing.

lower: mean over a batch of sigmoid(x_j) CE_j + ridge/2 ||y||^2,        upper: cross-entropy on validation data

Franceschi et al., "Forward and reverse gradient-based hyperparameter optimization", 2017; federated by Jiao et al.,
"Asynchronous distributed bilevel optimization" (ADBO), 2022. The classifier is linear, without a bias, and starts at 0,
as do the x_j: every weight starts at 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core import checks
from fedbilevel.core.problem import ClientData, Problem
from fedbilevel.core.rng import fold_in, root, uniform
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import deal
from fedbilevel.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class HyperCleaning(Task):
    """The task, and which training samples hold a wrong label: one truth value an entry of x["weights"]."""

    corrupted: Tensor


def hyper_cleaning(
    *,
    data: str = "digits",
    partition: str = "iid",
    clients: int = 18,
    validation: float = 0.5,
    alpha: float | None = None,
    noise: float = 0.4,
    ridge: float = 1e-3,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> HyperCleaning:
    """partition: iid, shards, dirichlet (with `alpha`), by the true labels; validation labels are never changed.

    With probability `noise` a training label is changed to one of the other classes, all equally likely. (Papers that
    draw from all classes leave some labels as they were: their rate r of 10 classes is our .9 r.) Metrics: f1 of
    "x_j < 0" (a weight below its start) and auc of -x_j as guesses of which labels are wrong, where there are any.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    if not 0 <= checks.number("noise", noise) < 1:
        raise ValueError(f"noise is {noise}; it must be at least 0 and below 1")
    checks.non_negative("ridge", ridge)
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
    train = torch.cat([train for train, _ in dealt.splits])
    given, corrupted = corrupt(dealt.labels[train], dealt.classes, noise, seed)
    numbers = torch.arange(len(train)).split([len(part) for part, _ in dealt.splits])
    built = [
        ClientData(
            train=(dealt.inputs[part], given[number], number),
            val=(dealt.inputs[val], dealt.labels[val]),
        )
        for (part, val), number in zip(dealt.splits, numbers, strict=True)
    ]

    def scores(x: Tree, y: Tree, inputs: Tensor) -> Tensor:
        return inputs.flatten(1) @ y["classifier"]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(scores(x, y, inputs), labels)

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, labels, number = batch
        losses = F.cross_entropy(scores(x, y, inputs), labels, reduction="none")
        return (x["weights"][number].sigmoid() * losses).mean() + 0.5 * ridge * dot(y, y)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        found = {}
        if corrupted.any() and not corrupted.all():
            guess = -x["weights"].cpu()
            found = {
                "f1": float(f1_score(corrupted, guess > 0, zero_division=0.0)),
                "auc": float(roc_auc_score(corrupted, guess)),
            }
        return {**dealt.accuracies(scores, x, y), **found}

    start = {"classifier": torch.zeros(dealt.inputs[0].numel(), dealt.classes)}
    problem = Problem(upper=upper, lower=lower, x={"weights": torch.zeros(len(train))}, y=start)
    return HyperCleaning(problem, built, evaluate, corrupted=corrupted)


def corrupt(labels: Tensor, classes: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """The labels, each changed with probability `noise` to another class, and which were changed."""
    key = root(seed, "label noise")
    corrupted = uniform(fold_in(key, 0), labels.shape) < noise
    shift = 1 + (uniform(fold_in(key, 1), labels.shape) * (classes - 1)).long()
    return torch.where(corrupted, (labels + shift) % classes, labels), corrupted
