"""Ditto, written plainly: Algorithm 1 of Li, Hu, Beirami and Smith (2021), "Ditto: Fair and
Robust Federated Learning Through Personalization", with the solver of its Section 3.

Everything about the paper was recalled, not read.  Recalled: the personal objective of client k is
F_k(v) + lam/2 |v - w|^2; a drawn client receives the global model w, makes its local update of w
for the server, and takes s steps v <- v - lr_personal (grad F_k(v) + lam (v - w)) with that same
received w; its v is kept between rounds and never sent; clients not drawn keep their v.
The global part is FedAvg: the server takes the plain mean of the local models.
Chosen here or by SPEC.md, not by the paper: every v_k starts at the first global model (so a
client never drawn is evaluated at that model), and the global and personal steps draw separate
minibatches, so that lam and the personal steps cannot change the path of w.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


def sgd(
    model: nn.Module,
    anchor: nn.Module,
    lam: float,
    data: Data,
    steps: int,
    lr: float,
    batch_size: int | None,
    generator: torch.Generator,
) -> None:
    """Take SGD steps on F_k + lam/2 |model - anchor|^2; batch_size None means all the data."""
    features, labels = data
    parameters = list(model.parameters())
    for _ in range(steps):
        rows = torch.arange(len(labels))
        if batch_size is not None:
            rows = torch.randint(len(labels), (batch_size,), generator=generator)
        loss = nn.functional.cross_entropy(model(features[rows]), labels[rows])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for v, gradient, w in zip(parameters, gradients, anchor.parameters(), strict=True):
                v.sub_(lr * (gradient + lam * (v - w)))


def fit(
    train: Sequence[Data],
    *,
    body: Callable[[], nn.Module],
    head: Callable[[], nn.Module],
    rounds: int,
    participation: int,
    seed: int,
    global_steps: int,
    personal_steps: int,
    lr: float,
    lr_personal: float,
    lam: float,
    batch_size: int | None,
) -> tuple[nn.Sequential, list[nn.Sequential]]:
    """Run Ditto and return the final global model and the personal model of every client."""
    if not 1 <= participation <= len(train):
        raise ValueError("participation must lie between 1 and the number of clients")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        server = nn.Sequential(body(), head()).to(train[0][0].dtype)
    if list(server.buffers()):
        raise ValueError("modules with buffers (batch normalisation) are not handled")
    personal = [copy.deepcopy(server) for _ in train]
    draws = torch.Generator().manual_seed(seed + 1)
    global_batches = torch.Generator().manual_seed(seed + 2)
    own_batches = torch.Generator().manual_seed(seed + 3)
    for _ in range(rounds):
        returned: list[nn.Module] = []
        for k in torch.randperm(len(train), generator=draws)[:participation].tolist():
            local = copy.deepcopy(server)
            sgd(local, server, 0.0, train[k], global_steps, lr, batch_size, global_batches)
            sgd(
                personal[k],
                server,
                lam,
                train[k],
                personal_steps,
                lr_personal,
                batch_size,
                own_batches,
            )
            returned.append(local)
        with torch.no_grad():
            columns = zip(*(one.parameters() for one in returned), strict=True)
            for target, column in zip(server.parameters(), columns, strict=True):
                target.copy_(torch.stack(column).mean(0))
    return server, personal


def run(train: Sequence[Data], test: Sequence[Data], **settings: Any) -> list[float]:
    """Run Ditto (keywords as in `fit`) and return each v_k's accuracy on its own test data."""
    _, personal = fit(train, **settings)
    accuracies: list[float] = []
    for model, (features, labels) in zip(personal, test, strict=True):
        with torch.no_grad():
            predicted = model(features).argmax(1)
        accuracies.append(float((predicted == labels).double().mean()))
    return accuracies
