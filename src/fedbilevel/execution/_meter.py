"""What a computation takes, measured while it runs: floating-point operations, and the bytes it holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Within, `flops` counts operations and `peak_bytes` is the most that new tensors took at any moment;
    `convolution` has the operations of the largest convolution.

    Multiplications and additions of matrix products and convolutions are counted, as `torch.utils.flop_counter` does;
    elementwise work is not. A tensor counts from when it is made until its storage is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.peak_bytes = self.convolution = 0
        self._alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if formula := FORMULAS.get(func._overloadpacket):
            self.flops += (flops := formula(*args, **kwargs, out_val=made))
            if func._overloadpacket is aten.convolution:
                self.convolution = max(self.convolution, flops)
        given = {
            storage._cdata for storage in _storages((*args, *kwargs.values()))
        }  # of views, and of what is changed
        for storage in _storages((made,)):
            if storage._cdata not in given:
                self._alive += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._alive)
        return made

    def _freed(self, size: int) -> None:
        self._alive -= size


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


def _convolution_backward(*args: Any, **kwargs: Any) -> int:
    """A weight meets the channels of its own group alone, which flop_counter forgets in the weight's gradient."""
    *rest, groups, (inputs, weights, _) = args
    count = flop_registry[aten.convolution_backward]
    to_inputs = count(*rest, groups, (inputs, False, False), **kwargs)
    return int(to_inputs + count(*rest, groups, (False, weights, False), **kwargs) // groups)


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten.mv: lambda a, *_, **__: 2 * a.numel(),
    aten.dot: lambda a, *_, **__: 2 * a.numel(),
    aten.addmv: lambda _, a, *__, **___: 2 * a.numel(),
    aten.convolution_backward: _convolution_backward,
}
