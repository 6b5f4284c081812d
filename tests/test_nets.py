"""Networks have the published sizes, work per client under vmap and can be cut to fewer units; nothing touches the
global generator."""

from itertools import pairwise
from math import ceil

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fedbilevel import nets
from fedbilevel.core.rng import fold_in, root


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


@pytest.mark.parametrize(("size", "features"), [(28, 64), (32, 256), (8, 64), (1, 64)])
def test_conv4_sizes(size, features):
    """8x8 pixels are one after three blocks; one pixel is not pooled."""
    net = nets.conv4(1, size, 5)
    assert (count(net.backbone), count(net.head)) == (
        (1 + 3 * 64) * 64 * 9 + 4 * 128,
        5 * features + 5,
    )
    assert net.backbone(torch.rand(2, 1, size, size)).shape == (2, features)


@pytest.mark.parametrize("size", [28, 8])
def test_resnet12_sizes(size):
    net, widths = nets.resnet12(1, size, 5), (1, 64, 128, 256, 512)
    blocks = [9 * (i * w + 2 * w * w) + i * w + 4 * 2 * w for i, w in pairwise(widths)]
    assert (
        (count(net.backbone), count(net.head)) == (sum(blocks), 5 * 512 + 5) == (7_995_520, 2_565)
    )
    assert net(torch.rand(2, 1, size, size)).shape == (2, 5)


@pytest.mark.parametrize(("size", "side"), [(32, 4), (28, 4), (8, 1), (1, 1)])
def test_resnet18_sizes(size, side):
    net = nets.resnet18(3, size, 10)
    assert (
        count(net) == 11_173_962
    )  # with the affine parameters of its norms, which are as many as BatchNorm's
    assert net.backbone[:-2](torch.rand(1, 3, size, size)).shape == (1, 512, side, side)
    assert net(torch.rand(2, 3, size, size)).shape == (2, 10)


def test_widths_are_whole_groups():
    with pytest.raises(
        ValueError, match="hidden is 6; it must be a multiple of 4, the channels of a group"
    ):
        nets.conv4(1, 28, 5, hidden=6)
    for net in nets.resnet12, nets.resnet18:
        with pytest.raises(ValueError, match="widths is 10; it must be a multiple of 4"):
            net(1, 28, 5, widths=(8, 10))


