"""Nests of dicts, lists, tuples, trees, tensors, numbers and strings as JSON and a list of tensors; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.core.tree import Tree


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON, with every tensor replaced by its number and every kind that JSON lacks by a one-entry object."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Tree):
        return {"tree": {name: pack(item, tensors) for name, item in value.items()}}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if type(value) is tuple:  # a named tuple would come back without its names
        return {"tuple": [pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}, nor can a message")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return tensors[items]
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in items)
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in items}
    return Tree({name: tensors[item["tensor"]] for name, item in items.items()})
