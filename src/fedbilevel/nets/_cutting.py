"""Which dimensions of a network's parameters belong together when it is cut to fewer units."""

from torch import nn

from fedbilevel.nets._layers import Dropout, GroupNorm, Residual

_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus)
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d)
_TRANSPARENT = (
    *_ACTIVATIONS,
    *_POOLING,
    nn.Flatten,
    nn.Identity,
    Dropout,
)  # unit k of the input is unit k of the output
_BY_HAND = "the axes must be given by hand, as a name or None for each dimension of each parameter"


def axes(module: nn.Module) -> dict[str, tuple[str | None, ...]]:
    """An axis for each dimension of each parameter, for `Problem(axes=...)`; None is never cut.

    An axis has the name of the layer that writes it. The next layer reads it, a residual sum makes the axes of its two
    branches one, and the network's inputs and outputs have none. Where a dimension has more entries than the axis has
    units (channels beside groups of them, or after Flatten), each unit owns a contiguous block.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    joined: dict[str | None, str | None] = {}

    def walk(name: str, layer: nn.Module, axis: str | None) -> str | None:
        """Note the parameters of a layer that reads `axis`, and return the axis it writes."""
        kind = type(layer)  # exactly: a class derived from a known one may compute something else

        def inside(child: str, axis: str | None) -> str | None:
            return walk(f"{name}.{child}".lstrip("."), layer.get_submodule(child), axis)

        if kind is nn.Sequential:
            for child in layer._modules:  # named_children() leaves out a layer's second use
                axis = inside(child, axis)
        elif kind is Residual:
            axis = join(inside("path", axis), inside("shortcut", axis))
        elif kind is GroupNorm:
            note(name, layer, weight=(axis, None), bias=(axis, None))
        elif kind is nn.Conv2d and layer.groups != 1:
            raise ValueError(
                f"layer {name!r} is a convolution with {layer.groups} groups; {_BY_HAND}"
            )
        elif kind in (nn.Linear, nn.Conv2d):
            window = (None, None) if kind is nn.Conv2d else ()
            note(name, layer, weight=(name, axis, *window), bias=(name,))
            axis = name
        elif kind not in _TRANSPARENT:
            raise ValueError(
                f"layer {name!r} is of a kind that nets.axes does not know ({kind.__name__}); {_BY_HAND}"
            )
        return axis

    def note(name: str, layer: nn.Module, **dimensions: tuple[str | None, ...]) -> None:
        for parameter, _ in layer.named_parameters():
            found[f"{name}.{parameter}".lstrip(".")] = dimensions[parameter]

    def join(one: str | None, other: str | None) -> str | None:
        """Make two axes one: the second, or none if either is none."""
        one, other = resolve(one), resolve(other)
        if one is None:
            one, other = other, one
        if one != other:
            joined[one] = other
        return other

    def resolve(axis: str | None) -> str | None:
        while axis in joined:
            axis = joined[axis]
        return axis

    join(walk("", module, None), None)
    if len(found) > len(list(module.parameters())):
        raise ValueError(f"some layers share their parameters; {_BY_HAND}")
    return {name: tuple(resolve(axis) for axis in dimensions) for name, dimensions in found.items()}
