"""Devices by name, and copies to and from a device."""

from __future__ import annotations

import pytest
import torch

from fedbilevel.core.devices import constant, fetch_async, resolve_device, stack_bytes, to_device
from tests.support.refusals import refusal


def pretend_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "name", "resolved"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_available_devices(
    gpus: int, name: str, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(gpus, monkeypatch)
    assert resolve_device(name) == resolved


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cpu:0", "gpu", ""])
def test_a_device_that_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(0, monkeypatch)
    expected = f"device is {name!r}; on this machine it must be 'auto' or 'cpu'"
    assert refusal(resolve_device, name) == expected


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "cpu:0", "cuda:-1"])
def test_a_gpu_that_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(2, monkeypatch)
    expected = f"device is {name!r}; on this machine it must be 'auto' or 'cpu' or 'cuda'"
    assert refusal(resolve_device, name) == expected


def test_numbers_become_tensors() -> None:
    assert to_device(3, "cpu").dtype == torch.int64
    assert torch.equal(to_device([1, 2], "cpu", torch.float64), torch.tensor([1.0, 2.0]).double())
    fetch = fetch_async(to_device(0.5, "cpu"))
    assert fetch().item() == 0.5


def test_a_constant_is_made_once() -> None:
    first = constant((1.0, 2.0), "cpu", torch.float64)
    assert constant((1.0, 2.0), "cpu", torch.float64) is first
    assert constant((1.0, 2.0), "cpu", torch.float32).dtype == torch.float32


def test_a_stack_on_the_cpu_may_take_two_gibibytes() -> None:
    assert stack_bytes("cpu") == 2 * 1024**3
