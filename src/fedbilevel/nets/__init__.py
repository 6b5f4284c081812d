"""Networks for bilevel problems, their layers, and the axes along which they can be cut.

Every network is an `nn.Module` with two submodules, a `backbone` and a `head`. In problems of
representation learning the backbone is the upper variable and the head is the lower one:
`fb.split_module(net, lower="head.")` splits them. Networks are initialized from a `seed`, leave the
global random generator alone, and have no buffers, so that they run for many clients at once under
`torch.func.vmap`.

Examples:
    >>> import torch
    >>> import fedbilevel as fb
    >>> net = fb.nets.mlp(inputs=64, hidden=32, outputs=10, seed=0)
    >>> apply, x, y = fb.split_module(net, lower="head.")
    >>> sorted(y)
    ['head.bias', 'head.weight']
    >>> apply(x, y, torch.zeros(5, 64)).shape
    torch.Size([5, 10])
"""

from fedbilevel.nets._adapters import LowRank, with_adapters
from fedbilevel.nets._axes import axes
from fedbilevel.nets._checkpoints import with_checkpoints
from fedbilevel.nets._layers import Dropout, GroupNorm, Residual, dropout, randomness
from fedbilevel.nets._networks import conv4, lenet, mlp, resnet12, resnet18, seeded, stem

__all__ = [
    "Dropout",
    "GroupNorm",
    "LowRank",
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
    "with_adapters",
    "with_checkpoints",
]
