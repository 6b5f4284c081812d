"""The problem of a linear model with one learnt penalty per feature, for a table of one's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core import checks
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree
from fedbilevel.data.clients import Clients

PENALTY_BOUNDS = (1e-4, 1.0)
START_PENALTY = 1e-2
MOST_CLASSES = 50  # of whole numbers, which are hardly classes if there are more


def linear_model(clients: Clients) -> Problem:
    """A logistic regression of classes, or a linear regression of numbers, as a bilevel problem.

    lower: loss on training rows + 1/2 sum_j exp(x_j) ||W_j||^2,
    upper: loss on validation rows, with y = (W, intercept).

    W_j are the weights of feature j, and x["log_penalty"] is the logarithm of one penalty per
    feature, 0.01 at the start and from 0.0001 to 1. The loss is the cross-entropy for a target of
    classes, and half the squared error for one of numbers.

    Args:
        clients: What `fb.clients` made of a table.

    Returns:
        The problem, for `fb.value`, `fb.weighted`, `fb.solve` and everything else that takes one.

    Raises:
        TypeError: The clients are not those of `fb.clients`.
        ValueError: The inputs of the clients are no table, or the target has more than 50 whole
            numbers as classes.

    References:
        Larsen, Hansen, Svarer, Ohlsson, "Design and regularization of neural networks: the optimal
        use of a validation set", 1996.

    Examples:
        At hospital c, yes and no were exchanged in all rows but those that were checked:

        >>> import numpy as np
        >>> import fedbilevel as fb
        >>> rng = np.random.default_rng(0)
        >>> age = rng.normal(60, 10, 600)
        >>> table = {"age": age, "hospital": np.repeat(["a", "b", "c"], 200)}
        >>> table["checked"] = np.arange(600) % 4 == 0
        >>> exchanged = (table["hospital"] == "c") & ~table["checked"]
        >>> table["ill"] = (age > 60) ^ exchanged
        >>> sites = fb.clients(table, by="hospital", target="ill", validation="checked")
        >>> value = fb.value(fb.linear_model(sites), sites)
        >>> [value.names[site] for site in value.harmful]
        ['c']
    """
    checks.instance("clients", clients, Clients)
    if not clients.features:
        raise ValueError(
            "the inputs of these clients are no table; write the losses of an fb.Problem for them"
        )
    outputs = len(clients.classes or [None])
    if outputs > MOST_CLASSES and isinstance(clients.classes[0], int):  # type: ignore[index]
        raise ValueError(
            f"the target has {outputs} classes, because its numbers are whole; turn them into "
            "floats (in a file: 12.0) to predict a number"
        )
    low, high = (math.log(bound) for bound in PENALTY_BOUNDS)

    def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch
        return _loss(_predict(y, inputs), target)

    def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = x["log_penalty"].exp() @ (y["weight"] ** 2).sum(1)
        small = PENALTY_BOUNDS[0] * (y["intercept"] ** 2).sum()  # its sum is free otherwise
        return upper(x, y, batch) + 0.5 * (penalty + small)

    features = len(clients.features)
    return Problem(
        upper=upper,
        lower=lower,
        x={"log_penalty": torch.full((features,), math.log(START_PENALTY))},
        y={"weight": torch.zeros(features, outputs), "intercept": torch.zeros(outputs)},
        project_x=lambda x: Tree(log_penalty=x["log_penalty"].clamp(low, high)),
    )


def held_out_metrics(clients: Clients, y: Tree) -> dict[str, float]:
    """Return the metrics of a linear model on the samples that no client has.

    Args:
        clients: What `fb.clients` made of a table.
        y: The lower variables of `linear_model(clients)`.

    Returns:
        `test_loss`, the loss of the model, and of classes `test_accuracy`; nothing if no sample was
        held out.

    Examples:
        >>> import fedbilevel as fb
        >>> table = {"age": [50.0, 61, 44, 39] * 5, "ill": [1, 1, 0, 0] * 5}
        >>> sites = fb.clients(table, count=2, target="ill", test=0.2)
        >>> held_out_metrics(sites, fb.linear_model(sites).start[1])["test_accuracy"]
        0.5
    """
    if clients.test is None:
        return {}
    inputs, target = clients.test
    predicted = _predict(y.map(Tensor.cpu), inputs)
    metrics = {"test_loss": float(_loss(predicted, target))}
    if clients.classes is not None:
        metrics["test_accuracy"] = float((predicted.argmax(1) == target).double().mean())
    return metrics


def _predict(y: Tree, inputs: Tensor) -> Tensor:
    return inputs @ y["weight"] + y["intercept"]


def _loss(predicted: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of classes, or half the squared error of numbers."""
    if target.is_floating_point():
        return 0.5 * ((predicted[:, 0] - target) ** 2).mean()
    return F.cross_entropy(predicted, target)
