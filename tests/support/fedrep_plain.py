"""FedRep, written plainly: Algorithm 1 of Collins, Hassani, Mokhtari and Shakkottai (2021),
"Exploiting Shared Representations for Personalized Federated Learning".

Everything about the paper was recalled, not read.  Recalled: the server holds one representation
(body), each client keeps its own head between rounds; a drawn client first takes its head steps
with the received body fixed, then updates the body with its new head fixed, and the server takes
the plain mean of the returned bodies; clients not drawn keep their head.  Algorithm 1 as recalled
takes one body step; several body steps on minibatches are the form of the experiments.  Also
recalled: those experiments used SGD with momentum; here it is SGD without momentum.
Chosen here or by SPEC.md, not by the paper: all clients start from the same head, one step size
serves head and body, and every client (drawn last round or not) takes head_steps more steps on
its head with the final body before evaluation.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


def sgd(
    model: nn.Module,
    part: nn.Module,
    data: Data,
    steps: int,
    lr: float,
    batch_size: int | None,
    generator: torch.Generator,
) -> None:
    """Take SGD steps on the parameters of `part` only; batch_size None means all the data."""
    features, labels = data
    parameters = list(part.parameters())
    for _ in range(steps):
        rows = torch.arange(len(labels))
        if batch_size is not None:
            rows = torch.randint(len(labels), (batch_size,), generator=generator)
        loss = nn.functional.cross_entropy(model(features[rows]), labels[rows])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(lr * gradient)


def fit(
    train: Sequence[Data],
    *,
    body: Callable[[], nn.Module],
    head: Callable[[], nn.Module],
    rounds: int,
    participation: int,
    seed: int,
    head_steps: int,
    body_steps: int,
    lr: float,
    batch_size: int | None,
) -> list[nn.Sequential]:
    """Run FedRep and return one Sequential(final shared body, own head) per client."""
    if not 1 <= participation <= len(train):
        raise ValueError("participation must lie between 1 and the number of clients")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        server_body = body().to(train[0][0].dtype)
        first_head = head().to(train[0][0].dtype)
    if list(server_body.buffers()) + list(first_head.buffers()):
        raise ValueError("modules with buffers (batch normalisation) are not handled")
    heads = [copy.deepcopy(first_head) for _ in train]
    draws = torch.Generator().manual_seed(seed + 1)
    batches = torch.Generator().manual_seed(seed + 2)
    for _ in range(rounds):
        returned: list[nn.Module] = []
        for k in torch.randperm(len(train), generator=draws)[:participation].tolist():
            local_body = copy.deepcopy(server_body)
            model = nn.Sequential(local_body, heads[k])
            sgd(model, heads[k], train[k], head_steps, lr, batch_size, batches)
            sgd(model, local_body, train[k], body_steps, lr, batch_size, batches)
            returned.append(local_body)
        with torch.no_grad():
            columns = zip(*(one.parameters() for one in returned), strict=True)
            for target, column in zip(server_body.parameters(), columns, strict=True):
                target.copy_(torch.stack(column).mean(0))
    models = [nn.Sequential(server_body, own_head) for own_head in heads]
    for model, own_head, data in zip(models, heads, train, strict=True):
        sgd(model, own_head, data, head_steps, lr, batch_size, batches)
    return models


def run(train: Sequence[Data], test: Sequence[Data], **settings: Any) -> list[float]:
    """Run FedRep (keywords as in `fit`) and return each client's accuracy on its own test data."""
    models = fit(train, **settings)
    accuracies: list[float] = []
    for model, (features, labels) in zip(models, test, strict=True):
        with torch.no_grad():
            predicted = model(features).argmax(1)
        accuracies.append(float((predicted == labels).double().mean()))
    return accuracies
