"""What the tasks on classification data share: a data set dealt to clients, and accuracies on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedbilevel import checks
from fedbilevel.data import load
from fedbilevel.data import partition as partitions
from fedbilevel.problem import ClientData
from fedbilevel.tree import Tree

TRAIN_ACCURACY_SAMPLES = 5000


class Dealt(NamedTuple):
    """Inputs and labels, each client's (training, validation) samples among them, and a test set."""

    inputs: Tensor
    labels: Tensor
    splits: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    classes: int

    def clients(self) -> list[ClientData]:
        pairs = [[(self.inputs[part], self.labels[part]) for part in split] for split in self.splits]
        return [ClientData(train=train, val=val) for train, val in pairs]

    def accuracies(self, predict: Callable[[Tree, Tree, Tensor], Tensor], x: Tree, y: Tree) -> dict[str, float]:
        """Of predict(x, y, inputs), a row of scores a sample: on the first 5,000 samples dealt and on the test set."""
        device = next(iter(x.values())).device
        seen = self.inputs[:TRAIN_ACCURACY_SAMPLES], self.labels[:TRAIN_ACCURACY_SAMPLES]

        def accuracy(inputs: Tensor, labels: Tensor) -> float:
            with torch.no_grad():
                return float((predict(x, y, inputs.to(device)).argmax(-1) == labels.to(device)).float().mean())

        return {"train_accuracy": accuracy(*seen), "test_accuracy": accuracy(*self.test)}


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
) -> Dealt:
    """A data set, dealt by the partition of that name; `samples` and `test_samples` keep the first so many."""
    source = load(data, data_dir)
    for name, count in (("samples", samples), ("test_samples", test_samples)):
        if count is not None:
            checks.integer(name, count, least=1)
    inputs, labels = (tensor[:samples] for tensor in source.train)
    options = {} if alpha is None else {"alpha": alpha}
    parts = partitions.by_name(partition, labels, clients, seed, **options)
    splits = [partitions.split(part, validation, seed, client) for client, part in enumerate(parts)]
    indices = [(torch.as_tensor(train), torch.as_tensor(val)) for train, val in splits]
    test_inputs, test_labels = source.test
    return Dealt(inputs, labels, indices, (test_inputs[:test_samples], test_labels[:test_samples]), source.classes)
