"""What the tasks on classification data share: a data set dealt to clients, and accuracies on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbilevel import nets
from fedbilevel.core import checks
from fedbilevel.core.problem import ClientData
from fedbilevel.core.tree import Tree
from fedbilevel.data import load
from fedbilevel.data import partition as partitions

TRAIN_ACCURACY_SAMPLES = 5000
AT_ONCE = 1000  # samples of which predictions are made


class Dealt(NamedTuple):
    """Inputs and labels, each client's (training, validation) samples among them, and a test set."""

    inputs: Tensor
    labels: Tensor
    splits: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    classes: int
    imbalanced: bool = False

    def clients(self) -> list[ClientData]:
        """Each client's samples are parts of one tensor, so that a batch of many clients is one look-up in it."""
        parts = [part for split in self.splits for part in split]
        order, sizes = torch.cat(parts), [len(part) for part in parts]
        sides = list(
            zip(self.inputs[order].split(sizes), self.labels[order].split(sizes), strict=True)
        )
        return [
            ClientData(train=train, val=val)
            for train, val in zip(sides[::2], sides[1::2], strict=True)
        ]

    def network(
        self, name: str, hidden: int, seed: int, head_layers: int = 1, dropout: float = 0.0
    ) -> nn.Module:
        """A network for these inputs and classes: mlp (of `hidden` units), cnn (LeNet-5) or resnet18."""
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

    def accuracies(
        self, predict: Callable[[Tree, Tree, Tensor], Tensor], x: Tree, y: Tree
    ) -> dict[str, float]:
        """Of predict(x, y, inputs), a row of scores a sample: on the first 5,000 samples dealt and on the test set.

        Where classes are imbalanced in training, balanced_accuracy too: the mean over classes on the test set.
        """
        device = next(iter(x.values())).device

        def right(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                parts = [
                    predict(x, y, part.to(device)).argmax(-1).cpu()
                    for part in inputs.split(AT_ONCE)
                ]
            return (torch.cat(parts) == labels).float()

        seen = right(self.inputs[:TRAIN_ACCURACY_SAMPLES], self.labels[:TRAIN_ACCURACY_SAMPLES])
        unseen = right(*self.test)
        found = {"train_accuracy": float(seen.mean()), "test_accuracy": float(unseen.mean())}
        if self.imbalanced:
            each = [unseen[self.test[1] == label].mean() for label in self.test[1].unique()]
            found["balanced_accuracy"] = float(torch.stack(each).mean())
        return found


def deal(
    data: str,
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
) -> Dealt:
    """A data set, dealt by the partition of that name; `samples` and `test_samples` keep the first so many.

    imbalance: of the n_k samples of class k only the first n_k mu^k are dealt (at least 1), where mu makes the first
    class so many times as large as the last. The test set keeps its balance.
    """
    source = load(data, data_dir)
    for name, count in (("samples", samples), ("test_samples", test_samples)):
        if count is not None:
            checks.integer(name, count, least=1)
    inputs, labels = (tensor[:samples] for tensor in source.train)
    if checks.number("imbalance", imbalance) < 1:
        raise ValueError(f"imbalance is {imbalance}; it must be at least 1")
    if imbalance > 1:
        kept = long_tail(labels, source.classes, imbalance)
        inputs, labels = inputs[kept], labels[kept]
    options = {} if alpha is None else {"alpha": alpha}
    parts = partitions.by_name(partition, labels, clients, seed, **options)
    splits = [partitions.split(part, validation, seed, client) for client, part in enumerate(parts)]
    indices = [(torch.as_tensor(train), torch.as_tensor(val)) for train, val in splits]
    test_inputs, test_labels = source.test
    test = test_inputs[:test_samples], test_labels[:test_samples]
    return Dealt(inputs, labels, indices, test, source.classes, imbalance > 1)


def long_tail(labels: Tensor, classes: int, imbalance: float) -> Tensor:
    """The samples to keep, in their order: of class k the first n_k imbalance^(-k / (classes - 1)), at least 1."""
    members = [(labels == k).nonzero()[:, 0] for k in range(classes)]
    counts = [
        max(round(len(own) * imbalance ** (-k / (classes - 1))), 1) for k, own in enumerate(members)
    ]
    return (
        torch.cat([own[:count] for own, count in zip(members, counts, strict=True)]).sort().values
    )
