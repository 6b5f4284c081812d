"""Comparing nested values to the bit."""

import math
from typing import Any

import torch


def identical(a: Any, b: Any) -> bool:
    """Whether two nested values are equal to the bit and of the same types, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or (a, str(a)) == (b, str(b))  # the string tells -0.0 from 0.0
    return bool(a == b)
