"""Networks have the published sizes and work per client under vmap; nothing touches the global generator."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from fedbilevel import nets
from fedbilevel.rng import fold_in, root


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


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
    one, two = nets.lenet(3, 32, 10, seed=4), nets.lenet(3, 32, 10, seed=4, head_layers=2)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(one(images), two(images))
    assert sum(p.numel() for p in two.head.parameters()) == 120 * 84 + 84 + 84 * 10 + 10
    with pytest.raises(ValueError, match="head_layers is 3; it must be 1 or 2"):
        nets.lenet(3, 32, 10, head_layers=3)


def test_lenet_refuses_other_sizes():
    with pytest.raises(ValueError, match="size is 8; it must be 28 or 32"):
        nets.lenet(1, 8, 10)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32)])
def test_lenet_per_client_under_vmap(channels, size):
    """Outputs and Hessian-vector products of every client are those of the client alone."""
    clients = [nets.lenet(channels, size, 10, seed=seed).double() for seed in range(3)]
    parameters, _ = stack_module_state(clients)
    parameters = {name: value.detach() for name, value in parameters.items()}
    x = torch.rand(3, 4, channels, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[0, 1, 2, 3]] * 3)

    def forward(weights, x):
        return functional_call(clients[0], weights, (x,))

    def hessian_vector(weights, x, y):
        gradient = grad(lambda w: cross_entropy(forward(w, x), y))
        return grad(lambda w: sum(g.sum() for g in gradient(w).values()))(weights)  # the vector of ones

    outputs = vmap(forward)(parameters, x)
    products = vmap(hessian_vector)(parameters, x, y)
    for i, client in enumerate(clients):
        torch.testing.assert_close(outputs[i], client(x[i]))
        alone = hessian_vector({name: value[i] for name, value in parameters.items()}, x[i], y[i])
        torch.testing.assert_close({name: value[i] for name, value in products.items()}, alone)


def test_initialisation_is_seeded():
    first, same, other = (nets.mlp(4, 3, 2, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_nothing_touches_the_global_generator():
    before = torch.get_rng_state()
    nets.mlp(4, 3, 2)
    nets.lenet(1, 28, 10)
    nets.seeded(lambda: nn.Linear(2, 2), 5)
    with nets.randomness(root(0, "test")):
        nets.Dropout(0.5)(torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_rate_and_mean(p):
    out = nets.dropout(torch.ones(200, 1000), p, root(0, "test"))
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)))
    spread = (p * (1 - p) / out.numel()) ** 0.5
    assert abs((out == 0).double().mean() - p) <= 5 * spread
    assert abs(out.double().mean() - 1) <= 5 * spread / (1 - p) + 1e-6


def test_same_key_same_mask():
    h, key = torch.ones(50), root(0, "test")
    assert torch.equal(nets.dropout(h, 0.5, key), nets.dropout(h, 0.5, key))
    assert not torch.equal(nets.dropout(h, 0.5, key), nets.dropout(h, 0.5, fold_in(key, 1)))


def test_layers_draw_differently_and_repeatably():
    first, second, h, key = nets.Dropout(0.5), nets.Dropout(0.5), torch.ones(50), root(0, "test")
    with nets.randomness(key):
        masks = [first(h), second(h), first(h)]
    assert torch.equal(masks[0], nets.dropout(h, 0.5, fold_in(key, 0)))
    assert not any(torch.equal(masks[i], masks[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    with nets.randomness(key):
        assert torch.equal(first(h), masks[0])
        with nets.randomness(fold_in(key, 7)):
            assert not torch.equal(first(h), masks[1])
        assert torch.equal(first(h), masks[1])


def test_dropout_under_vmap():
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


def test_gradient_passes_where_the_mask_does():
    key = root(0, "test")
    gradient = grad(lambda h: nets.dropout(h, 0.5, key).sum())(torch.ones(20))
    assert torch.equal(gradient, nets.dropout(torch.ones(20), 0.5, key))


def test_dropout_without_a_key():
    layer, h = nets.Dropout(0.5), torch.ones(5)
    with pytest.raises(RuntimeError, match=r"must be called within `with fedbilevel.nets.randomness"):
        layer(h)
    with pytest.raises(KeyError), nets.randomness(root(0, "test")):
        raise KeyError
    with pytest.raises(RuntimeError):
        layer(h)  # the context has ended, though by an exception
    assert layer.eval()(h) is h


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_dropout_rate_is_checked(p):
    with pytest.raises(ValueError, match=f"p is {p}; it must be at least 0 and below 1"):
        nets.Dropout(p)
    with pytest.raises(ValueError, match=f"p is {p}"):
        nets.dropout(torch.ones(2), p, root(0, "test"))
