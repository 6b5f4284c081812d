"""Shared by the tasks on classification data: partitioned samples, networks, accuracies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.tree import Tree
from fedbilevel.data import DataSet, load
from fedbilevel.data import partition as partitions

TRAIN_ACCURACY_SAMPLES = 5000
PREDICTION_BATCH = 1000

Scores = Callable[[Tree, Tree, Tensor], Tensor]


class ClassificationData(NamedTuple):
    """A labelled data set that is partitioned among clients, and a test set.

    Attributes:
        inputs: The samples of all clients, along the leading axis.
        labels: Their labels.
        splits: Per client, the indices of its training and of its validation samples.
        test: Inputs and labels of the test set.
        classes: How many classes there are.
        imbalanced: Whether some classes have far more training samples than others.
        held_out: Per client, the indices of samples that neither level uses; empty if there are
            none.
    """

    inputs: Tensor
    labels: Tensor
    splits: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    classes: int
    imbalanced: bool = False
    held_out: Sequence[Tensor] = ()

    def clients(self) -> list[ClientData]:
        """Return the data of each client.

        All of them are views of one tensor, so that a batch of many clients is one lookup in it.
        """
        parts = [part for split in self.splits for part in split]
        order = torch.cat(parts)
        sizes = [len(part) for part in parts]
        rows = self.inputs.flatten(1)[order]  # three times as fast as rows of several axes
        inputs = rows.view(-1, *self.inputs.shape[1:]).split(sizes)
        labels = self.labels[order].split(sizes)
        sides = list(zip(inputs, labels, strict=True))
        pairs = zip(sides[::2], sides[1::2], strict=True)
        return [ClientData(train=train, val=val) for train, val in pairs]

    def network(
        self, name: str, hidden: int, seed: int, head_layers: int = 1, dropout: float = 0.0
    ) -> nn.Module:
        """Return a network for these inputs and classes.

        Args:
            name: "mlp", "cnn" (LeNet-5) or "resnet18".
            hidden: Hidden units of the MLP.
            seed: The seed of its initial parameters.
            head_layers: How many fully connected layers of LeNet-5 form its head.
            dropout: The dropout rate of the MLP.

        Raises:
            ValueError: The name is unknown, or an option does not suit the network or the data.
        """
        checks.one_of("model", name, ("mlp", "cnn", "resnet18"))
        if name != "cnn" and head_layers != 1:
            raise ValueError(f"head_layers is {head_layers}; with model {name!r} it must be 1")
        if name != "mlp" and dropout:
            raise ValueError(f"dropout is {dropout}; it is for model 'mlp'")
        shape = self.inputs.shape[1:]
        if name == "mlp":
            return nets.mlp(shape.numel(), hidden, self.classes, seed, dropout)
        if len(shape) != 3:
            raise ValueError(
                f"model is {name!r}, which needs images; for other data it must be 'mlp'"
            )
        if name == "resnet18":
            return nets.resnet18(shape[0], shape[1], self.classes, seed)
        return nets.lenet(shape[0], shape[1], self.classes, seed, head_layers)

    def accuracies(self, scores: Scores, x: Tree, y: Tree) -> dict[str, float]:
        """Return the accuracies on training samples and on the test set.

        Args:
            scores: `scores(x, y, inputs)` returns one row of class scores per sample.
            x: The upper variables.
            y: The lower variables.

        Returns:
            `train_accuracy` (on the first 5,000 samples) and `test_accuracy`; where classes are
            imbalanced in training also `balanced_accuracy`, the mean over classes on the test set.
            They are counts divided by counts in double precision: 9,000 of 10,000 is exactly 0.9,
            and so reaches a target of 0.9.
        """
        device = next(iter({**x, **y}.values())).device

        def correct(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                predictions = [
                    scores(x, y, batch.to(device)).argmax(-1).cpu()
                    for batch in inputs.split(PREDICTION_BATCH)
                ]
            return torch.cat(predictions) == labels

        first = slice(TRAIN_ACCURACY_SAMPLES)
        on_train = correct(self.inputs[first], self.labels[first])
        on_test = correct(*self.test)
        metrics = {
            "train_accuracy": fraction(on_train),
            "test_accuracy": fraction(on_test),
        }
        if self.imbalanced:
            _, test_labels = self.test
            per_class = [fraction(on_test[test_labels == label]) for label in test_labels.unique()]
            metrics["balanced_accuracy"] = statistics.fmean(per_class)
        return metrics

    def client_metrics(self, scores: Scores, x: Tree, y: Tree, client: int) -> dict[str, float]:
        """Return `test_accuracy` and `test_loss` of one client on its held-out samples.

        Args:
            scores: `scores(x, y, inputs)` returns one row of class scores per sample.
            x: The client's upper variables.
            y: The client's lower variables.
            client: The client.
        """
        device = next(iter(x.values())).device
        indices = self.held_out[client]
        rows = scores(x, y, self.inputs[indices].to(device)).cpu()
        labels = self.labels[indices]
        return {
            "test_accuracy": fraction(rows.argmax(-1) == labels),
            "test_loss": float(cross_entropies(rows, labels).mean()),
        }


def fraction(holds: Tensor) -> float:
    """Return which part of the entries of a Boolean tensor is true: a count over a count.

    A mean in single precision would make 9,000 of 10,000 less than 0.9.

    Args:
        holds: The Boolean tensor.

    Examples:
        >>> fraction(torch.arange(10_000) < 9_000)
        0.9
    """
    return int(holds.sum()) / holds.numel()


def cross_entropies(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sample.

    It equals `F.cross_entropy(scores, labels, reduction="none")`, which PyTorch computes by many
    more operations under `vmap`.

    Args:
        scores: A row of class scores per sample.
        labels: The class of each sample.
    """
    log_probabilities = scores.log_softmax(-1)
    return -log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def load_partitioned(
    data: str | DataSet,
    data_dir: str | Path | None,
    partition: str,
    alpha: float | None,
    clients: int,
    validation: float,
    *,
    samples: int | None,
    test_samples: int | None,
    seed: int,
    imbalance: float = 1.0,
    held_out: float = 0.0,
    rotated: bool = False,
) -> ClassificationData:
    """Load a data set and partition it among clients.

    Args:
        data: The name of the data set, or the data set itself.
        data_dir: Where its files are; see `fedbilevel.data.load`.
        partition: "iid", "shards", "dirichlet", "quantity" or "feature-shift".
        alpha: The concentration of "dirichlet" and "quantity".
        clients: The number of clients.
        validation: The fraction of each client's samples that are for validation.
        samples: Use only this many training samples, the first ones.
        test_samples: Use only this many test samples, the first ones.
        seed: The seed of the partition.
        imbalance: How many times as many training samples the first class has as the last; see
            `long_tail`. The test set stays balanced.
        held_out: The fraction of each client's samples that are kept for its own evaluation.
        rotated: Whether the images of client i are turned by i quarter turns.

    Returns:
        The samples, their partition and the test set.

    Raises:
        ValueError: An argument is out of range.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.
    """
    source = data
    if isinstance(source, str):
        source = load(source, data_dir)
    for name, count in (("samples", samples), ("test_samples", test_samples)):
        if count is not None:
            checks.integer(name, count, least=1)
    inputs, labels = source.train
    inputs = inputs[:samples]
    labels = labels[:samples]
    if checks.number("imbalance", imbalance) < 1:
        raise ValueError(f"imbalance is {imbalance}; it must be at least 1")
    if imbalance > 1:
        kept = long_tail(labels, source.classes, imbalance)
        inputs = inputs[kept]
        labels = labels[kept]
    options = {}
    if alpha is not None:
        options["alpha"] = alpha
    parts = partitions.by_name(partition, labels, clients, seed, inputs=inputs, **options)
    if not 0 <= checks.number("held_out", held_out) < 1:
        raise ValueError(f"held_out is {held_out}; it must be at least 0 and below 1")
    if rotated:
        inputs = _quarter_turns(inputs, parts)
    splits = []
    own_tests = []
    for client, part in enumerate(parts):
        if held_out:
            part, own = partitions.split(part, held_out, seed, clients + client)
            own_tests.append(torch.as_tensor(own))
        train, val = partitions.split(part, validation, seed, client)
        splits.append((torch.as_tensor(train), torch.as_tensor(val)))
    test_inputs, test_labels = source.test
    test = test_inputs[:test_samples], test_labels[:test_samples]
    return ClassificationData(
        inputs, labels, splits, test, source.classes, imbalance > 1, own_tests
    )


