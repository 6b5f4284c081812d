"""What travels: one flat array for each dtype, and a header in JSON that says what is what. No pickle.

Everything that arrives is refused with a `WireError` unless it is exactly what `encode` would have made.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedbilevel.core.codec import pack, unpack

VERSION = 2
LONGEST = 2**20  # characters of a header
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ValueError):
    """What is wrong with a message, in one line."""


def one_line(error: object) -> str:
    """What an error says, for a log: what it quotes may be long, and another's."""
    return " ".join(str(error).split())[:300]


def encode(**values: Any) -> RecordDict:
    """Numbers, strings, trees and tensors by name, nested as one likes, as what Flower can send."""
    tensors: dict[str, Tensor] = {}
    plain = pack(values, tensors)
    flat: dict[str, list[Tensor]] = defaultdict(list)
    specs = []
    for tensor in tensors.values():
        if tensor.dtype not in NAMES:
            raise TypeError(
                f"a message cannot hold {tensor.dtype}; it must be one of {', '.join(DTYPES)}"
            )
        flat[NAMES[tensor.dtype]].append(tensor.reshape(-1))
        specs.append([NAMES[tensor.dtype], list(tensor.shape)])
    header = json.dumps(
        {"version": VERSION, "tensors": specs, "values": plain}, separators=(",", ":")
    )
    if len(header) > LONGEST:
        raise ValueError(f"a message's header has {len(header)} characters; there can be {LONGEST}")
    arrays = {name: Array(_numpy(torch.cat(parts))) for name, parts in flat.items()}
    return RecordDict({"tensors": ArrayRecord(arrays), "header": ConfigRecord({"json": header})})


def decode(content: RecordDict) -> dict[str, Any]:
    """What `encode` was given."""
    try:
        return _decode(content)
    except WireError:
        raise
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        EOFError,
        MemoryError,
    ) as error:
        raise WireError(f"the message cannot be read ({type(error).__name__})") from error


def _decode(content: RecordDict) -> dict[str, Any]:
    if set(content) != {"tensors", "header"}:
        raise WireError("the message has other records than 'tensors' and 'header'")
    header = _header(content["header"]["json"])
    arrays: dict[str, Tensor] = {}
    for name, array in content["tensors"].items():
        if name not in DTYPES:
            raise WireError(f"the message holds an array of {str(name)[:20]!r}")
        arrays[name] = _tensor(name, array)
    tensors = _split(arrays, header["tensors"])
    values = unpack(header["values"], tensors)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise WireError("the header names no values")
    return values


def _header(text: Any) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise WireError(f"the header is no text of at most {LONGEST} characters")
    header: dict[str, Any] = json.loads(text)
    if header["version"] != VERSION:
        version = f"{header['version']!r:.20}"
        raise WireError(f"the message has version {version}; this side speaks {VERSION}")
    return header


def _split(arrays: dict[str, Tensor], specs: Any) -> dict[str, Tensor]:
    """Cut the flat arrays into tensors of the shapes in the header, with nothing left over."""
    taken = dict.fromkeys(arrays, 0)
    tensors = {}
    for number, (name, shape) in enumerate(specs):
        if not all(type(size) is int and size >= 0 for size in shape):
            raise WireError("a shape in the header is not one")
        start = taken[name]
        end = start + math.prod(shape)
        if end > len(arrays[name]):
            raise WireError(f"the header tells of more {name} numbers than there are")
        tensors[str(number)] = arrays[name][start:end].reshape(shape)
        taken[name] = end
    if any(taken[name] != len(array) for name, array in arrays.items()):
        raise WireError("the message holds numbers that its header does not tell of")
    return tensors


def _numpy(tensor: Tensor) -> Any:
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _tensor(name: str, array: Any) -> Tensor:
    expected = "int16" if name == "bfloat16" else name
    values = array.numpy()  # Flower reads numpy's own format, with pickle refused
    if values.dtype != np.dtype(expected) or values.ndim != 1:
        raise WireError(f"the array of {name} holds {values.dtype} in {values.ndim} dimensions")
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor
