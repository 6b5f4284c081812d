"""Loss tuning: the VS-loss and the balanced loss by hand, the long tail, and what the tuned loss is good for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.core import rng
from fedbilevel.tasks.classification import load_partitioned, long_tail
from fedbilevel.tasks.loss_tuning import vs_loss

KEY = rng.root(0, "test")


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def test_vs_loss_by_hand() -> None:
    w, D, l = (0.5, 1.0, 1.5), (1.0, 0.25, 2 - 0.5), (0.3, -0.2, 0.0)  # noqa: E741
    x = fb.Tree(
        weights=torch.tensor([logit(value / 2) for value in w]),
        multiplicative=torch.tensor([logit(value / 2) for value in D]),
        additive=torch.tensor(l),
    )
    outputs = [[1.0, 2.0, -1.0], [0.0, 0.5, 3.0]]
    expected = 0.0
    for row, k in zip(outputs, (1, 0), strict=True):
        shifted = [math.exp(D[c] * row[c] + l[c]) for c in range(3)]
        expected -= w[k] * math.log(shifted[k] / sum(shifted)) / 2
    assert float(vs_loss(x, torch.tensor(outputs), torch.tensor([1, 0]))) == pytest.approx(expected)


def test_the_vs_loss_starts_as_cross_entropy() -> None:
    task = fb.tasks.load("loss-tuning", hidden=8, ridge=0.5)
    (x, y), (inputs, labels) = task.problem.start, task.clients[0].train
    net = fb.nets.mlp(64, 8, 10)
    squares = torch.stack([(tensor**2).sum() for tensor in y.values()]).sum()
    expected = F.cross_entropy(functional_call(net, y, (inputs,)), labels) + 0.25 * squares
    torch.testing.assert_close(task.problem.lower(x, y, (inputs, labels), KEY), expected)
    assert set(x) == {"weights", "multiplicative", "additive"}
    assert all(t.shape == (10,) for t in x.values())
    assert set(y) == {name for name, _ in net.named_parameters()}
    assert set(task.problem.axes) <= set(y)  # a submodel has all of x


def test_the_upper_loss_is_the_mean_over_classes_of_all_data_together() -> None:
    """Over every sample dealt it is the mean of the classes' mean cross-entropies, whatever the tail."""
    task = fb.tasks.load("loss-tuning", hidden=8, partition="shards")
    x, y = task.problem.start
    inputs, labels = (
        torch.cat([side[j] for c in task.clients for side in (c.train, c.val)]) for j in (0, 1)
    )  # type: ignore[index]
    losses = F.cross_entropy(
        functional_call(fb.nets.mlp(64, 8, 10), y, (inputs,)), labels, reduction="none"
    )
    each = torch.stack([losses[labels == k].mean() for k in range(10)])
    torch.testing.assert_close(task.problem.upper(x, y, (inputs, labels), KEY), each.mean())
    moved = x.map(lambda t: t + 1)
    assert task.problem.upper(moved, y, (inputs, labels), KEY) == task.problem.upper(
        x, y, (inputs, labels), KEY
    )


def test_the_long_tail_falls_geometrically() -> None:
    labels = torch.arange(5000) % 10
    kept = long_tail(labels, 10, 100.0)
    assert labels[kept].bincount().tolist() == [500, 300, 180, 108, 65, 39, 23, 14, 8, 5]
    assert torch.equal(kept, kept.sort().values)
    for k in range(10):
        own = (labels == k).nonzero()[:, 0]
        assert torch.equal(kept[labels[kept] == k], own[: int((labels[kept] == k).sum())])
    assert long_tail(labels[:40], 10, 1000.0).shape == (4 + 2 + 8,)  # no class is lost


def test_only_what_is_dealt_has_a_tail_and_the_balanced_accuracy_weighs_classes_alike() -> None:
    options: dict[str, Any] = {"samples": None, "test_samples": None, "seed": 0}
    even = load_partitioned("digits", None, "iid", None, 10, 0.2, **options)
    tailed = load_partitioned("digits", None, "iid", None, 10, 0.2, **options, imbalance=20.0)
    counts = tailed.labels.bincount()
    assert counts[0] == even.labels.bincount()[0]
    assert float(counts[0] / counts[9]) == pytest.approx(20, rel=0.1)
    assert sorted(torch.cat([torch.cat(split) for split in tailed.splits]).tolist()) == list(
        range(len(tailed.labels))
    )
    assert torch.equal(tailed.test[1], even.test[1])
    skewed = tailed._replace(test=(torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 0, 1, 1])))

    def always_0(x: fb.Tree, y: fb.Tree, inputs: Tensor) -> Tensor:
        return F.one_hot(torch.zeros(len(inputs), dtype=torch.int64), 10)

    found = skewed.accuracies(always_0, fb.Tree(x=torch.zeros(1)), fb.Tree())
    assert found["test_accuracy"] == pytest.approx(4 / 6)
    assert found["balanced_accuracy"] == 0.5
    assert set(even.accuracies(always_0, fb.Tree(x=torch.zeros(1)), fb.Tree())) == {
        "train_accuracy",
        "test_accuracy",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imbalance": 0.5}, "imbalance is 0.5; it must be at least 1"),
        ({"model": "resnet12"}, "model is 'resnet12'; it must be one of 'mlp', 'cnn', 'resnet18'"),
        ({"data": "breast-cancer", "model": "resnet18"}, "model is 'resnet18', which needs images"),
        ({"ridge": -1.0}, "ridge is -1.0; it must not be negative"),
        ({"data": "omniglot"}, "name is 'omniglot'; it must be one of"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.tasks.load("loss-tuning", **options)


def test_simfbo_tunes_the_loss_for_rare_classes() -> None:
    """Seen: balanced accuracy .66 with cross-entropy, .74 with the tuned loss; upper loss .69 and .39."""
    task = fb.tasks.load("loss-tuning", clients=4, hidden=16, imbalance=50.0)

    def ends(lr_x: float) -> fb.Result:
        method = fb.algorithms.SimFBO(server_lr_x=lr_x, server_lr_y=0.2, server_lr_z=0.02)
        return fb.solve(
            task.problem, task.clients, method, rounds=120, evaluate=task.evaluate, every=120
        )

    plain, tuned = ends(1e-9), ends(2.0)
    assert tuned.history[-1]["upper_loss"] < 0.7 * plain.history[-1]["upper_loss"]
    assert tuned.history[-1]["balanced_accuracy"] > plain.history[-1]["balanced_accuracy"] + 0.02
    assert (
        tuned.x["weights"][-3:].mean() > tuned.x["weights"][:3].mean()
    )  # rare classes count more,
    assert (
        tuned.x["additive"][-3:].mean() < tuned.x["additive"][:3].mean()
    )  # and with a wider margin
