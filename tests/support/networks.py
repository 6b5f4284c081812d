"""Small versions of all networks, called alike: (channels, size, outputs, seed=...)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedbilevel import nets


def _mlp(channels: int, size: int, outputs: int, seed: int = 0) -> nn.Module:
    return nets.mlp(channels * size**2, 40, outputs, seed)


def _lenet_with_two_head_layers(channels: int, size: int, outputs: int, seed: int = 0) -> nn.Module:
    return nets.lenet(channels, size, outputs, seed, head_layers=2)


def _conv4(channels: int, size: int, outputs: int, seed: int = 0) -> nn.Module:
    return nets.conv4(channels, size, outputs, seed, hidden=24)


def _resnet12(channels: int, size: int, outputs: int, seed: int = 0) -> nn.Module:
    return nets.resnet12(channels, size, outputs, seed, widths=(8, 12, 16, 64))


def _resnet18(channels: int, size: int, outputs: int, seed: int = 0) -> nn.Module:
    return nets.resnet18(channels, size, outputs, seed, widths=(8, 12, 16, 64))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "lenet": nets.lenet,
    "lenet-2": _lenet_with_two_head_layers,
    "conv4": _conv4,
    "resnet12": _resnet12,
    "resnet18": _resnet18,
}
