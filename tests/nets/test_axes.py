"""`nets.axes` names the dimensions that are cut together; a network that is cut is a network."""

from math import ceil

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fedbilevel import nets
from tests.support.networks import NETWORKS

# Names


def test_axes_of_the_small_networks():
    """The outputs of a layer and the inputs of the next are one axis; nothing else is cut."""
    assert nets.axes(nets.mlp(4, 3, 2, dropout=0.5)) == {
        "backbone.1.weight": ("backbone.1", None),
        "backbone.1.bias": ("backbone.1",),
        "head.weight": (None, "backbone.1"),
        "head.bias": (None,),
    }
    one = nets.axes(nets.lenet(1, 28, 10, head_layers=1))
    two = nets.axes(nets.lenet(1, 28, 10, head_layers=2))
    assert one["backbone.7.weight"] == ("backbone.7", "backbone.3")  # 400 = 16 x 25 inputs
    assert two["backbone.7.weight"] == ("backbone.7", "backbone.3")
    assert one["head.weight"] == (None, "backbone.9")
    assert one["head.bias"] == (None,)
    assert two["head.0.weight"] == ("head.0", "backbone.7")
    assert two["head.2.weight"] == (None, "head.0")
    conv4 = nets.axes(nets.conv4(1, 28, 5))
    assert conv4["backbone.4.weight"] == ("backbone.4", "backbone.0", None, None)
    assert conv4["backbone.5.weight"] == conv4["backbone.5.bias"] == ("backbone.4", None)
    assert conv4["head.weight"] == (None, "backbone.12")


def axes_without_none(net):
    return {axis for dimensions in nets.axes(net).values() for axis in dimensions} - {None}


def test_axes_of_resnet12():
    """The branches of a sum end on one axis, named after the shortcut."""
    net = nets.resnet12(1, 28, 5)
    axes = nets.axes(net)
    first = "backbone.0.shortcut.0"
    second = "backbone.3.shortcut.0"
    assert axes["backbone.0.path.6.weight"] == (first, "backbone.0.path.3", None, None)
    assert axes["backbone.0.shortcut.0.weight"] == (first, None, None, None)
    assert axes["backbone.3.path.0.weight"] == ("backbone.3.path.0", first, None, None)
    assert axes["backbone.3.path.7.weight"] == axes["backbone.3.shortcut.1.bias"] == (second, None)
    assert len(axes_without_none(net)) == 4 * 3


def test_axes_of_resnet18():
    """With the identity as shortcut, the path ends on the axis that the block reads."""
    net = nets.resnet18(3, 32, 10)
    axes = nets.axes(net)
    for block in "backbone.3", "backbone.5":
        assert axes[f"{block}.path.0.weight"] == (f"{block}.path.0", "backbone.0", None, None)
        assert axes[f"{block}.path.3.weight"] == ("backbone.0", f"{block}.path.0", None, None)
        assert axes[f"{block}.path.4.weight"] == ("backbone.0", None)
    shortcut = "backbone.7.shortcut.0"
    assert axes[f"{shortcut}.weight"] == (shortcut, "backbone.0", None, None)
    assert len(axes_without_none(net)) == 4 + 8


def square():
    return nn.Linear(8, 8, bias=False)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([square()], {"0": (None, None)}),
        ([square(), nn.Tanh(), square()], {"0": ("0", None), "2": (None, "0")}),
        # A sum with the inputs, and one with the outputs, cannot be cut.
        (
            [nets.Residual(square(), nn.Identity()), square()],
            {"0.path": (None, None), "1": (None, None)},
        ),
        (
            [square(), nets.Residual(square(), nn.Identity())],
            {"0": (None, None), "1.path": (None, None)},
        ),
        # Axes that the inner sum has made one meet again in the outer sum.
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
        # The inner sum makes the axes "0" and "1.path.shortcut" one; the outer shortcut reads it.
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
def test_axes_of_a_custom_sequence(layers, expected):
    axes = nets.axes(nn.Sequential(*layers))
    assert axes == {f"{name}.weight": dimensions for name, dimensions in expected.items()}


BY_HAND = (
    "; the axes must be given by hand, as a name or None for each dimension of each parameter$"
)


class Shuffled(nn.Linear):
    """A subclass of a known layer that computes something else."""

    def forward(self, h):
        return super().forward(h).flip(1)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8, affine=False), Shuffled(8, 8)]
)
def test_a_layer_of_unknown_kind_is_refused(layer):
    kind = type(layer).__name__
    message = rf"^layer '1.0' is of a kind that nets.axes does not know \({kind}\){BY_HAND}"
    with pytest.raises(ValueError, match=message):
        nets.axes(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(layer)))


