"""Networks have the published sizes, are seeded, and work per client under vmap."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from fedbilevel import nets
from fedbilevel.core.rng import root
from tests.support.networks import NETWORKS


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_an_mlp_has_hidden_units():
    with pytest.raises(ValueError, match="hidden is 0; it must be at least 1"):
        nets.mlp(4, 0, 2)


def test_mlp_sizes():
    net = nets.mlp(784, 200, 10)
    assert (count(net.backbone), count(net.head)) == (157_000, 2_010)
    assert net(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize(("channels", "size", "backbone"), [(1, 28, 60_856), (3, 32, 61_156)])
def test_lenet_sizes(channels, size, backbone):
    net = nets.lenet(channels, size, 10)
    assert (count(net.backbone), count(net.head)) == (backbone, 850)
    assert net(torch.zeros(3, channels, size, size)).shape == (3, 10)


def test_lenet_with_two_layers_in_the_head_is_the_same_network():
    one = nets.lenet(3, 32, 10, seed=4)
    two = nets.lenet(3, 32, 10, seed=4, head_layers=2)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(one(images), two(images))
    assert count(two.head) == 120 * 84 + 84 + 84 * 10 + 10
    with pytest.raises(ValueError, match="head_layers is 3; it must be 1 or 2"):
        nets.lenet(3, 32, 10, head_layers=3)


def test_lenet_refuses_other_sizes():
    with pytest.raises(ValueError, match="size is 8; it must be 28 or 32"):
        nets.lenet(1, 8, 10)


@pytest.mark.parametrize(("size", "features"), [(28, 64), (32, 256), (8, 64), (1, 64)])
def test_conv4_sizes(size, features):
    """8x8 pixels are one after three blocks; one pixel is not pooled."""
    net = nets.conv4(1, size, 5)
    assert count(net.backbone) == (1 + 3 * 64) * 64 * 9 + 4 * 128
    assert count(net.head) == 5 * features + 5
    assert net.backbone(torch.rand(2, 1, size, size)).shape == (2, features)


@pytest.mark.parametrize("size", [28, 8])
def test_resnet12_sizes(size):
    net = nets.resnet12(1, size, 5)
    widths = (1, 64, 128, 256, 512)
    blocks = [9 * (i * w + 2 * w * w) + i * w + 4 * 2 * w for i, w in pairwise(widths)]
    assert count(net.backbone) == sum(blocks) == 7_995_520
    assert count(net.head) == 5 * 512 + 5 == 2_565
    assert net(torch.rand(2, 1, size, size)).shape == (2, 5)


@pytest.mark.parametrize(("size", "side"), [(32, 4), (28, 4), (8, 1), (1, 1)])
def test_resnet18_sizes(size, side):
    """The parameters of GroupNorm are as many as those of batch normalization in the paper."""
    net = nets.resnet18(3, size, 10)
    assert count(net) == 11_173_962
    assert net.backbone[:-2](torch.rand(1, 3, size, size)).shape == (1, 512, side, side)
    assert net(torch.rand(2, 3, size, size)).shape == (2, 10)


def test_widths_are_whole_groups():
    message = "hidden is 6; it must be a multiple of 4, the channels of a group"
    with pytest.raises(ValueError, match=message):
        nets.conv4(1, 28, 5, hidden=6)
    for net in nets.resnet12, nets.resnet18:
        with pytest.raises(ValueError, match="widths is 10; it must be a multiple of 4"):
            net(1, 28, 5, widths=(8, 10))


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("lenet", 1, 28),
        ("lenet", 3, 32),
        ("conv4", 3, 32),
        ("conv4", 1, 8),
        ("resnet12", 1, 28),
        ("resnet18", 1, 8),
    ],
)
def test_vmap_over_clients_computes_what_each_client_computes(name, channels, size):
    """Outputs and Hessian-vector products."""
    clients = [NETWORKS[name](channels, size, 10, seed=seed).double() for seed in range(3)]
    parameters, _ = stack_module_state(clients)
    parameters = {name: value.detach() for name, value in parameters.items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 4, channels, size, size, dtype=torch.float64, generator=generator)
    y = torch.tensor([[0, 1, 2, 3]] * 3)

    def forward(weights, x):
        return functional_call(clients[0], weights, (x,))

    def hessian_times_ones(weights, x, y):
        gradient = grad(lambda w: cross_entropy(forward(w, x), y))
        return grad(lambda w: sum(g.sum() for g in gradient(w).values()))(weights)

    outputs = vmap(forward)(parameters, x)
    products = vmap(hessian_times_ones)(parameters, x, y)
    for i, client in enumerate(clients):
        torch.testing.assert_close(outputs[i], client(x[i]))
        own = {name: value[i] for name, value in parameters.items()}
        alone = hessian_times_ones(own, x[i], y[i])
        torch.testing.assert_close({name: value[i] for name, value in products.items()}, alone)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_parts_of_a_stem_make_up_the_network(dropout):
    """The first part is the backbone up to the dropout layer, which the ReLU follows."""
    net = nets.mlp(4, 8, 3, dropout=dropout)
    parameters = dict(net.named_parameters())
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    below, above = nets.stem(net)
    features = below(parameters, inputs)
    assert bool((features < 0).any()) == (dropout > 0)
    with nets.randomness(root(0, "test")):
        outputs = above(parameters, features)
    with nets.randomness(root(0, "test")):
        assert torch.equal(outputs, net(inputs))


def test_initialization_is_seeded():
    for net in NETWORKS.values():
        first, same, other = (net(1, 28, 2, seed=seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(first[name], same[name]) for name in first)
        weight = next(iter(first))
        assert not torch.equal(first[weight], other[weight])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for net in NETWORKS.values():
        net(1, 28, 10)
    nets.seeded(lambda: nn.Linear(2, 2), 5)
    assert torch.equal(torch.get_rng_state(), before)
