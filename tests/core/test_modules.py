"""Networks that people have: their loss falls, and what was learnt loads into their own module."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbilevel as fb
from fedbilevel.core.modules import split_module
from tests.support import sequences


class Encoder(nn.Module):
    """A transformer of PyTorch with a buffer of positions, on padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        width = sequences.WIDTH
        self.words = nn.Embedding(sequences.WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, sequences.WORDS)
        self.register_buffer("positions", torch.linspace(0, 1, sequences.LENGTH)[:, None])

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.words(tokens) + self.positions
        return self.head(self.layers(h, src_key_padding_mask=padding))


class Normalised(nn.Module):
    """Embedding, BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(sequences.WORDS, sequences.WIDTH)
        self.norm = nn.BatchNorm1d(sequences.WIDTH)
        self.head = nn.Linear(sequences.WIDTH, sequences.WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2))


class Tied(sequences.Attention):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


def adapted_attention() -> nn.Module:
    return fb.nets.with_adapters(sequences.Attention(), rank=2)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lstm": (sequences.Recurrent, {"lower": "head."}),
    "transformer": (Encoder, {"lower": "head."}),
    "transformer in evaluation mode": (lambda: Encoder().eval(), {"lower": ("head.", "layers.")}),
    "frozen BatchNorm": (Normalised, {"lower": "head.", "buffers": "freeze"}),
    "BatchNorm by batch": (Normalised, {"lower": "head.", "buffers": "batch"}),
    "tied weights": (Tied, {"upper": "qkv."}),
    "frozen embedding": (sequences.Attention, {"lower": "head.", "frozen": "words.*"}),
    "adapters": (adapted_attention, {"lower": "*.up", "upper": "*.down"}),
}


def problem_of(split: Any, **options: Any) -> fb.Problem:
    def upper(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
        outputs = split.apply(x, y, batch[0][:, :-1], **options)
        return sequences.next_word_loss(outputs, batch[0])

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.001 * sum((value**2).sum() for value in y.values())

    return fb.Problem(upper, lower, x=split.x, y=split.y)


@pytest.mark.parametrize("method", ["simfbo", "memfbo"])
@pytest.mark.parametrize(("build", "options"), NETWORKS.values(), ids=NETWORKS)
def test_the_loss_falls_and_the_outcome_loads_into_the_module(
    build: Callable[[], nn.Module], options: dict[str, Any], method: str
) -> None:
    torch.manual_seed(0)
    module = build()
    before = deepcopy(module.state_dict())
    split = split_module(module, **options)
    result = fb.solve(problem_of(split), sequences.clients(samples=6), method, rounds=10, every=10)
    assert result.history[-1]["upper_loss"] < result.history[0]["upper_loss"]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())

    module.load_state_dict({**result.x, **result.y}, strict=False)
    (tokens,) = sequences.sentences(4, seed=9)
    if options.get("buffers") == "batch":
        module.train()
    elif "buffers" in options:
        module.eval()
    expected = module(tokens[:, :-1])
    actual = split.apply(result.x, result.y, tokens[:, :-1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_only_x_and_y_travel() -> None:
    """A frozen base and the adapters' other half are no part of any message."""
    module = adapted_attention()
    split = split_module(module, lower="*.up", upper="*.down")
    assert set(split.x) == {"qkv.down", "head.down"}
    assert set(split.y) == {"qkv.up", "head.up"}
    result = fb.solve(problem_of(split), sequences.clients(), "fedavg", rounds=1)
    assert result.history[-1]["bytes_down"] == 2 * (split.x.nbytes + split.y.nbytes)


def test_padding_is_masked_by_a_keyword() -> None:
    torch.manual_seed(0)
    split = split_module(Encoder(), lower="head.")
    (tokens,) = sequences.sentences(2, seed=0)
    tokens = tokens[:, :-1]
    padding = torch.tensor([[False] * 3 + [True] * 2] * 2)
    other = tokens.masked_fill(padding, 0)
    outputs = [split.apply(split.x, split.y, t, padding=padding)[:, :3] for t in (tokens, other)]
    torch.testing.assert_close(*outputs)
    result = fb.solve(problem_of(split, padding=None), sequences.clients(), "memfbo", rounds=2)
    assert result.status == "completed"


def test_parameters_without_gradient_are_frozen() -> None:
    module = sequences.Attention()
    module.words.requires_grad_(False)
    split = split_module(module, lower="head.")
    assert set(split.x) == {"qkv.weight", "qkv.bias"}
    assert set(split_module(module, lower="", upper=()).y) == set(split.x) | set(split.y)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "neither lower nor upper is given"),
        ({"lower": "head.", "upper": "qkv."}, "'words.weight' is in neither lower nor upper"),
        ({"lower": "head.", "upper": ""}, "'head.weight' is in both lower and upper"),
        ({"upper": "nothing."}, r"upper='nothing.' selects 0 of 5 parameters"),
        ({"lower": "*", "frozen": "*.bias"}, r"lower='\*' selects 3 of 3 parameters"),
    ],
)
def test_refuses_parts_that_do_not_fit(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        split_module(sequences.Attention(), **options)


def test_adapters_are_refused_where_there_is_no_layer() -> None:
    with pytest.raises(ValueError, match="layers is 'words'; no linear layer"):
        fb.nets.with_adapters(sequences.Attention(), layers="words")
    with pytest.raises(ValueError, match="rank is 0"):
        fb.nets.with_adapters(sequences.Attention(), rank=0)


def test_a_state_loads_into_the_users_module_with_all_that_was_not_split() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.frozen = nn.Linear(3, 3)
            self.head = nn.Linear(3, 3)
            self.decoder = nn.Linear(3, 3)
            self.decoder.weight = self.head.weight

    net = Tied()
    split = split_module(net, lower=("head.", "decoder."), frozen="frozen.", buffers="batch")
    x = {name: tensor + 1.0 for name, tensor in split.x.items()}
    y = {name: tensor + 2.0 for name, tensor in split.y.items()}
    state = split.state_dict(x, y)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(state)  # strictly
    for name, tensor in net.state_dict().items():
        added = 0.0
        if name.startswith(("head.", "decoder.")):
            added = 2.0
        elif name.startswith("body.") and not name.endswith(("mean", "var", "tracked")):
            added = 1.0
        assert torch.equal(tensor, before[name] + added), name
    with pytest.raises(ValueError, match=r"y\['decoder.bias'\] is missing"):
        split.state_dict(x, {"head.weight": y["head.weight"]})
    wrong = {**y, "head.weight": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"has shape \(2, 3\); it must have \(3, 3\)"):
        split.state_dict(x, wrong)


def test_statistics_are_those_of_the_inputs_of_one_client() -> None:
    """In evaluation the module normalises by them; nothing of the user's module changes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).double()
    split = split_module(net, lower="2.", buffers="batch")
    before = deepcopy(net.state_dict())
    inputs = 5 * torch.randn(8, 3, dtype=torch.float64) + 7
    state = split.state_dict(split.x, 2 * split.y, statistics_of=inputs.split(4))
    torch.testing.assert_close(state["0.running_mean"], inputs.mean(0))
    variance = torch.stack([half.var(0) for half in inputs.split(4)]).mean(0)
    torch.testing.assert_close(state["0.running_var"], variance)
    torch.testing.assert_close(net.state_dict(), before)
    personal = deepcopy(net).eval()
    personal.load_state_dict(state)
    normalised = (inputs - inputs.mean(0)) / (variance + 1e-5).sqrt()
    expected = normalised @ (2 * split.y["2.weight"]).T + 2 * split.y["2.bias"]
    torch.testing.assert_close(personal(inputs), expected)