def _quarter_turns(inputs: Tensor, parts: Sequence[partitions.Indices]) -> Tensor:
    """Return a copy in which the images of client i are turned by i quarter turns."""
    if inputs.ndim < 3 or inputs.shape[-1] != inputs.shape[-2]:
        shape = tuple(inputs.shape[1:])
        raise ValueError(f"rotated is True, but samples have shape {shape}; they must be square")
    turned = inputs.clone()
    for client, part in enumerate(parts):
        indices = torch.as_tensor(part)
        turned[indices] = inputs[indices].rot90(client, (-2, -1))
    return turned


def long_tail(labels: Tensor, classes: int, imbalance: float) -> Tensor:
    """Return the indices of a long-tailed subset, in the order of the data.

    Of the n_k samples of class k, the first n_k imbalance^(-k / (classes - 1)) are kept, at least
    one.

    Args:
        labels: The labels of all samples.
        classes: How many classes there are.
        imbalance: How many times as many samples the first class keeps as the last, if all classes
            are equally large.

    Returns:
        The indices of the samples that are kept.
    """
    kept = []
    for k in range(classes):
        members = (labels == k).nonzero()[:, 0]
        count = round(len(members) * imbalance ** (-k / (classes - 1)))
        kept.append(members[: max(count, 1)])
    return torch.cat(kept).sort().values
