"""Loss tuning: the VS-loss and the balanced loss by hand, and a loss that helps rare classes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core import rng
from fedbilevel.tasks.loss_tuning import vs_loss

KEY = rng.root(0, "test")


def logits(factors: tuple[float, ...]) -> torch.Tensor:
    """Return the entries of x at which twice the sigmoid takes these values."""
    return torch.tensor([math.log(value / (2 - value)) for value in factors])


def test_vs_loss_by_hand() -> None:
    w = (0.5, 1.0, 1.5)
    D = (1.0, 0.25, 1.5)
    shift = (0.3, -0.2, 0.0)
    x = fb.Tree(weights=logits(w), multiplicative=logits(D), additive=torch.tensor(shift))
    outputs = [[1.0, 2.0, -1.0], [0.0, 0.5, 3.0]]
    labels = [1, 0]
    expected = 0.0
    for row, k in zip(outputs, labels, strict=True):
        scores = [math.exp(D[c] * row[c] + shift[c]) for c in range(3)]
        expected -= w[k] * math.log(scores[k] / sum(scores)) / 2
    loss = vs_loss(x, torch.tensor(outputs), torch.tensor(labels))
    assert float(loss) == pytest.approx(expected)


def test_the_vs_loss_starts_as_cross_entropy() -> None:
    task = fb.tasks.load("loss-tuning", hidden=8, ridge=0.5)
    x, y = task.problem.start
    batch: Any = task.clients[0].train
    inputs, labels = batch
    net = fb.nets.mlp(64, 8, 10)
    squares = torch.stack([(tensor**2).sum() for tensor in y.values()]).sum()
    expected = F.cross_entropy(functional_call(net, y, (inputs,)), labels) + 0.25 * squares
    torch.testing.assert_close(task.problem.lower(x, y, batch, KEY), expected)
    assert set(x) == {"weights", "multiplicative", "additive"}
    assert all(tensor.shape == (10,) for tensor in x.values())
    assert set(y) == {name for name, _ in net.named_parameters()}
    assert set(task.problem.axes) <= set(y)  # a submodel has all of x


def test_the_upper_loss_is_the_mean_over_classes_of_all_data_together() -> None:
    """Over all samples of all clients it is the mean of the classes' mean cross-entropies."""
    task = fb.tasks.load("loss-tuning", hidden=8, partition="shards")
    x, y = task.problem.start
    sides: list[Any] = []
    for client in task.clients:
        sides += [client.train, client.val]
    inputs = torch.cat([side[0] for side in sides])
    labels = torch.cat([side[1] for side in sides])
    outputs = functional_call(fb.nets.mlp(64, 8, 10), y, (inputs,))
    losses = F.cross_entropy(outputs, labels, reduction="none")
    per_class = torch.stack([losses[labels == k].mean() for k in range(10)])
    upper = task.problem.upper(x, y, (inputs, labels), KEY)
    torch.testing.assert_close(upper, per_class.mean())
    elsewhere = x.map(lambda t: t + 1)
    assert task.problem.upper(elsewhere, y, (inputs, labels), KEY) == upper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imbalance": 0.5}, "imbalance is 0.5; it must be at least 1"),
        (
            {"model": "resnet12"},
            "model is 'resnet12' .*; it must be one of 'mlp', 'cnn', 'resnet18'",
        ),
        ({"data": "breast-cancer", "model": "resnet18"}, "model is 'resnet18', which needs images"),
        ({"ridge": -1.0}, "ridge is -1.0; it must not be negative"),
        ({"data": "omniglot"}, "name is 'omniglot'.*it must be one of"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("loss-tuning", **options)


def test_simfbo_tunes_the_loss_for_rare_classes() -> None:
    """Observed: balanced accuracy .66 with cross-entropy and .74 with the tuned loss.

    The upper losses are .69 and .39.
    """
    task = fb.tasks.load("loss-tuning", clients=4, hidden=16, imbalance=50.0)

    def solve(lr_x: float) -> fb.Result:
        method = fb.algorithms.SimFBO(server_lr_x=lr_x, server_lr_y=0.2, server_lr_z=0.02)
        return fb.solve(
            task.problem, task.clients, method, rounds=120, evaluate=task.evaluate, every=120
        )

    plain = solve(lr_x=1e-9)
    tuned = solve(lr_x=2.0)
    plain_end = plain.history[-1]
    tuned_end = tuned.history[-1]
    assert tuned_end["upper_loss"] < 0.7 * plain_end["upper_loss"]
    assert tuned_end["balanced_accuracy"] > plain_end["balanced_accuracy"] + 0.02
    # The classes are sorted by frequency: rare ones get more weight and a wider margin.
    weights = tuned.x["weights"]
    assert weights[-3:].mean() > weights[:3].mean()
    shifts = tuned.x["additive"]
    assert shifts[-3:].mean() < shifts[:3].mean()
