"""Networks with a `backbone` and a `head`, initialized from a seed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbilevel.core import checks
from fedbilevel.nets._layers import Dropout, GroupNorm, Residual

# Channels per normalization group, so that 64 channels cut to 1/16 are still one group.
_GROUP = 4

NetworkPart = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""A part of a network as a function of the network's parameters, by name, and its inputs."""


def mlp(inputs: int, hidden: int, outputs: int, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Build a multilayer perceptron with one hidden layer of ReLU units.

    Args:
        inputs: The number of input features; inputs of more dimensions are flattened.
        hidden: The number of hidden units.
        outputs: The number of outputs, such as classes.
        seed: The seed of the initialization.
        dropout: The probability of `nets.Dropout` before the ReLU, in [0, 1); 0 is no layer.

    Returns:
        A network with the submodules `backbone` and `head` (the last layer).

    Raises:
        TypeError: `hidden` is not a whole number.
        ValueError: `hidden` is below 1, or `dropout` is not in [0, 1).

    Examples:
        >>> import fedbilevel as fb
        >>> net = fb.nets.mlp(784, 200, 10)
        >>> net(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
        >>> [name for name, _ in net.named_children()]
        ['backbone', 'head']
    """
    checks.integer("hidden", hidden, least=1)

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(inputs, hidden)]
        if dropout:
            layers.append(Dropout(dropout))
        backbone = nn.Sequential(*layers, nn.ReLU())
        return _classifier(backbone, nn.Linear(hidden, outputs))

    return seeded(build, seed)


def lenet(channels: int, size: int, outputs: int, seed: int = 0, head_layers: int = 1) -> nn.Module:
    """Build LeNet-5 with ReLU and max pooling, for square images.

    Args:
        channels: The number of channels of an image.
        size: The height and width of an image: 28 (padded to 32) or 32.
        outputs: The number of outputs, such as classes.
        seed: The seed of the initialization.
        head_layers: How many of the three fully connected layers are the head: 1 or 2.

    Returns:
        A network with the submodules `backbone` and `head`.

    Raises:
        ValueError: `size` is not 28 or 32, or `head_layers` is not 1 or 2.

    References:
        LeCun et al., "Gradient-based learning applied to document recognition", 1998.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.nets.lenet(1, 28, 10)(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """
    if size not in (28, 32):
        raise ValueError(f"size is {size}; it must be 28 or 32")
    if head_layers not in (1, 2):
        raise ValueError(f"head_layers is {head_layers}; it must be 1 or 2")

    def build() -> nn.Module:
        convolutions = [
            nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        first = [nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()]
        second = [nn.Linear(120, 84), nn.ReLU()]
        last = nn.Linear(84, outputs)
        if head_layers == 1:
            return _classifier(nn.Sequential(*convolutions, *first, *second), last)
        return _classifier(nn.Sequential(*convolutions, *first), nn.Sequential(*second, last))

    return seeded(build, seed)


def conv4(channels: int, size: int, outputs: int, seed: int = 0, hidden: int = 64) -> nn.Module:
    """Build Conv-4: four blocks of 3x3 convolution, GroupNorm, ReLU and 2x2 max pooling.

    An image of one pixel is not pooled any more: 8x8 pixels are pooled three times.

    Args:
        channels: The number of channels of an image.
        size: The height and width of an image.
        outputs: The number of outputs, such as classes.
        seed: The seed of the initialization.
        hidden: The number of channels of every block, a multiple of 4.

    Returns:
        A network with the submodules `backbone` and `head` (the last, fully connected layer).

    Raises:
        TypeError: `size` or `hidden` is not a whole number.
        ValueError: `size` is below 1, or `hidden` is not a multiple of 4.

    References:
        Vinyals et al., "Matching networks for one shot learning", NeurIPS 2016. GroupNorm in place
        of batch normalization.

    Examples:
        >>> import fedbilevel as fb
        >>> fb.nets.conv4(1, 8, 5, hidden=16)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 5])
    """
    side = checks.integer("size", size, least=1)
    _check_widths("hidden", hidden)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for block, (inputs, width) in enumerate(pairwise((channels, *[hidden] * 4))):
            layers += [*_convolution(inputs, width), nn.ReLU(), _pool(side >> block)]
        features = hidden * max(side >> 4, 1) ** 2
        return _classifier(nn.Sequential(*layers, nn.Flatten()), nn.Linear(features, outputs))

    return seeded(build, seed)


def resnet12(
    channels: int,
    size: int,
    outputs: int,
    seed: int = 0,
    widths: tuple[int, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """Build ResNet-12, with GroupNorm: a residual block of three 3x3 convolutions per width.

    The activations are LeakyReLU(0.1). Every block ends with 2x2 max pooling, unless its image has
    one pixel; the backbone ends with the mean over the image.

    Args:
        channels: The number of channels of an image.
        size: The height and width of an image.
        outputs: The number of outputs, such as classes.
        seed: The seed of the initialization.
        widths: The number of channels of every block, multiples of 4.

    Returns:
        A network with the submodules `backbone` and `head` (the last, fully connected layer).

    Raises:
        TypeError: `size` or a width is not a whole number.
        ValueError: `size` is below 1, or a width is not a multiple of 4.

    References:
        Oreshkin et al., "TADAM: Task dependent adaptive metric for improved few-shot learning",
        NeurIPS 2018. GroupNorm in place of batch normalization.

    Examples:
        >>> import fedbilevel as fb
        >>> net = fb.nets.resnet12(1, 8, 5, widths=(4, 8))
        >>> net(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 5])
    """
    side = checks.integer("size", size, least=1)
    _check_widths("widths", *widths)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for block, (inputs, width) in enumerate(pairwise((channels, *widths))):
            path = nn.Sequential(
                *_convolution(inputs, width),
                nn.LeakyReLU(0.1),
                *_convolution(width, width),
                nn.LeakyReLU(0.1),
                *_convolution(width, width),
            )
            shortcut = nn.Sequential(*_convolution(inputs, width, kernel=1))
            layers += [Residual(path, shortcut), nn.LeakyReLU(0.1), _pool(side >> block)]
        return _classifier(nn.Sequential(*layers, *_mean()), nn.Linear(widths[-1], outputs))

    return seeded(build, seed)


def resnet18(
    channels: int,
    size: int,
    outputs: int,
    seed: int = 0,
    widths: tuple[int, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """Build ResNet-18 for small images, with GroupNorm: a 3x3 stem without pooling.

    Every width is a stage of two basic blocks, with stride 2 from the second stage on; the backbone
    ends with the mean over the image.

    Args:
        channels: The number of channels of an image.
        size: The height and width of an image. The network takes images of any size; the argument
            exists so that all networks for images are called alike.
        outputs: The number of outputs, such as classes.
        seed: The seed of the initialization.
        widths: The number of channels of every stage, multiples of 4.

    Returns:
        A network with the submodules `backbone` and `head` (the last, fully connected layer).

    Raises:
        TypeError: `size` or a width is not a whole number.
        ValueError: `size` is below 1, or a width is not a multiple of 4.

    References:
        He et al., "Deep residual learning for image recognition", CVPR 2016. GroupNorm in place of
        batch normalization.

    Examples:
        >>> import fedbilevel as fb
        >>> net = fb.nets.resnet18(3, 8, 10, widths=(4, 8))
        >>> net(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    checks.integer("size", size, least=1)
    _check_widths("widths", *widths)

    def build() -> nn.Module:
        first = widths[0]
        layers = [
            *_convolution(channels, first),
            nn.ReLU(),
            *_basic_block(first, first, 1),
            *_basic_block(first, first, 1),
        ]
        for inputs, width in pairwise(widths):
            layers += [*_basic_block(inputs, width, 2), *_basic_block(width, width, 1)]
        return _classifier(nn.Sequential(*layers, *_mean()), nn.Linear(widths[-1], outputs))

    return seeded(build, seed)


def _basic_block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution where the shape changes."""
    path = nn.Sequential(
        *_convolution(inputs, outputs, stride=stride), nn.ReLU(), *_convolution(outputs, outputs)
    )
    shortcut: nn.Module = nn.Identity()
    if inputs != outputs or stride != 1:
        shortcut = nn.Sequential(*_convolution(inputs, outputs, kernel=1, stride=stride))
    return [Residual(path, shortcut), nn.ReLU()]


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution and its norm; the norm has a bias, so the convolution has none."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, GroupNorm(outputs // _GROUP, _GROUP)]


def _pool(side: int) -> nn.Module:
    """2x2 max pooling of an image of side x side pixels, unless that is one pixel."""
    if side > 1:
        return nn.MaxPool2d(2)
    return nn.Identity()


def _mean() -> list[nn.Module]:
    """The mean over the image, per channel."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def _check_widths(name: str, *widths: int) -> None:
    for width in widths:
        if checks.integer(name, width, least=1) % _GROUP:
            raise ValueError(
                f"{name} is {width}; it must be a multiple of {_GROUP}, the channels of a group"
            )


def _classifier(backbone: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


def stem(net: nn.Module) -> tuple[NetworkPart, NetworkPart]:
    """Split a network before its first dropout layer.

    The first part depends on the samples alone and can be computed once per sample as its features
    (`Problem.embed`); the second part, with the head, draws random numbers if there is dropout.

    Args:
        net: A network with the submodules `backbone` (an `nn.Sequential`) and `head`, such as those
            of this module.

    Returns:
        The backbone up to the first `nets.Dropout`, and the rest of the network; without dropout
        the rest is the head. Both are functions of the network's parameters by name and of inputs.

    Examples:
        >>> import fedbilevel as fb
        >>> net = fb.nets.mlp(4, 8, 3)
        >>> below, above = fb.nets.stem(net)
        >>> parameters = dict(net.named_parameters())
        >>> inputs = torch.rand(5, 4)
        >>> torch.equal(above(parameters, below(parameters, inputs)), net(inputs))
        True
    """
    layers = list(net.get_submodule("backbone").named_children())
    cut = 0
    while cut < len(layers) and not isinstance(layers[cut][1], Dropout):
        cut += 1
    below = nn.Sequential(OrderedDict(layers[:cut]))
    above = nn.Sequential(OrderedDict(layers[cut:]))
    return (
        _as_function(nn.Sequential(OrderedDict(backbone=below))),
        _as_function(_classifier(above, net.get_submodule("head"))),
    )


def _as_function(part: nn.Module) -> NetworkPart:
    names = [name for name, _ in part.named_parameters()]

    def call(parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        own = {name: parameters[name] for name in names}
        return functional_call(part, own, (inputs,))  # type: ignore[no-any-return]

    return call


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call a function that builds a network, with PyTorch's generator seeded for this call.

    Args:
        build: Builds and returns a network.
        seed: The seed of the initialization.

    Returns:
        The network. The global generator is left as it was.

    Examples:
        >>> import fedbilevel as fb
        >>> first = fb.nets.seeded(lambda: nn.Linear(3, 2), seed=1)
        >>> second = fb.nets.seeded(lambda: nn.Linear(3, 2), seed=1)
        >>> torch.equal(first.weight, second.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the accelerators, which fork_rng does not restore here.
        torch.default_generator.manual_seed(seed)
        return build()
