"""Convolutions of a stack of clients on a GPU, each by the fastest of several kernels.

Under `vmap`, the convolutions of clients with weights of their own become one convolution with a
group per client. For few channels per group, cuDNN's kernels for that are slow, and which other way
is fastest depends on the shapes. `Convolutions` measures each shape once and remembers the choice,
which goes into the checkpoint: other kernels round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MANY_GROUPS = 64  # above this, one kernel per group is not tried


class Geometry(NamedTuple):
    """What a convolution depends on beside its tensors, in the order of `aten.convolution`."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


Forward = Callable[[Tensor, Tensor, Geometry], Tensor]  # (inputs, weights, geometry) -> outputs
# (gradient of the outputs, inputs, weights, geometry) -> gradient of the inputs, or of the weights
Backward = Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]


class Convolutions(TorchDispatchMode):
    """A context in which the convolutions of stacks on a GPU run in the way that is fastest.

    Attributes:
        choices: The name of the fastest way, by a description of the convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choices: dict[str, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler for this class."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is aten.convolution.default:
            inputs, weights, bias, *rest = args
            geometry = Geometry(*rest)
            if _is_stack(inputs, geometry):
                outputs = self._run("outputs", FORWARD, inputs, weights, geometry)
                if bias is None:
                    return outputs
                return outputs + bias.view(-1, *[1] * (outputs.ndim - 2))
        if func is aten.convolution_backward.default:
            gradient, inputs, weights, _, *rest, needed = args
            geometry = Geometry(*rest)
            if _is_stack(inputs, geometry):
                return self._backward(gradient, inputs, weights, geometry, needed)
        return func(*args, **(kwargs or {}))

    def _backward(
        self,
        gradient: Tensor,
        inputs: Tensor,
        weights: Tensor,
        geometry: Geometry,
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        needs_inputs, needs_weights, needs_bias = needed
        by_inputs = by_weights = by_bias = None
        if needs_inputs:
            by_inputs = self._run("inputs", TO_INPUTS, gradient, inputs, weights, geometry)
        if needs_weights:
            by_weights = self._run("weights", TO_WEIGHTS, gradient, inputs, weights, geometry)
        if needs_bias:
            by_bias = gradient.sum([0, *range(2, gradient.ndim)])
        return by_inputs, by_weights, by_bias

    def _run(self, what: str, ways: Mapping[str, Callable[..., Tensor]], *args: Any) -> Tensor:
        """Compute something in the fastest way, which is measured at the first time."""
        shapes = [(*arg.shape, str(arg.dtype)) for arg in args if isinstance(arg, Tensor)]
        key = repr((what, shapes, tuple(args[-1])))
        if key not in self.choices:
            if torch.cuda.is_current_stream_capturing():
                return ways["grouped"](*args)
            self.choices[key] = _fastest(ways, args)
        return ways[self.choices[key]](*args)


def _is_stack(inputs: Tensor, geometry: Geometry) -> bool:
    """Tell whether a convolution is one of images with a group per client, on real tensors."""
    if type(inputs) is not Tensor or not inputs.is_cuda:  # a fake tensor, while tracing
        return False
    return geometry.groups > 1 and not geometry.transposed and inputs.ndim == 4


def _fastest(ways: Mapping[str, Callable[..., Tensor]], args: Sequence[Any]) -> str:
    """Return the name of the way that takes the least time."""
    times = {}
    for name, way in ways.items():
        if name == "separate" and args[-1].groups > MANY_GROUPS:
            continue
        try:
            way(*args)  # the first call loads kernels
            times[name] = _milliseconds(way, args)
        except (RuntimeError, NotImplementedError):  # cuDNN has no kernel, or no memory is left
            continue
    return min(times, key=times.__getitem__)


def _milliseconds(way: Callable[..., Tensor], args: Sequence[Any]) -> float:
    """Return the time that a way takes within a captured graph, as it will be used."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        way(*args)
    graph.replay()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