def test_group_norm_normalises_the_groups_its_weight_has():
    norm, h = (
        nets.GroupNorm(3, 4),
        torch.randn(5, 8, 2, 2, generator=torch.Generator().manual_seed(0)),
    )
    weight, bias = torch.arange(8.0).view(2, 4), -torch.arange(8.0).view(2, 4)
    groups = h.view(5, 2, 4 * 2 * 2)
    scaled = (groups - groups.mean(2, keepdim=True)) / (
        groups.var(2, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    expected = weight.view(8, 1, 1) * scaled.view_as(h) + bias.view(8, 1, 1)
    torch.testing.assert_close(
        functional_call(norm, {"weight": weight, "bias": bias}, (h,)), expected
    )
    assert not list(norm.buffers())


NETS = {
    "mlp": lambda channels, size, *a, **k: nets.mlp(channels * size**2, 40, *a, **k),
    "lenet": nets.lenet,
    "lenet-2": lambda *a, **k: nets.lenet(*a, head_layers=2, **k),
    "conv4": lambda *a, **k: nets.conv4(*a, hidden=24, **k),
    "resnet12": lambda *a, **k: nets.resnet12(*a, widths=(8, 12, 16, 64), **k),
    "resnet18": lambda *a, **k: nets.resnet18(*a, widths=(8, 12, 16, 64), **k),
}


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
def test_per_client_under_vmap(name, channels, size):
    """Outputs and Hessian-vector products of every client are those of the client alone."""
    clients = [NETS[name](channels, size, 10, seed=seed).double() for seed in range(3)]
    parameters, _ = stack_module_state(clients)
    parameters = {name: value.detach() for name, value in parameters.items()}
    x = torch.rand(
        3, 4, channels, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    y = torch.tensor([[0, 1, 2, 3]] * 3)

    def forward(weights, x):
        return functional_call(clients[0], weights, (x,))

    def hessian_vector(weights, x, y):
        gradient = grad(lambda w: cross_entropy(forward(w, x), y))
        return grad(lambda w: sum(g.sum() for g in gradient(w).values()))(
            weights
        )  # the vector of ones

    outputs = vmap(forward)(parameters, x)
    products = vmap(hessian_vector)(parameters, x, y)
    for i, client in enumerate(clients):
        torch.testing.assert_close(outputs[i], client(x[i]))
        alone = hessian_vector({name: value[i] for name, value in parameters.items()}, x[i], y[i])
        torch.testing.assert_close({name: value[i] for name, value in products.items()}, alone)


def test_initialisation_is_seeded():
    for net in NETS.values():
        first, same, other = (net(1, 28, 2, seed=seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(first[name], same[name]) for name in first)
        weight = next(iter(first))
        assert not torch.equal(first[weight], other[weight])


def test_nothing_touches_the_global_generator():
    before = torch.get_rng_state()
    for net in NETS.values():
        net(1, 28, 10)
    nets.seeded(lambda: nn.Linear(2, 2), 5)
    with nets.randomness(root(0, "test")):
        nets.Dropout(0.5)(torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_axes_of_the_small_networks():
    """A layer's outputs and the next layer's inputs are one axis; what comes in and what goes out is never cut."""
    assert nets.axes(nets.mlp(4, 3, 2, dropout=0.5)) == {
        "backbone.1.weight": ("backbone.1", None),
        "backbone.1.bias": ("backbone.1",),
        "head.weight": (None, "backbone.1"),
        "head.bias": (None,),
    }
    one, two = (nets.axes(nets.lenet(1, 28, 10, head_layers=layers)) for layers in (1, 2))
    assert (
        one["backbone.7.weight"] == two["backbone.7.weight"] == ("backbone.7", "backbone.3")
    )  # 400 = 16 x 25 inputs
    assert (one["head.weight"], one["head.bias"]) == ((None, "backbone.9"), (None,))
    assert (two["head.0.weight"], two["head.2.weight"]) == (
        ("head.0", "backbone.7"),
        (None, "head.0"),
    )
    conv4 = nets.axes(nets.conv4(1, 28, 5))
    assert conv4["backbone.4.weight"] == ("backbone.4", "backbone.0", None, None)
    assert conv4["backbone.5.weight"] == conv4["backbone.5.bias"] == ("backbone.4", None)
    assert conv4["head.weight"] == (None, "backbone.12")


def test_axes_of_residual_networks():
    """A sum's branches end on one axis: with the identity as shortcut, on the one that the block reads."""
    twelve = nets.axes(nets.resnet12(1, 28, 5))
    first, second = "backbone.0.shortcut.0", "backbone.3.shortcut.0"
    assert twelve["backbone.0.path.6.weight"] == (first, "backbone.0.path.3", None, None)
    assert twelve["backbone.0.shortcut.0.weight"] == (first, None, None, None)
    assert twelve["backbone.3.path.0.weight"] == ("backbone.3.path.0", first, None, None)
    assert (
        twelve["backbone.3.path.7.weight"] == twelve["backbone.3.shortcut.1.bias"] == (second, None)
    )
    assert len({axis for axes in twelve.values() for axis in axes} - {None}) == 4 * 3
    eighteen = nets.axes(nets.resnet18(3, 32, 10))
    for block in "backbone.3", "backbone.5":
        assert eighteen[f"{block}.path.0.weight"] == (f"{block}.path.0", "backbone.0", None, None)
        assert eighteen[f"{block}.path.3.weight"] == ("backbone.0", f"{block}.path.0", None, None)
        assert eighteen[f"{block}.path.4.weight"] == ("backbone.0", None)
    assert eighteen["backbone.7.shortcut.0.weight"] == (
        "backbone.7.shortcut.0",
        "backbone.0",
        None,
        None,
    )
    assert len({axis for axes in eighteen.values() for axis in axes} - {None}) == 4 + 8


def square():
    return nn.Linear(8, 8, bias=False)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        ([square()], {"0": (None, None)}),
        ([square(), nn.Tanh(), square()], {"0": ("0", None), "2": (None, "0")}),
        # a sum with the inputs, and one with the outputs, cannot be cut
        (
            [nets.Residual(square(), nn.Identity()), square()],
            {"0.path": (None, None), "1": (None, None)},
        ),
        (
            [square(), nets.Residual(square(), nn.Identity())],
            {"0": (None, None), "1.path": (None, None)},
        ),
        # axes that the inner sum has made one meet again in the outer one
        (
            [
                square(),
                nets.Residual(nets.Residual(nn.Identity(), square()), nn.Identity()),
                square(),
            ],
            {
                "0": ("1.path.shortcut", None),
                "1.path.shortcut": ("1.path.shortcut",) * 2,
                "2": (None, "1.path.shortcut"),
            },
        ),
        # here the inner sum makes the axes "0" and "1.path.shortcut" one, and the outer shortcut reads it
        (
            [square(), nets.Residual(nets.Residual(nn.Identity(), square()), square()), square()],
            {
                "0": ("1.shortcut", None),
                "1.path.shortcut": ("1.shortcut", "1.shortcut"),
                "1.shortcut": ("1.shortcut", "1.shortcut"),
                "2": (None, "1.shortcut"),
            },
        ),
    ],
)
def test_axes_of_a_sequence_of_ones_own(net, expected):
    assert nets.axes(nn.Sequential(*net)) == {
        f"{name}.weight": axes for name, axes in expected.items()
    }


def test_axes_refuses_what_it_cannot_follow():
    class Shuffled(nn.Linear):
        def forward(self, h):
            return super().forward(h).flip(1)

    by_hand = (
        "; the axes must be given by hand, as a name or None for each dimension of each parameter$"
    )
    for layer in nn.BatchNorm2d(8), nn.GroupNorm(2, 8, affine=False), Shuffled(8, 8):
        unknown = (
            rf"^layer '1.0' is of a kind that nets.axes does not know \({type(layer).__name__}\)"
        )
        with pytest.raises(ValueError, match=unknown + by_hand):
            nets.axes(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(layer)))
    with pytest.raises(ValueError, match=f"^layer '0' is a convolution with 2 groups{by_hand}"):
        nets.axes(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2)))
    shared, relu = square(), nn.ReLU()
    with pytest.raises(ValueError, match=f"^some layers share their parameters{by_hand}"):
        nets.axes(nn.Sequential(square(), shared, nn.ReLU(), shared, square()))
    assert len(nets.axes(nn.Sequential(square(), relu, square(), relu, square()))) == 3


