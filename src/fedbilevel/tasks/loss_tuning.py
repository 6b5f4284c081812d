"""Loss tuning: learn the loss on long-tailed data with which a network does well on all classes alike.

lower: mean over a batch of -w_k log( exp(D_k o_k + l_k) / sum_c exp(D_c o_c + l_c) ) + ridge/2 ||y||^2
upper: class-balanced cross-entropy on validation data, the mean of N / (C n_k) CE

o are the outputs of the network y for a sample of class k; of the N samples of C classes n_k are of class k, in all
clients together: a client may lack a class. The lower loss is the VS-loss of Kini et al., "Label-imbalanced and
group-sensitive classification under overparameterization", 2021; x are its parameters, a weight w, a factor D and a
shift l for every class. Li et al., "Distributed bilevel optimization with dual pruning for resource-limited clients",
print the VS-loss on the upper level too, where weights of 0 would minimise it.

w and D are 2 sigmoid of their entries of x, l is its entry itself: at the start, x = 0, the VS-loss is cross-entropy.
Below 2, they raise the curvature of the lower level at most eightfold, so that the step sizes for y stay valid.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import deal
from fedbilevel.tasks.task import Task


def loss_tuning(
    *,
    data: str = "digits",
    partition: str = "iid",
    clients: int = 10,
    validation: float = 0.2,
    alpha: float | None = None,
    imbalance: float = 100.0,
    model: str = "mlp",
    hidden: int = 200,
    ridge: float = 1e-3,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Task:
    """data: digits, mnist, cifar10. partition: iid, shards, dirichlet (with `alpha`). model: mlp, cnn, resnet18.

    imbalance: how many times as many samples the first class has as the last, n_k falling geometrically in between, in
    training and in validation data. Metrics: accuracies, on the test set (not imbalanced) also the mean over classes.
    """
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
        imbalance=imbalance,
    )
    net = dealt.network(model, hidden, seed)
    counts = dealt.labels.bincount(minlength=dealt.classes)
    balance = len(dealt.labels) / (dealt.classes * counts.clamp(min=1))

    def outputs(x: Tree, y: Tree, inputs: Tensor) -> Tensor:
        return functional_call(net, y, (inputs,))  # type: ignore[no-any-return]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        losses = F.cross_entropy(outputs(x, y, inputs), labels, reduction="none")
        return (balance.to(labels.device)[labels] * losses).mean()

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return vs_loss(x, outputs(x, y, inputs), labels) + 0.5 * ridge * dot(y, y)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        return dealt.accuracies(outputs, x, y)

    x = {name: torch.zeros(dealt.classes) for name in ("weights", "multiplicative", "additive")}
    y = {name: parameter.detach() for name, parameter in net.named_parameters()}
    problem = Problem(upper=upper, lower=lower, x=x, y=y, axes=nets.axes(net))
    return Task(problem, dealt.clients(), evaluate)


def vs_loss(x: Tree, outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of w_k CE(D o + l, k) over samples of labels k."""
    w, D = (2 * x[name].sigmoid() for name in ("weights", "multiplicative"))
    return (
        w[labels] * F.cross_entropy(D * outputs + x["additive"], labels, reduction="none")
    ).mean()
