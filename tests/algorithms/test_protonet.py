"""ProtoNet against closed forms, and what it needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import ProtoNet
from fedbilevel.algorithms.protonet import prototype_loss
from fedbilevel.core.tree import Tree, dot
from tests.support.episodes import run


def scaled(x: Tree, data: Any) -> dict[str, Tensor]:
    return {"features": x["scale"] * data["numbers"], "labels": data["labels"]}


def two_classes(clients: int = 1, embed: Any = scaled) -> tuple[fb.Problem, list[fb.ClientData]]:
    """Numbers of two classes, and a scale x that embeds them."""

    def loss(x: Tree, y: Tree, batch: Any) -> Tensor:
        return dot(y, y)

    def side(*numbers: float) -> dict[str, Tensor]:
        column = torch.tensor(numbers, dtype=torch.float64)[:, None]
        return {"numbers": column, "labels": torch.tensor([0, 1])}

    one = torch.ones((), dtype=torch.float64)
    x = {"scale": 0.8 * one}
    problem = fb.Problem(loss, loss, x, {"y": one}, lower_level="private", embed=embed)
    held = [fb.ClientData(side(0.3 + i, 2.0), side(0.9 + i, 1.0)) for i in range(clients)]
    return problem, held


def test_prototypes_are_class_means() -> None:
    """Against the loss with the classes written out; classes have unequal numbers of samples."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(7, 4, generator=draw)
    labels = torch.tensor([2, 0, 1, 0, 2, 2, 1])
    queries = torch.randn(5, 4, generator=draw)
    query_labels = torch.tensor([0, 1, 2, 2, 0])
    means = torch.stack([features[labels == k].mean(0) for k in range(3)])
    distances = torch.cdist(queries, means) ** 2
    expected = torch.nn.functional.cross_entropy(-distances, query_labels)
    support = {"features": features, "labels": labels}
    query = {"features": queries, "labels": query_labels}
    torch.testing.assert_close(prototype_loss(support, query), expected)


def test_protonet_in_closed_form() -> None:
    """With prototypes s a and s b, the loss of a query s q is log(1 + exp(s^2 d)).

    d = (q - own)^2 - (q - other)^2 is the difference of the squared distances to both.
    """
    s = 0.8
    lr = 0.1
    slopes = []
    for i in range(3):
        a = 0.3 + i
        b = 2.0
        of_first = (0.9 + i - a) ** 2 - (0.9 + i - b) ** 2
        of_second = (1.0 - b) ** 2 - (1.0 - a) ** 2
        differences = [of_first, of_second]
        slopes.append(sum(2 * s * d / (1 + math.exp(-(s**2) * d)) for d in differences) / 2)
    problem, clients = two_classes(3)
    after = run(problem, clients, ProtoNet(lr_x=lr), {"local_steps": 2})
    assert abs(sum(slopes)) > 0.1
    assert float(after.state.x["scale"]) == pytest.approx(s - lr * sum(slopes) / 3, abs=1e-12)
    assert float(after.state.y["y"]) == 1.0
    totals = after.fed.ledger.totals()
    assert totals["gradients"] == 3 * 2 * 2
    assert totals["bytes_down"] == 3 * 16
    assert totals["bytes_up"] == 3 * 8
    loop = run(problem, clients, ProtoNet(lr_x=lr), {"local_steps": 2}, mode="loop")
    torch.testing.assert_close(loop.state.x["scale"], after.state.x["scale"], rtol=0, atol=1e-14)


def test_a_problem_without_features_is_refused() -> None:
    problem, clients = two_classes()
    sentence = r"^protonet compares features; this problem has no embed that computes them$"
    with pytest.raises(ValueError, match=sentence):
        run(dataclasses.replace(problem, embed=None), clients, ProtoNet())


def embeds_a_tuple(x: Tree, data: Any) -> tuple[Tensor]:
    return (x["scale"] * data["numbers"],)


def embeds_no_labels(x: Tree, data: Any) -> dict[str, Tensor]:
    return {"features": x["scale"] * data["numbers"]}


INCOMPLETE = [
    (embeds_a_tuple, "embed returned a tuple; protonet needs a dict with 'features' and 'labels'"),
    (embeds_no_labels, "embed returned a dict with features; protonet needs"),
]


@pytest.mark.parametrize(("embed", "sentence"), INCOMPLETE)
def test_features_without_labels_are_refused(embed: Any, sentence: str) -> None:
    problem, clients = two_classes(embed=embed)
    with pytest.raises(ValueError, match=sentence):
        run(problem, clients, ProtoNet())
