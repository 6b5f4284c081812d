"""Small networks on tokens, as people write them, and bilevel problems made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedbilevel as fb

WORDS = 7
WIDTH = 4
LENGTH = 5


class Attention(nn.Module):
    """Embedding, one causal attention in PyTorch's own kernel, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        q, k, v = (part[:, None] for part in self.qkv(h).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.head(h)


class Recurrent(nn.Module):
    """Embedding, a recurrent layer of PyTorch, and a head."""

    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.words(tokens))[0])


def sentences(count: int, seed: int) -> tuple[Tensor]:
    """Random tokens, of which the later ones repeat the first."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, WORDS, (count, 1), generator=generator)
    return ((first + torch.arange(LENGTH + 1)) % WORDS,)


def clients(count: int = 2, samples: int = 3) -> list[fb.ClientData]:
    """Clients with sentences."""
    return [
        fb.ClientData(sentences(samples, 2 * i), sentences(samples, 2 * i + 1))
        for i in range(count)
    ]


def next_word_loss(outputs: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of predicting each next word."""
    return F.cross_entropy(outputs.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def whole_network_below(net: nn.Module, **options: Any) -> fb.Problem:
    """y is the whole network; x weighs its training loss."""

    def loss(y: fb.Tree, tokens: Tensor) -> Tensor:
        return next_word_loss(functional_call(net, dict(y), (tokens[:, :-1],)), tokens)

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
        ridge = sum((value**2).sum() for value in y.values())
        return x["w"].exp().sum() * loss(y, batch[0]) + 0.01 * ridge

    y = {name: value.detach() for name, value in net.named_parameters()}
    return fb.Problem(
        lambda x, y, batch: loss(y, batch[0]),
        lower,
        x={"w": torch.zeros(1, dtype=y["head.bias"].dtype)},
        y=y,
        **options,
    )


def head_below(net: nn.Module) -> fb.Problem:
    """y is the head, x all other parameters."""
    apply, x, y = fb.split_module(net, lower="head.")

    def upper(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
        return next_word_loss(apply(x, y, batch[0][:, :-1]), batch[0])

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.01 * sum((value**2).sum() for value in y.values())

    return fb.Problem(upper, lower, x=x, y=y)