def _grouped(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    outputs: Tensor = aten.convolution.default(inputs, weights, None, *geometry)
    return outputs


def _grouped_channels_last(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    return _grouped(_channels_last(inputs), _channels_last(weights), geometry).contiguous()


def _separate(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    """A convolution per group, all at the same time."""
    groups = geometry.groups
    alone = geometry._replace(groups=1)

    def one(inputs: Tensor, weights: Tensor) -> Tensor:
        return _grouped(inputs.contiguous(), weights, alone)

    return torch.cat(_side_by_side(one, inputs.chunk(groups, 1), weights.chunk(groups)), 1)


def _unfolded(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    """A product of weights and patches per group and image."""
    patches = _patches(inputs, weights, geometry)
    flat = weights.reshape(geometry.groups, -1, patches.shape[2])
    outputs = torch.matmul(flat, patches)
    return outputs.reshape(len(inputs), len(weights), *_output_size(inputs, weights, geometry))


def _backward_by(
    forward_format: Callable[[Tensor], Tensor], mask: list[bool], index: int
) -> Backward:
    """Return the backward pass of a grouped convolution, for one of its gradients."""

    def backward(gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        tensors = [forward_format(tensor) for tensor in (gradient, inputs, weights)]
        results = aten.convolution_backward.default(*tensors, None, *geometry, mask)
        result: Tensor = results[index].contiguous()
        return result

    return backward


def _backward_separate(mask: list[bool], index: int, dim: int) -> Backward:
    """Return the backward pass of a convolution per group, all at the same time."""

    def backward(gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        groups = geometry.groups
        alone = geometry._replace(groups=1)

        def one(gradient: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
            tensors = (gradient.contiguous(), inputs.contiguous(), weights)
            results = aten.convolution_backward.default(*tensors, None, *alone, mask)
            result: Tensor = results[index]
            return result

        parts = _side_by_side(
            one, gradient.chunk(groups, 1), inputs.chunk(groups, 1), weights.chunk(groups)
        )
        return torch.cat(parts, dim)

    return backward


def _weights_unfolded(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    """The sum over images of the products of gradients and patches, per group."""
    patches = _patches(inputs, weights, geometry)
    by_outputs = gradient.reshape(len(gradient), geometry.groups, -1, patches.shape[3])
    by_weights = torch.matmul(by_outputs, patches.transpose(2, 3)).sum(0)
    return by_weights.reshape(weights.shape)


def _patches(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    """Return the patches of images: (images, groups, entries of a patch, positions)."""
    images, channels = inputs.shape[:2]
    groups = geometry.groups
    stacked = inputs.reshape(images * groups, channels // groups, *inputs.shape[2:])
    patches: Tensor = aten.im2col.default(
        stacked, weights.shape[2:], geometry.dilation, geometry.padding, geometry.stride
    )
    return patches.view(images, groups, *patches.shape[1:])


def _output_size(inputs: Tensor, weights: Tensor, geometry: Geometry) -> list[int]:
    sizes = []
    for axis, kernel in enumerate(weights.shape[2:]):
        reach = geometry.dilation[axis] * (kernel - 1) + 1
        space = inputs.shape[2 + axis] + 2 * geometry.padding[axis] - reach
        sizes.append(math.floor(space / geometry.stride[axis]) + 1)
    return sizes


def _side_by_side(fn: Callable[..., Tensor], *columns: Sequence[Tensor]) -> list[Tensor]:
    """Call a function for each entry of the columns, each call on a stream of its own."""
    main = torch.cuda.current_stream()
    results = []
    streams = []
    for args in zip(*columns, strict=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(fn(*args))
        streams.append(stream)
    for stream in streams:
        main.wait_stream(stream)
    return results


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


FORWARD: dict[str, Forward] = {
    "grouped": _grouped,
    "channels last": _grouped_channels_last,
    "separate": _separate,
    "unfolded": _unfolded,
}
ONLY_INPUTS = [True, False, False]
ONLY_WEIGHTS = [False, True, False]
TO_INPUTS: dict[str, Backward] = {
    "grouped": _backward_by(Tensor.contiguous, ONLY_INPUTS, 0),
    "channels last": _backward_by(_channels_last, ONLY_INPUTS, 0),
    "separate": _backward_separate(ONLY_INPUTS, 0, dim=1),
}
TO_WEIGHTS: dict[str, Backward] = {
    "grouped": _backward_by(Tensor.contiguous, ONLY_WEIGHTS, 1),
    "channels last": _backward_by(_channels_last, ONLY_WEIGHTS, 1),
    "separate": _backward_separate(ONLY_WEIGHTS, 1, dim=0),
    "unfolded": _weights_unfolded,
}
