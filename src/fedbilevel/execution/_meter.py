"""Measure a computation while it runs: its floating-point operations and its peak memory."""

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
    """A context manager that measures the PyTorch operations within it.

    Multiplications and additions of matrix products and convolutions are counted, as
    `torch.utils.flop_counter` does; elementwise operations are not. A tensor counts towards memory
    from its creation until its storage is freed.

    Attributes:
        flops: floating-point operations.
        peak_bytes: The most bytes that tensors created within held at any moment.
        largest_convolution: floating-point operations of the largest forward convolution.
        calls: PyTorch operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.peak_bytes = 0
        self.largest_convolution = 0
        self.calls = 0
        self._live_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler, which takes a second, for this class."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self.calls += 1
        if formula := FORMULAS.get(func._overloadpacket):
            flops = formula(*args, **kwargs, out_val=outputs)
            self.flops += flops
            if func._overloadpacket is aten.convolution:
                self.largest_convolution = max(self.largest_convolution, flops)
        # Views and in-place operations return storages of their inputs, which are not new.
        input_ids = {storage._cdata for storage in _storages((*args, *kwargs.values()))}
        for storage in _storages((outputs,)):
            if storage._cdata not in input_ids:
                self._live_bytes += storage.nbytes()
                weakref.finalize(storage, self._subtract, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return outputs

    def _subtract(self, size: int) -> None:
        self._live_bytes -= size


def _storages(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


def _convolution_backward(*args: Any, **kwargs: Any) -> int:
    """Count a convolution's backward pass, with the number of groups taken into account.

    In the gradient of the weights, `flop_counter` forgets that a weight meets only the channels of
    its own group.
    """
    *rest, groups, (inputs, weights, _) = args
    count = flop_registry[aten.convolution_backward]
    to_inputs = count(*rest, groups, (inputs, False, False), **kwargs)
    to_weights = count(*rest, groups, (False, weights, False), **kwargs)
    return int(to_inputs + to_weights // groups)


FORMULAS: dict[object, Callable[..., int]] = {
    **flop_registry,
    aten.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
    aten.dot: lambda vector, *_, **__: 2 * vector.numel(),
    aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
    aten.convolution_backward: _convolution_backward,
}
