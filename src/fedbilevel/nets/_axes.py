"""Derives from a network which dimensions of its parameters are cut together in submodels."""

from __future__ import annotations

from torch import nn

from fedbilevel.nets._layers import Dropout, GroupNorm, Residual

_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d)
# In these layers, unit k of the output depends on unit k of the input alone.
_UNITWISE = (*_ACTIVATIONS, *_POOLING, nn.Flatten, nn.Identity, Dropout)
_BY_HAND = "the axes must be given by hand, as a name or None for each dimension of each parameter"


def axes(module: nn.Module) -> dict[str, tuple[str | None, ...]]:
    """Name the axis of every dimension of every parameter, for `Problem(axes=...)`.

    An axis is named after the layer whose outputs it counts. The next layer reads the same axis. A
    residual sum makes the axes of its two branches one. The inputs and the outputs of the network
    have no axis and are never cut. Where a dimension has more entries than the axis has units
    (channels beside groups of channels, or pixels after `Flatten`), every unit owns a contiguous
    block of entries.

    Args:
        module: A network made of `nn.Sequential`, `nn.Linear`, `nn.Conv2d`, `nets.GroupNorm`,
            `nets.Residual`, `nets.Dropout`, pooling, activations, `nn.Flatten` and `nn.Identity`.

    Returns:
        For every parameter, by name, a tuple with an axis or None for each dimension.

    Raises:
        ValueError: A layer is of another kind, a convolution has groups, or layers share their
            parameters. The axes of such a network must be given by hand.

    Examples:
        >>> import fedbilevel as fb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> fb.nets.axes(net)["0.weight"], fb.nets.axes(net)["2.weight"]
        (('0', None), (None, '0'))
    """
    tracer = _AxisTracer()
    outputs = tracer.trace("", module, None)
    tracer.join(outputs, None)
    if len(tracer.parameters) > len(list(module.parameters())):
        raise ValueError(f"some layers share their parameters; {_BY_HAND}")
    return {
        name: tuple(tracer.resolve(axis) for axis in dimensions)
        for name, dimensions in tracer.parameters.items()
    }


class _AxisTracer:
    """Follows the axes through the layers of a network."""

    def __init__(self) -> None:
        self.parameters: dict[str, tuple[str | None, ...]] = {}
        self.joined: dict[str | None, str | None] = {}

    def trace(self, name: str, layer: nn.Module, axis: str | None) -> str | None:
        """Record the parameters of a layer whose inputs have `axis`; return that of its outputs."""
        kind = type(layer)  # exactly: a subclass may compute something else
        if kind is nn.Sequential:
            for child in layer._modules:  # named_children() leaves out a layer's second use
                axis = self._trace_child(name, layer, child, axis)
            return axis
        if kind is Residual:
            path = self._trace_child(name, layer, "path", axis)
            shortcut = self._trace_child(name, layer, "shortcut", axis)
            return self.join(path, shortcut)
        if kind is GroupNorm:
            self._record(name, layer, weight=(axis, None), bias=(axis, None))
            return axis
        if kind is nn.Linear:
            self._record(name, layer, weight=(name, axis), bias=(name,))
            return name
        if kind is nn.Conv2d:
            if layer.groups != 1:
                raise ValueError(
                    f"layer {name!r} is a convolution with {layer.groups} groups; {_BY_HAND}"
                )
            self._record(name, layer, weight=(name, axis, None, None), bias=(name,))
            return name
        if kind in _UNITWISE:
            return axis
        raise ValueError(
            f"layer {name!r} is of a kind that nets.axes does not know ({kind.__name__}); "
            f"{_BY_HAND}"
        )

    def _trace_child(self, name: str, layer: nn.Module, child: str, axis: str | None) -> str | None:
        return self.trace(f"{name}.{child}".lstrip("."), layer.get_submodule(child), axis)

    def _record(self, name: str, layer: nn.Module, **dimensions: tuple[str | None, ...]) -> None:
        for parameter, _ in layer.named_parameters():
            self.parameters[f"{name}.{parameter}".lstrip(".")] = dimensions[parameter]

    def join(self, first: str | None, second: str | None) -> str | None:
        """Make two axes one, and return it: the second, or None (never cut) if either is None."""
        first = self.resolve(first)
        second = self.resolve(second)
        if first is None:
            first, second = second, first
        if first != second:
            self.joined[first] = second
        return second

    def resolve(self, axis: str | None) -> str | None:
        """Return the axis that `axis` has been joined to."""
        while axis in self.joined:
            axis = self.joined[axis]
        return axis
