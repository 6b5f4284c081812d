"""Loss tuning: learn a loss on long-tailed data under which a network treats all classes alike.

lower: mean over a batch of
       -w_k log(exp(D_k o_k + l_k) / sum_c exp(D_c o_c + l_c)) + ridge/2 ||y||^2,
upper: class-balanced cross-entropy on validation data, the mean of N / (C n_k) CE.

Here o are the outputs of the network y for a sample of class k, and n_k of the N samples of C
classes are of class k, counted over all clients, because a client may lack a class. The lower loss
is the VS-loss of Kini et al., "Label-imbalanced and group-sensitive classification under
overparameterization", 2021. Its parameters x are a weight w, a factor D and a shift l per class.

Departure from the paper: Li et al., "Distributed bilevel optimization with dual pruning for
resource-limited clients", use the VS-loss on the upper level too, where weights of 0 minimise it.

w and D are twice the sigmoid of their entries of x, and l is its entry. At the start, x = 0, the
VS-loss is cross-entropy. Because w and D stay below 2, they raise the curvature of the lower level
at most eightfold, and the step sizes for y stay valid.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot
from fedbilevel.tasks.classification import cross_entropies, load_partitioned
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
    """Build the task of learning a loss, x, for a network, y, on long-tailed data.

    Args:
        data: "digits", "mnist" or "cifar10".
        partition: How samples are partitioned among clients: "iid", "shards" or "dirichlet".
        clients: The number of clients.
        validation: The fraction of each client's samples that the upper level uses.
        alpha: The concentration of "dirichlet".
        imbalance: How many times as many samples the first class has as the last. The number of
            samples falls geometrically in between, in training and in validation data.
        model: "mlp", "cnn" (LeNet-5) or "resnet18".
        hidden: Hidden units of the MLP.
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        samples: Use only this many training samples, the first ones.
        test_samples: Use only this many test samples, the first ones.
        seed: The seed of the partition and the initial parameters.
        data_dir: Where the files of the data set are; see `fedbilevel.data.load`.

    Returns:
        The task. Its metrics: `train_accuracy`, `test_accuracy` and
        `balanced_accuracy`, the mean over classes on the test set.

    Raises:
        ValueError: An option is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("loss-tuning", clients=4, hidden=16)
        >>> sorted(task.problem.x)
        ['additive', 'multiplicative', 'weights']
    """
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
        imbalance=imbalance,
    )
    net = dataset.network(model, hidden, seed)
    counts = dataset.labels.bincount(minlength=dataset.classes)
    balance = len(dataset.labels) / (dataset.classes * counts.clamp(min=1))

    def outputs(x: Tree, y: Tree, inputs: Tensor) -> Tensor:
        return functional_call(net, y, (inputs,))  # type: ignore[no-any-return]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        losses = cross_entropies(outputs(x, y, inputs), labels)
        return (balance.to(labels.device)[labels] * losses).mean()

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return vs_loss(x, outputs(x, y, inputs), labels) + 0.5 * ridge * dot(y, y)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        return dataset.accuracies(outputs, x, y)

    x = {name: torch.zeros(dataset.classes) for name in ("weights", "multiplicative", "additive")}
    y = {name: parameter.detach() for name, parameter in net.named_parameters()}
    problem = Problem(upper=upper, lower=lower, x=x, y=y, axes=nets.axes(net))
    return Task(problem, dataset.clients(), evaluate)


def vs_loss(x: Tree, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of w_k CE(D o + l, k) over samples with outputs o and label k."""
    w = 2 * x["weights"].sigmoid()
    D = 2 * x["multiplicative"].sigmoid()
    losses = cross_entropies(D * outputs + x["additive"], labels)
    return (w[labels] * losses).mean()
