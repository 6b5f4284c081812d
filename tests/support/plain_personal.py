"""FedRep and Ditto as plain loops over clients, written from the papers' pseudo-code alone.

They were written before the methods of the package, share no code with them and draw other
batches. Both train a network with one hidden layer on the training samples of each client.

    FedRep, Algorithm 1 of Collins et al. 2021: for s = 1 .. tau_h
    h_i <- GRD(f_i(h_i, phi), h_i, alpha), then phi_i <- GRD(f_i(h_i, phi), phi, alpha), and the
    server averages phi_i over the sampled clients.

    Ditto, Algorithm 1 of Li et al. 2021: w_k by local SGD from w,
    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w)), and the server adds the mean of w_k - w.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Samples = tuple[Tensor, Tensor]


class Network(nn.Module):
    """A hidden layer (the representation) and an output layer (the head)."""

    def __init__(self, body: Sequence[Tensor], head: Sequence[Tensor]) -> None:
        super().__init__()
        self.body = nn.ParameterList(tensor.clone() for tensor in body)
        self.head = nn.ParameterList(tensor.clone() for tensor in head)

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.body
        hidden = torch.relu(F.linear(inputs.flatten(1), weight, bias))
        return F.linear(hidden, *self.head)


@dataclass
class Setting:
    """The conditions under which both train."""

    clients: Sequence[Samples]
    network: Network
    rounds: int
    cohort: int
    lr: float
    batch: int
    ridge: float
    seed: int


def loss_on_batch(setting: Setting, network: Network, i: int, rng: random.Random) -> Tensor:
    """Cross-entropy on a mini-batch of client i, with weight decay on the head."""
    inputs, labels = setting.clients[i]
    chosen = rng.sample(range(len(labels)), min(setting.batch, len(labels)))
    loss = F.cross_entropy(network(inputs[chosen]), labels[chosen])
    return loss + setting.ridge / 2 * sum(p.square().sum() for p in network.head)


def descend(parameters: Sequence[Tensor], loss: Tensor, lr: float) -> None:
    """One gradient step on some parameters."""
    gradients = torch.autograd.grad(loss, list(parameters))
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * gradient


def fedrep(setting: Setting, head_steps: int, body_steps: int) -> list[Network]:
    """The model of each client after training."""
    rng = random.Random(setting.seed)
    body = [p.detach().clone() for p in setting.network.body]
    heads = [[p.detach().clone() for p in setting.network.head] for _ in setting.clients]
    for _ in range(setting.rounds):
        bodies = []
        for i in rng.sample(range(len(heads)), setting.cohort):
            network = Network(body, heads[i])
            for _ in range(head_steps):
                descend(list(network.head), loss_on_batch(setting, network, i, rng), setting.lr)
            for _ in range(body_steps):
                descend(list(network.body), loss_on_batch(setting, network, i, rng), setting.lr)
            heads[i] = [p.detach() for p in network.head]
            bodies.append([p.detach() for p in network.body])
        body = [torch.stack(column).mean(0) for column in zip(*bodies, strict=True)]
    return [Network(body, head) for head in heads]


def ditto(setting: Setting, steps: int, pull: float) -> list[Network]:
    """The personal model v_k of each client after training."""
    rng = random.Random(setting.seed)
    shared = copy.deepcopy(setting.network)
    personal: list[Network | None] = [None] * len(setting.clients)
    for _ in range(setting.rounds):
        locals_ = []
        for i in rng.sample(range(len(personal)), setting.cohort):
            network = copy.deepcopy(shared)
            v = personal[i] or copy.deepcopy(shared)
            for _ in range(steps):
                descend(
                    list(network.parameters()), loss_on_batch(setting, network, i, rng), setting.lr
                )
            for _ in range(steps):
                distance = sum(
                    (a - b.detach()).square().sum()
                    for a, b in zip(v.parameters(), shared.parameters(), strict=True)
                )
                loss = loss_on_batch(setting, v, i, rng) + pull / 2 * distance
                descend(list(v.parameters()), loss, setting.lr)
            personal[i] = v
            locals_.append(network)
        with torch.no_grad():
            columns = zip(*(network.parameters() for network in locals_), strict=True)
            for parameter, column in zip(shared.parameters(), columns, strict=True):
                parameter.copy_(torch.stack(list(column)).mean(0))
    return [v or copy.deepcopy(shared) for v in personal]


def accuracy(network: Network, samples: Samples) -> float:
    """The share of samples that a model classifies correctly."""
    inputs, labels = samples
    with torch.no_grad():
        return float((network(inputs).argmax(-1) == labels).double().mean())