def test_a_convolution_with_groups_is_refused():
    with pytest.raises(ValueError, match=f"^layer '0' is a convolution with 2 groups{BY_HAND}"):
        nets.axes(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2)))


def test_layers_may_be_shared_unless_they_have_parameters():
    shared = square()
    with pytest.raises(ValueError, match=f"^some layers share their parameters{BY_HAND}"):
        nets.axes(nn.Sequential(square(), shared, nn.ReLU(), shared, square()))
    relu = nn.ReLU()
    assert len(nets.axes(nn.Sequential(square(), relu, square(), relu, square()))) == 3


# Cutting, written out independently of `fedbilevel.core.submodels`


def count_units(net):
    """The units of every axis: its smallest dimension."""
    sizes = {}
    for name, axes in nets.axes(net).items():
        for axis, size in zip(axes, net.get_parameter(name).shape, strict=True):
            sizes.setdefault(axis, []).append(size)
    return {axis: min(dimensions) for axis, dimensions in sizes.items() if axis is not None}


def cut(net, tensors, kept):
    """Keep the blocks of some units along every axis, of tensors shaped like the parameters."""
    units = count_units(net)
    result = {}
    for name, axes in nets.axes(net).items():
        result[name] = tensors[name]
        for dim, axis in enumerate(axes):
            if axis is not None:
                blocks = torch.arange(result[name].shape[dim]).view(units[axis], -1)
                result[name] = result[name].index_select(dim, blocks[kept[axis]].flatten())
    return result


def first_units(net, ratio):
    return {axis: torch.arange(ceil(ratio * number)) for axis, number in count_units(net).items()}


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
def test_a_cut_network_computes_what_the_masked_network_computes(name, size, ratio, which):
    """Outputs and gradients of the whole network, masked, are those of the small one.

    The mask sets everything that leaves or enters a dropped unit to 0, with the weight and bias of
    its norm, so that the output of the unit is 0.
    """
    net = NETWORKS[name](1, size, 3).double()
    generator = torch.Generator().manual_seed(1)
    whole = {
        name: 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for name, p in net.named_parameters()
    }
    images = torch.randn(4, 1, size, size, dtype=torch.float64, generator=generator)
    kept = first_units(net, ratio)
    if which == "random":
        units = count_units(net)
        for axis, first in kept.items():
            kept[axis] = torch.randperm(units[axis], generator=generator)[: len(first)]
    positions = {name: torch.arange(p.numel()).view(p.shape) for name, p in whole.items()}
    kept_positions = cut(net, positions, kept)
    masked = {}
    for name, p in whole.items():
        mask = torch.zeros(p.numel(), dtype=p.dtype)
        mask[kept_positions[name].flatten()] = 1
        masked[name] = p * mask.view(p.shape)

    def loss(weights):
        output = functional_call(net, weights, (images,))
        return cross_entropy(output, torch.tensor([0, 1, 2, 0])), output

    small = cut(net, whole, kept)
    assert sum(p.numel() for p in small.values()) < 0.6 * sum(p.numel() for p in whole.values())
    gradient, output = grad(loss, has_aux=True)(small)
    expected, expected_output = grad(loss, has_aux=True)(masked)
    torch.testing.assert_close(output, expected_output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, cut(net, expected, kept), rtol=1e-10, atol=1e-10)
    assert all(value.abs().max() > 1e-6 for value in gradient.values())


def test_costs_fall_with_the_square_of_the_width():
    """Parameters of ResNet-12, and operations of a gradient.

    The norms and the first and last layer fall with the width alone; their share is small.
    """
    net = nets.resnet12(1, 28, 5).to("meta").requires_grad_(False)
    image = torch.zeros(1, 1, 28, 28, device="meta")
    costs = []
    for ratio in 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16:
        small = cut(net, dict(net.named_parameters()), first_units(net, ratio))
        with FlopCounterMode(display=False) as counter:
            grad(lambda weights: functional_call(net, weights, (image,)).sum())(small)
        costs.append((counter.get_total_flops(), sum(p.numel() for p in small.values())))
    mean_of_squares = sum(4.0**-k for k in range(5)) / 5
    for column in zip(*costs, strict=True):
        whole, _, quarter, *_ = column
        assert 1 / 16 < quarter / whole < 0.064
        assert sum(column) / 5 / whole == pytest.approx(mean_of_squares, rel=2e-3)