def units(net):
    """Units of an axis: its smallest dimension."""
    sizes = {}
    for name, axes in nets.axes(net).items():
        for axis, size in zip(axes, net.get_parameter(name).shape, strict=True):
            sizes.setdefault(axis, []).append(size)
    return {axis: min(of) for axis, of in sizes.items() if axis is not None}


def cut(net, tensors, kept):
    """The blocks of the kept units along every axis, for tensors shaped like the parameters."""
    number, result = units(net), {}
    for name, axes in nets.axes(net).items():
        result[name] = tensors[name]
        for dim, axis in enumerate(axes):
            if axis is not None:
                blocks = torch.arange(result[name].shape[dim]).view(number[axis], -1)
                result[name] = result[name].index_select(dim, blocks[kept[axis]].flatten())
    return result


def first_units(net, ratio):
    return {axis: torch.arange(ceil(ratio * number)) for axis, number in units(net).items()}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mlp", 8),
        ("lenet", 28),
        ("lenet-2", 28),
        ("conv4", 8),
        ("conv4", 32),
        ("resnet12", 8),
        ("resnet18", 8),
    ],
)
@pytest.mark.parametrize("ratio", [1 / 2, 1 / 4, 1 / 16])
@pytest.mark.parametrize("which", ["first", "random"])
def test_the_cut_network_is_the_masked_one(name, size, ratio, which):
    """With all that leaves or enters a dropped unit at 0 (its norm's weight and bias too) the unit's output is 0, so
    outputs and gradients of the whole network, at the entries that are kept, are those of the small one."""
    net, generator = NETS[name](1, size, 3).double(), torch.Generator().manual_seed(1)
    whole = {
        name: 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for name, p in net.named_parameters()
    }
    images = torch.randn(4, 1, size, size, dtype=torch.float64, generator=generator)
    kept = first_units(net, ratio)
    if which == "random":
        number = units(net)
        kept = {
            axis: torch.randperm(number[axis], generator=generator)[: len(first)]
            for axis, first in kept.items()
        }
    places = cut(
        net, {name: torch.arange(p.numel()).view(p.shape) for name, p in whole.items()}, kept
    )
    masked = {}
    for name, p in whole.items():
        kept_entries = torch.zeros(p.numel(), dtype=p.dtype).index_fill(
            0, places[name].flatten(), 1
        )
        masked[name] = p * kept_entries.view(p.shape)

    def loss(weights):
        output = functional_call(net, weights, (images,))
        return cross_entropy(output, torch.tensor([0, 1, 2, 0])), output

    small = cut(net, whole, kept)
    assert sum(p.numel() for p in small.values()) < 0.6 * sum(p.numel() for p in whole.values())
    (gradient, output), (expected, expected_output) = (
        grad(loss, has_aux=True)(w) for w in (small, masked)
    )
    torch.testing.assert_close(output, expected_output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, cut(net, expected, kept), rtol=1e-10, atol=1e-10)
    assert all(value.abs().max() > 1e-6 for value in gradient.values())


def test_costs_fall_with_the_square_of_the_width():
    """ResNet-12's parameters, and operations of a gradient; norms and the first and last layer fall with the width."""
    net = nets.resnet12(1, 28, 5).to("meta").requires_grad_(False)
    image, costs = torch.zeros(1, 1, 28, 28, device="meta"), []
    for ratio in 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16:
        small = cut(net, dict(net.named_parameters()), first_units(net, ratio))
        with FlopCounterMode(display=False) as counter:
            grad(lambda weights: functional_call(net, weights, (image,)).sum())(small)
        costs.append((counter.get_total_flops(), sum(p.numel() for p in small.values())))
    for column in zip(*costs, strict=True):
        whole, _, quarter, *_ = column
        assert 1 / 16 < quarter / whole < 0.064
        assert sum(column) / 5 / whole == pytest.approx(
            sum(4.0**-k for k in range(5)) / 5, rel=2e-3
        )


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
    with pytest.raises(
        RuntimeError, match=r"must be called within `with fedbilevel.nets.randomness"
    ):
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
