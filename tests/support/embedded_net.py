"""A small network whose features a problem embeds or not, for tests of embedded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel import nets
from fedbilevel.core.client_data import Batch
from fedbilevel.core.rng import root
from fedbilevel.core.tree import Tree, dot


def embedded_net(embed: bool = True) -> tuple[fb.Problem, Batch]:
    """An MLP in float64 on random data, with or without `Problem.embed`, and a batch."""
    net = nets.mlp(6, 12, 3, seed=2).double()
    _, x, y = fb.split_module(net, lower="head.")

    def features(x: Tree, data: Any) -> Any:
        h = torch.tanh(data["i"] @ x["backbone.1.weight"].T + x["backbone.1.bias"])
        return {"h": h, "labels": data["labels"]}

    def upper(x: Tree, y: Tree, data: Any) -> Tensor:
        if not embed:
            data = features(x, data)
        outputs = data["h"] @ y["head.weight"].T + y["head.bias"]
        # The penalty depends on x directly, not only through the features.
        penalty = 0.1 * dot(x, x) * data["h"].square().mean()
        return F.cross_entropy(outputs, data["labels"]) + penalty

    def lower(x: Tree, y: Tree, data: Any) -> Tensor:
        return upper(x, y, data) + 0.1 * dot(y, y)

    draw = torch.Generator().manual_seed(5)

    def data() -> dict[str, Tensor]:
        inputs = torch.randn(9, 6, generator=draw, dtype=torch.float64)
        return {"i": inputs, "labels": torch.randint(3, (9,), generator=draw)}

    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y, embed=features if embed else None)
    return problem, Batch(data(), data(), root(0, "test"))
