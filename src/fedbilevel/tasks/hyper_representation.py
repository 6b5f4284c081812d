"""Hyper-representation: learn a backbone (upper level) for a head (lower level).

lower: cross-entropy on training data + ridge/2 ||y||^2,
upper: cross-entropy on validation data.

The head is shared, or every client has its own: y_i*(x) = argmin g_i(x, y_i) on its own data.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.modules import split_module
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, dot
from fedbilevel.runs.adapt import adapt
from fedbilevel.runs.clients import distribution, with_suffixes
from fedbilevel.tasks.classification import cross_entropies, load_partitioned
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
    owner: Literal["server", "client"] = "server",
    held_out: float | None = None,
    rotated: bool = False,
    new_clients: int = 0,
    adapt_steps: int = 10,
    adapt_lr: float = 0.1,
    samples: int | None = None,
    test_samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Task:
    """Build the task of learning a backbone, x, on which a head, y, fits well.

    FedNest's published code corresponds to validation 0.5 for "iid" and 0.2 for "shards", dropout
    0.5, ridge 0 and norm_penalty 0.1. SimFBO and ASFBO split 600 samples per client 450/150:
    validation 0.25.

    Args:
        data: "digits", "mnist" or "cifar10".
        partition: How samples are partitioned among clients: "iid", "shards" or "dirichlet".
        clients: The number of clients.
        validation: The fraction of each client's samples that the upper level uses.
        alpha: The concentration of "dirichlet".
        model: "mlp", "cnn" (LeNet-5) or "resnet18".
        hidden: Hidden units of the MLP.
        head_layers: How many fully connected layers of LeNet-5 form the head.
        dropout: The dropout rate of the MLP.
        ridge: The factor of ||y||^2 / 2 in the lower loss.
        norm_penalty: The factor of half the sum of the norms of the head's tensors.
        owner: Who has the head: the "server", one for all, or every "client" its own.
        held_out: The fraction of each client's samples that are for its evaluation; by default 0.2
            where clients differ in heads or rotations or some are new, else 0.
        rotated: Whether the images of client i are turned by i quarter turns, so that clients
            differ in their inputs, whatever the partition of the labels.
        new_clients: How many of the clients, the last ones, take no part in training. At every
            evaluation they adapt to the model, see `fb.adapt`.
        adapt_steps: Steps of a new client on its head.
        adapt_lr: Step size of a new client.
        samples: Use only this many training samples, the first ones.
        test_samples: Use only this many test samples, the first ones.
        seed: The seed of the partition, the initial parameters and dropout.
        data_dir: Where the files of the data set are; see `fedbilevel.data.load`.

    Returns:
        The task. Its metrics: `train_accuracy` and `test_accuracy` on the common test set; with
        `held_out` above 0 instead `test_accuracy` and `test_loss` of each client's own model on its
        own held-out samples, as a mean over clients and as a distribution; with `new_clients` also
        `new_test_accuracy` and `new_test_loss`, the same of those clients.

    Raises:
        ValueError: An option is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("hyper-representation", clients=10, hidden=16)
        >>> sorted(task.problem.y)
        ['head.bias', 'head.weight']
    """
    checks.non_negative("ridge", ridge)
    checks.non_negative("norm_penalty", norm_penalty)
    checks.one_of("owner", owner, ("server", "client"))
    checks.integer("new_clients", new_clients, least=0, most=clients - 1)
    by_client = owner == "client" or rotated or new_clients > 0
    if held_out is None:
        held_out = 0.2 if by_client else 0.0
    if by_client and not held_out:
        raise ValueError(
            "held_out is 0, and clients have heads or rotations of their own or are new; they are "
            "evaluated on their own samples, so held_out must be above 0"
        )
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
        held_out=held_out,
        rotated=rotated,
    )
    net = dataset.network(model, hidden, seed, head_layers, dropout)
    _, x, y = split_module(net, lower="head.")
    predict = split_module(deepcopy(net).eval(), lower="head.").apply
    below, above = nets.stem(net)

    def embed(x: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return below(x, batch[0]), batch[1]

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        features, targets = batch
        with nets.randomness(rng):
            return cross_entropies(above({**x, **y}, features), targets).mean()

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor], rng: Tensor) -> Tensor:
        loss = upper(x, y, batch, rng)
        if ridge:
            loss = loss + 0.5 * ridge * dot(y, y)
        if norm_penalty:
            norms = torch.stack([tensor.norm() for tensor in y.values()])
            loss = loss + 0.5 * norm_penalty * norms.sum()
        return loss

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        return dataset.accuracies(predict, x, y)

    def evaluate_client(x: Tree, y: Tree, client: int) -> dict[str, float]:
        return dataset.client_metrics(predict, x, y, client)

    problem = Problem(
        upper=upper, lower=lower, x=x, y=y, embed=embed, owner=dict.fromkeys(y, owner)
    )
    data_of_clients = dataset.clients()
    known = data_of_clients[: clients - new_clients]
    newcomers = data_of_clients[clients - new_clients :]

    def evaluate_newcomers(x: Tree, y: Tree) -> dict[str, float]:
        models = adapt(problem, newcomers, x, y, steps=adapt_steps, lr=adapt_lr, seed=seed)
        columns: dict[str, list[float]] = {}
        for client, model in enumerate(models, start=len(known)):
            for name, value in evaluate_client(*model, client).items():
                columns.setdefault(f"new_{name}", []).append(value)
        metrics: dict[str, float] = {}
        for name, values in columns.items():
            metrics |= with_suffixes(name, distribution(name, values))
        return metrics

    if not held_out:
        return Task(problem, known, evaluate)
    return Task(
        problem,
        known,
        evaluate_newcomers if new_clients else None,
        evaluate_client=evaluate_client,
    )
