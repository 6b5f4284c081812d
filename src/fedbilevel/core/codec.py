"""Nested values as JSON and named tensors, without pickle: for checkpoints, memories and messages.

A value is a nest of dicts, lists, tuples, trees, tensors, numbers, strings, booleans and None.

Examples:
    >>> tensors = {}
    >>> plain = pack({"x": Tree(w=torch.ones(2)), "t": (3, None)}, tensors)
    >>> plain
    {'dict': [['x', {'tree': {'w': {'tensor': '0'}}}], ['t', {'tuple': [3, None]}]]}
    >>> unpack(plain, tensors)
    {'x': {'w': tensor([1., 1.])}, 't': (3, None)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.core.tree import Tree


def pack(value: object, tensors: dict[str, Tensor]) -> object:
    """Convert a nested value to plain JSON and collect its tensors.

    Every tensor, tree, dict and tuple becomes an object with one entry, whose key says which of
    them it was; lists, numbers, strings, booleans and None stay as they are.

    Args:
        value: The nested value.
        tensors: Receives a copy on the CPU of every tensor, named by its number.

    Returns:
        The value as JSON.

    Raises:
        TypeError: The value holds an object of another type.

    Examples:
        >>> pack((1, "a", None), {})
        {'tuple': [1, 'a', None]}
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Tree):
        return {"tree": {name: pack(item, tensors) for name, item in value.items()}}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if type(value) is tuple:  # a named tuple would come back as a plain one
        return {"tuple": [pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}, nor can a message")


def unpack(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Convert the output of `pack` back to the nested value.

    Args:
        value: JSON as `pack` returns it.
        tensors: The tensors that `pack` collected.

    Returns:
        The nested value; its tensors are those of `tensors`, not copies.

    Raises:
        ValueError: An object has a kind that `pack` never writes, or a tensor is used twice or is
            not there.

    Examples:
        >>> unpack({"tuple": [1, {"tensor": "0"}]}, {"0": torch.tensor(2)})
        (1, tensor(2))
    """
    return _unpack(value, dict(tensors))


def _unpack(value: object, unused: dict[str, Tensor]) -> Any:
    """Unpack a value; its tensors are removed from `unused`.

    A tensor that is used many times would be large once it is copied, however small its file is.
    """
    if isinstance(value, list):
        return [_unpack(item, unused) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return _take(items, unused)
    if kind == "tuple":
        return tuple(_unpack(item, unused) for item in items)
    if kind == "dict":
        return {_unpack(key, unused): _unpack(item, unused) for key, item in items}
    if kind == "tree":
        return Tree({name: _take(item["tensor"], unused) for name, item in items.items()})
    raise ValueError(f"a packed value has the kind {kind!r:.40}, which pack never writes")


def _take(name: str, unused: dict[str, Tensor]) -> Tensor:
    if name not in unused:
        raise ValueError(f"a packed value uses the tensor {name!r:.40} twice, or it is not there")
    return unused.pop(name)
