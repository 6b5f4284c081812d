"""Low-rank adapters on the linear layers of a frozen module."""

from __future__ import annotations

from copy import deepcopy
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedbilevel.core import checks


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it.

    Args:
        base: The layer.
        rank: The number of columns of the thin matrices.
        scale: The factor of their product.

    Examples:
        >>> import torch
        >>> layer = LowRank(torch.nn.Linear(6, 4), rank=2)
        >>> layer.down.shape, layer.up.shape, layer(torch.ones(3, 6)).shape
        (torch.Size([2, 6]), torch.Size([4, 2]), torch.Size([3, 4]))
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float = 1.0) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return base(inputs) + scale up down inputs."""
        change = inputs @ self.down.T @ self.up.T
        result: Tensor = self.base(inputs) + self.scale * change
        return result


def with_adapters(
    module: nn.Module, layers: str = "*", rank: int = 8, scale: float = 1.0, seed: int = 0
) -> nn.Module:
    """Return a copy of a module with low-rank adapters (LoRA), whose other parameters are frozen.

    The copy computes what the module does until the adapters are trained. Adapters of other
    libraries, such as peft, serve `split_module` as well: it respects `requires_grad`.

    Args:
        module: The module; it is not changed.
        layers: A pattern for the names of the linear layers that get adapters.
        rank: The rank of the adapters.
        scale: The factor of what they add.
        seed: Determines their initial values.

    Returns:
        The copy; its only parameters with `requires_grad` are those of the adapters.

    Raises:
        ValueError: No linear layer has such a name, or `rank` is below 1.

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> adapted = fb.nets.with_adapters(net, layers="0", rank=2)
        >>> apply, x, y = fb.split_module(adapted, lower="", upper=())
        >>> list(y)
        ['0.down', '0.up']
        >>> torch.equal(apply(x, y, torch.ones(3, 6)), net(torch.ones(3, 6)))
        True
    """
    checks.integer("rank", rank, least=1)
    adapted = deepcopy(module).requires_grad_(False)
    names = []
    for name, part in adapted.named_modules():
        if isinstance(part, nn.Linear) and fnmatchcase(name, layers):
            names.append(name)
    if not names:
        raise ValueError(f"layers is {layers!r}; no linear layer of the module has such a name")
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        layer = LowRank(adapted.get_submodule(name), rank, scale)  # type: ignore[arg-type]
        draw = torch.randn(layer.down.shape, generator=generator)
        with torch.no_grad():
            layer.down.copy_(draw / layer.base.in_features**0.5)
        parent, _, child = name.rpartition(".")
        setattr(adapted.get_submodule(parent), child, layer)
    return adapted
