"""Activation checkpointing: layers that are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from fedbilevel.core.derivatives import vjp
from fedbilevel.nets._layers import Dropout

Call = Callable[..., tuple[Tensor, ...]]


def with_checkpoints(module: nn.Module, layers: str) -> nn.Module:
    """Return a copy of a module some of whose layers are computed again in the backward pass.

    Of such a layer only the inputs are kept, so that with a first-order method a deep network takes
    little more memory than its largest layer, for one more forward pass. Second derivatives are
    computed too, but save no memory. Values are the same, and so are the names of parameters and
    buffers. (`torch.utils.checkpoint` cannot be used: by the time it computes a layer again, the
    module has its own parameters back.)

    Args:
        module: The module; it is not changed.
        layers: A pattern for the names of the layers, such as "blocks.*". What is inside of a layer
            with such a name is computed again with it.

    Returns:
        The copy.

    Raises:
        ValueError: No layer has such a name, or one has dropout, which would draw again.

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh())
        >>> net = torch.nn.Sequential(block(), torch.nn.Linear(32, 4), block())
        >>> deep = fb.nets.with_checkpoints(net, layers="[02]")
        >>> torch.equal(deep(torch.ones(2, 4)), net(torch.ones(2, 4)))
        True
    """
    module = deepcopy(module)
    chosen: list[str] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and fnmatchcase(name, layers):
            _check_that_nothing_is_drawn(name, part)
            chosen.append(name)
            part.forward = partial(_forward, part, part.forward)
    if not chosen:
        raise ValueError(f"layers is {layers!r}; no layer of the module has such a name")
    return module


def _check_that_nothing_is_drawn(name: str, layer: nn.Module) -> None:
    for part in layer.modules():
        rate = getattr(part, "dropout", 0.0)  # of attention and of recurrent layers
        if isinstance(part, Dropout | _DropoutNd):
            rate = part.p
        if isinstance(rate, float) and rate > 0 and part.training:
            raise ValueError(
                f"layer {name!r} has dropout, which would draw other numbers when the layer is "
                "computed again; layers must not, unless the module is in evaluation mode"
            )


def _forward(layer: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the layer; its parameters are those that `functional_call` has put into it."""
    names = [name for name, _ in layer.named_parameters()]
    arguments, form = pytree.tree_flatten((args, options))
    places = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
    inputs = [arguments[place] for place in places]
    parameters = [value for _, value in layer.named_parameters()]
    device = (parameters + inputs)[0].device.type
    precision = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    )
    result_form: Any = None

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal result_form
        values = list(arguments)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            values[place] = tensor
        args, options = pytree.tree_unflatten(values, form)
        own = dict(zip(names, tensors, strict=False))
        with precision, _reparametrize_module(layer, own, tie_weights=True):
            result = forward(*args, **options)
        flat, result_form = pytree.tree_flatten(result)
        return tuple(flat)

    outputs = _Recompute.apply(call, *parameters, *inputs)
    return pytree.tree_unflatten(list(outputs), result_form)


class _Recompute(torch.autograd.Function):
    """Computes a function of tensors, and again where its derivatives are needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        places = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]

        def of_floating(values: list[Tensor]) -> tuple[tuple[Tensor, ...], None]:
            whole = list(tensors)
            for place, value in zip(places, values, strict=True):
                whole[place] = value
            return ctx.call(*whole), None

        _, pullback, _ = vjp(of_floating, [tensors[place] for place in places])
        results: list[Tensor | None] = [None] * len(tensors)
        for place, result in zip(places, pullback(gradients), strict=True):
            results[place] = result
        return None, *results
