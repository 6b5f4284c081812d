"""Devices, and copies between the CPU and a GPU that do not wait."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor


def resolve_device(device: str) -> str:
    """Return the name of an available device.

    Args:
        device: "cpu", "cuda", "cuda:N", or "auto" for a GPU if there is one, else the CPU.

    Returns:
        The name of the device; never "auto".

    Raises:
        ValueError: The device is not available on this machine.

    Examples:
        >>> resolve_device("cpu")
        'cpu'
    """
    available = ["cpu"]
    if torch.cuda.is_available():
        available.append("cuda")
    if device == "auto":
        return available[-1]
    kind, _, index = device.partition(":")
    known = kind in available
    if index:
        known = kind == "cuda" and kind in available and _is_gpu_index(index)
    if not known:
        names = " or ".join(map(repr, ["auto", *available]))
        raise ValueError(f"device is {device!r}; on this machine it must be {names}")
    return device


def _is_gpu_index(text: str) -> bool:
    return text.isdigit() and int(text) < torch.cuda.device_count()


def versions(device: str) -> dict[str, str]:
    """Return what the last bits of a result may depend on, besides the settings of a run.

    Args:
        device: The name of the device on which the run computes.

    Returns:
        The versions of fedbilevel, PyTorch and Python, and the kind of processor.

    Examples:
        >>> list(versions("cpu"))
        ['fedbilevel', 'torch', 'python', 'processor']
    """
    if device == "cpu":
        processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        processor = torch.cuda.get_device_name(device)
    return {
        # Not imported at the top: the package knows its modules, and they would know it.
        "fedbilevel": import_module("fedbilevel").__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor,
    }


def to_device(
    values: float | Sequence[float] | Tensor,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the copy to a GPU.

    Args:
        values: A number, a sequence of numbers or a tensor.
        device: The device of the result.
        dtype: The dtype of the result; None infers it as `torch.as_tensor` does.

    Returns:
        The tensor.

    Examples:
        >>> to_device([1, 2], "cpu", torch.float64)
        tensor([1., 2.], dtype=torch.float64)
    """
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device, from a cache if they were asked for before.

    Args:
        values: The numbers.
        device: The device of the result.
        dtype: The dtype of the result.

    Returns:
        The tensor. All callers share it, so it must not be changed in place.

    Examples:
        >>> constant((1.0, 2.0), "cpu", torch.float64)
        tensor([1., 2.], dtype=torch.float64)
    """
    return to_device(values, device, dtype)


def fetch_async(tensor: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the CPU, and return a function that waits for the copy.

    Args:
        tensor: A tensor on any device.

    Returns:
        A function that returns the tensor on the CPU. It waits until the GPU has done the work that
        was queued before this call, not the work that was queued since.

    Examples:
        >>> fetch = fetch_async(torch.ones(2))
        >>> fetch()
        tensor([1., 1.])
    """
    if not tensor.is_cuda:
        return lambda: tensor
    on_cpu = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_cpu.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return on_cpu

    return wait


def stack_bytes(device: str) -> int:
    """Return the default memory limit for a stack of clients.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        2 GiB on a CPU, a quarter of the memory of a GPU.

    Examples:
        >>> stack_bytes("cpu")
        2147483648
    """
    if device == "cpu":
        return 2**31
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return memory // 4
