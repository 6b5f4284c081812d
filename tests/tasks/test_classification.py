"""Data for classification tasks: options, partitioned samples, long tails, accuracies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.tasks.classification import load_partitioned, long_tail


@pytest.mark.parametrize("name", ["hyper-cleaning", "regularization"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "digts"}, "did you mean 'digits'"),
        ({"partition": "label"}, "partition is 'label'; it must be one of"),
        ({"validation": 1.0}, "validation is 1.0; it must be above 0 and below 1"),
        ({"samples": 0}, "samples is 0; it must be at least 1"),
        ({"clients": 1000}, "clients is 1000; it must be at most"),
    ],
)
def test_wrong_options_of_the_data_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    arguments = {"data": "breast-cancer", **options}
    with pytest.raises(ValueError, match=message):
        fb.tasks.load(name, **arguments)


def test_the_long_tail_falls_geometrically() -> None:
    labels = torch.arange(5000) % 10
    kept = long_tail(labels, 10, 100.0)
    assert labels[kept].bincount().tolist() == [500, 300, 180, 108, 65, 39, 23, 14, 8, 5]
    assert torch.equal(kept, kept.sort().values)
    for k in range(10):
        kept_of_class = kept[labels[kept] == k]
        of_class = (labels == k).nonzero()[:, 0]
        assert torch.equal(kept_of_class, of_class[: len(kept_of_class)])


def test_the_long_tail_keeps_a_sample_of_every_class() -> None:
    labels = torch.arange(40) % 10
    assert long_tail(labels, 10, 1000.0).shape == (4 + 2 + 8,)


def load_digits(**options: Any) -> Any:
    return load_partitioned(
        "digits", None, "iid", None, 10, 0.2, samples=None, test_samples=None, seed=0, **options
    )


def test_an_imbalance_thins_the_samples_of_clients_and_not_the_test_set() -> None:
    balanced = load_digits()
    tailed = load_digits(imbalance=20.0)
    counts = tailed.labels.bincount()
    assert counts[0] == balanced.labels.bincount()[0]
    assert float(counts[0] / counts[9]) == pytest.approx(20, rel=0.1)
    used = torch.cat([torch.cat(split) for split in tailed.splits])
    assert sorted(used.tolist()) == list(range(len(tailed.labels)))
    assert torch.equal(tailed.test[1], balanced.test[1])


def test_the_balanced_accuracy_is_the_mean_over_classes_and_only_for_imbalanced_data() -> None:
    def always_class_0(x: fb.Tree, y: fb.Tree, inputs: Tensor) -> Tensor:
        return F.one_hot(torch.zeros(len(inputs), dtype=torch.int64), 10)

    x = fb.Tree(x=torch.zeros(1))
    y = fb.Tree()
    test = torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 0, 1, 1])
    metrics = load_digits(imbalance=20.0)._replace(test=test).accuracies(always_class_0, x, y)
    assert metrics["test_accuracy"] == pytest.approx(4 / 6)
    assert metrics["balanced_accuracy"] == 0.5
    names = set(load_digits().accuracies(always_class_0, x, y))
    assert names == {"train_accuracy", "test_accuracy"}


def test_accuracies_are_counts_over_counts_in_double_precision() -> None:
    def always_class_0(x: fb.Tree, y: fb.Tree, inputs: Tensor) -> Tensor:
        return F.one_hot(torch.zeros(len(inputs), dtype=torch.int64), 10)

    labels = (torch.arange(10_000) >= 9_000).long()
    test = torch.zeros(10_000, 1), labels
    dataset = load_digits(imbalance=20.0)._replace(test=test, inputs=test[0], labels=labels)
    metrics = dataset.accuracies(always_class_0, fb.Tree(x=torch.zeros(1)), fb.Tree())
    assert metrics["test_accuracy"] == 0.9  # a mean in single precision is 0.89999998
    assert metrics["train_accuracy"] == 1.0
    assert metrics["balanced_accuracy"] == 0.5
