"""Nested values survive the way to JSON and tensors and back."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import torch

from fedbilevel.core.codec import pack, unpack
from fedbilevel.core.tree import Tree


class Pair(NamedTuple):
    first: int
    second: int


def test_a_nested_value_comes_back_as_it_was() -> None:
    value = {
        "tree": Tree(w=torch.rand(2, 3, dtype=torch.float64), b=torch.arange(4)),
        3: [1, 2.5, True, None, "text"],
        ("a", 1): ((), {"tensor": "0"}, {}),
    }
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(pack(value, tensors)))
    back = unpack(plain, tensors)
    assert isinstance(back["tree"], Tree)
    torch.testing.assert_close(back.pop("tree"), value.pop("tree"), rtol=0, atol=0)
    assert back == value


def test_tensors_are_copied_and_contiguous() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).T
    tensors: dict[str, torch.Tensor] = {}
    pack([matrix], tensors)
    matrix.zero_()
    assert tensors["0"].is_contiguous()
    assert tensors["0"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize("value", [Pair(1, 2), {1, 2}, object()])
def test_a_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"cannot hold {type(value).__name__}"):
        pack({"key": value}, {})


@pytest.mark.parametrize(
    "value",
    [
        [{"tensor": "0"}, {"tensor": "0"}],
        {"tree": {"a": {"tensor": "0"}, "b": {"tensor": "0"}}},
        {"tensor": "1"},
    ],
    ids=["twice", "twice in a tree", "not there"],
)
def test_every_tensor_is_used_once(value: object) -> None:
    """Otherwise a small file or message could become arbitrarily large."""
    tensors = {"0": torch.ones(2)}
    with pytest.raises(ValueError, match="twice, or it is not there"):
        unpack(value, tensors)
    assert list(tensors) == ["0"]


def test_an_object_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a packed value has the kind 'pickle'"):
        unpack({"pickle": []}, {})
