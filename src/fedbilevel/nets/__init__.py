"""Networks with a `backbone` (outer variable) and a `head` (inner variable), their layers, and what cuts them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbilevel.core import checks
from fedbilevel.nets._cutting import axes
from fedbilevel.nets._layers import Dropout, GroupNorm, Residual, dropout, randomness

__all__ = [
    "Dropout",
    "GroupNorm",
    "Residual",
    "axes",
    "conv4",
    "dropout",
    "lenet",
    "mlp",
    "randomness",
    "resnet12",
    "resnet18",
    "seeded",
    "stem",
]

_GROUP = 4  # channels a normalisation group, so that 64 channels cut to 1/16 are one group


def mlp(inputs: int, hidden: int, outputs: int, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """One hidden layer of ReLU units."""

    def build() -> nn.Module:
        drop = [Dropout(dropout)] if dropout else []
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), *drop, nn.ReLU())
        return _classifier(backbone, nn.Linear(hidden, outputs))

    return seeded(build, seed)


def lenet(channels: int, size: int, outputs: int, seed: int = 0, head_layers: int = 1) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, for square images of 28 (padded to 32) or 32 pixels.

    The head is the last of its three fully connected layers, or the last two.
    """
    if size not in (28, 32):
        raise ValueError(f"size is {size}; it must be 28 or 32")
    if head_layers not in (1, 2):
        raise ValueError(f"head_layers is {head_layers}; it must be 1 or 2")

    def build() -> nn.Module:
        features = [
            *(nn.Conv2d(channels, 6, 5, padding=(32 - size) // 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        ]
        first, second = (
            [nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()],
            [nn.Linear(120, 84), nn.ReLU()],
        )
        last = nn.Linear(84, outputs)
        if head_layers == 1:
            return _classifier(nn.Sequential(*features, *first, *second), last)
        return _classifier(nn.Sequential(*features, *first), nn.Sequential(*second, last))

    return seeded(build, seed)


def conv4(channels: int, size: int, outputs: int, seed: int = 0, hidden: int = 64) -> nn.Module:
    """Conv-4 (Vinyals et al. 2016): four blocks of 3x3 convolution, GroupNorm, ReLU and 2x2 max pooling.

    Images of size x size pixels; an image of one pixel is no longer pooled, so 8x8 pixels are pooled three times.
    """
    side = checks.integer("size", size, 1)
    _check_widths("hidden", hidden)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for block in range(4):
            inputs = hidden if block else channels
            layers += [*_convolution(inputs, hidden), nn.ReLU(), _pool(side >> block)]
        return _classifier(
            nn.Sequential(*layers, nn.Flatten()),
            nn.Linear(hidden * max(side >> 4, 1) ** 2, outputs),
        )

    return seeded(build, seed)


def resnet12(
    channels: int,
    size: int,
    outputs: int,
    seed: int = 0,
    widths: tuple[int, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """ResNet-12 (Oreshkin et al. 2018): a residual block of three 3x3 convolutions for each width, with GroupNorm.

    LeakyReLU(0.1); after each block 2x2 max pooling, as in `conv4`; then the mean over the image.
    """
    side = checks.integer("size", size, 1)
    _check_widths("widths", *widths)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for block, (inputs, width) in enumerate(pairwise((channels, *widths))):
            first, second = _convolution(inputs, width), _convolution(width, width)
            path = nn.Sequential(
                *first, nn.LeakyReLU(0.1), *second, nn.LeakyReLU(0.1), *_convolution(width, width)
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
    """ResNet-18 (He et al. 2016) in its form for small images, with GroupNorm: a 3x3 stem without pooling.

    Each width is a stage of two basic blocks, from the second on with stride 2; then the mean over the image. It takes
    images of any size; `size` is there so that all networks for images are called alike.
    """
    checks.integer("size", size, 1)
    _check_widths("widths", *widths)

    def block(inputs: int, width: int, stride: int) -> list[nn.Module]:
        path = nn.Sequential(
            *_convolution(inputs, width, stride=stride), nn.ReLU(), *_convolution(width, width)
        )
        same = inputs == width and stride == 1
        shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution(inputs, width, kernel=1, stride=stride))
        )
        return [Residual(path, shortcut), nn.ReLU()]

    def build() -> nn.Module:
        layers = [*_convolution(channels, widths[0]), nn.ReLU(), *block(widths[0], widths[0], 1)]
        layers += block(widths[0], widths[0], 1)
        for inputs, width in pairwise(widths):
            layers += [*block(inputs, width, 2), *block(width, width, 1)]
        return _classifier(nn.Sequential(*layers, *_mean()), nn.Linear(widths[-1], outputs))

    return seeded(build, seed)


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias, and its norm, which has one."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, GroupNorm(outputs // _GROUP, _GROUP)]


def _pool(side: int) -> nn.Module:
    return nn.MaxPool2d(2) if side > 1 else nn.Identity()


def _mean() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def _check_widths(name: str, *widths: int) -> None:
    for width in widths:
        if checks.integer(name, width, 1) % _GROUP:
            raise ValueError(
                f"{name} is {width}; it must be a multiple of {_GROUP}, the channels of a group"
            )


def _classifier(backbone: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


Call = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def stem(net: nn.Module) -> tuple[Call, Call]:
    """A network in two: its backbone up to the first dropout, which is a function of the samples, and what follows.

    Each is a function of the network's parameters, by name, and of its inputs.
    """
    layers = list(net.get_submodule("backbone").named_children())
    first = next(
        (place for place, (_, layer) in enumerate(layers) if isinstance(layer, Dropout)),
        len(layers),
    )
    below, above = (nn.Sequential(OrderedDict(some)) for some in (layers[:first], layers[first:]))
    return _call(nn.Sequential(OrderedDict(backbone=below))), _call(
        _classifier(above, net.get_submodule("head"))
    )


def _call(part: nn.Module) -> Call:
    names = [name for name, _ in part.named_parameters()]
    return lambda parameters, inputs: functional_call(
        part, {name: parameters[name] for name in names}, (inputs,)
    )


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` returns when initialised from `seed`, with the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would seed the accelerators too, for good
        return build()
