"""GroupNorm follows the width of its weight; dropout draws with keys."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedbilevel import nets
from fedbilevel.core.rng import fold_in, root


def test_group_norm_normalizes_the_groups_that_its_weight_has():
    norm = nets.GroupNorm(3, 4)
    h = torch.randn(5, 8, 2, 2, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(8.0).view(2, 4)
    bias = -torch.arange(8.0).view(2, 4)
    groups = h.view(5, 2, 4 * 2 * 2)
    deviation = (groups.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    scaled = (groups - groups.mean(2, keepdim=True)) / deviation
    expected = weight.view(8, 1, 1) * scaled.view_as(h) + bias.view(8, 1, 1)
    output = functional_call(norm, {"weight": weight, "bias": bias}, (h,))
    torch.testing.assert_close(output, expected)
    assert not list(norm.buffers())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_has_its_probability_and_keeps_the_mean(p):
    out = nets.dropout(torch.ones(200, 1000), p, root(0, "test"))
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
    spread = (p * (1 - p) / out.numel()) ** 0.5
    assert abs((out == 0).double().mean() - p) <= 5 * spread
    assert abs(out.double().mean() - 1) <= 5 * spread / (1 - p) + 1e-6


def test_the_same_key_gives_the_same_mask():
    h = torch.ones(50)
    key = root(0, "test")
    assert torch.equal(nets.dropout(h, 0.5, key), nets.dropout(h, 0.5, key))
    assert not torch.equal(nets.dropout(h, 0.5, key), nets.dropout(h, 0.5, fold_in(key, 1)))


def test_layers_draw_differently_and_repeatably():
    first = nets.Dropout(0.5)
    second = nets.Dropout(0.5)
    h = torch.ones(50)
    key = root(0, "test")
    with nets.randomness(key):
        masks = [first(h), second(h), first(h)]
    assert torch.equal(masks[0], nets.dropout(h, 0.5, fold_in(key, 0)))
    assert not any(torch.equal(masks[i], masks[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    with nets.randomness(key):
        assert torch.equal(first(h), masks[0])
        with nets.randomness(fold_in(key, 7)):
            assert not torch.equal(first(h), masks[1])
        assert torch.equal(first(h), masks[1])


def test_dropout_under_vmap_draws_what_each_key_draws():
    keys = torch.stack([root(seed, "test") for seed in range(4)])
    net = nn.Sequential(nets.Dropout(0.5), nets.Dropout(0.3))
    h = torch.ones(6, 20)

    def forward(key):
        with nets.randomness(key):
            return net(h)

    rows = vmap(forward)(keys)
    for i in range(4):
        torch.testing.assert_close(rows[i], forward(keys[i]))
        assert not any(torch.equal(rows[i], rows[j]) for j in range(i))


def test_the_gradient_of_dropout_has_the_same_mask():
    key = root(0, "test")
    gradient = grad(lambda h: nets.dropout(h, 0.5, key).sum())(torch.ones(20))
    assert torch.equal(gradient, nets.dropout(torch.ones(20), 0.5, key))


def test_dropout_in_training_mode_needs_a_key():
    layer = nets.Dropout(0.5)
    h = torch.ones(5)
    message = r"must be called within `with fedbilevel.nets.randomness"
    with pytest.raises(RuntimeError, match=message):
        layer(h)
    with pytest.raises(KeyError), nets.randomness(root(0, "test")):
        raise KeyError
    with pytest.raises(RuntimeError):
        layer(h)  # the block has ended, although by an exception
    assert layer.eval()(h) is h


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_the_probability_of_dropout_is_checked(p):
    with pytest.raises(ValueError, match=f"p is {p}; it must be at least 0 and below 1"):
        nets.Dropout(p)
    with pytest.raises(ValueError, match=f"p is {p}"):
        nets.dropout(torch.ones(2), p, root(0, "test"))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    with nets.randomness(root(0, "test")):
        nets.Dropout(0.5)(torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)
