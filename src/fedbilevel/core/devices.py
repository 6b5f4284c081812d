"""Where tensors live: the CPU, or a GPU if there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def chosen(device: str) -> str:
    """The device of this name, which must be there; "auto" is a GPU if there is one."""
    here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if device == "auto":
        return here[-1]
    kind, _, number = device.partition(":")
    if kind not in here or (
        number
        and not (kind == "cuda" and number.isdigit() and int(number) < torch.cuda.device_count())
    ):
        raise ValueError(
            f"device is {device!r}; this machine has {' and '.join(map(repr, here))}, and 'auto' is the last"
        )
    return device


def sent(values: Any, device: str | torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers on a device, which is not waited for."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """The same for numbers that come again and again; the tensor must not be changed."""
    return sent(values, device, dtype)


def fetched(tensor: Tensor) -> Callable[[], Tensor]:
    """A tensor on the CPU, for later: whoever calls waits until the device has come that far, and no further."""
    if not tensor.is_cuda:
        return lambda: tensor
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
    done = torch.cuda.Event()
    done.record()

    def there() -> Tensor:
        done.synchronize()
        return here

    return there


def stack_bytes(device: str) -> int:
    """What a stack of clients may take: two gigabytes, or a quarter of a GPU."""
    if device == "cpu":
        return 2**31
    return int(torch.cuda.get_device_properties(device).total_memory // 4)
