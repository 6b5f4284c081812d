"""Trace a function of tensors once, replay it as a flat list of operations.

A step that runs thousands of times under `vmap` and `grad` spends much of its time in their bookkeeping. Its trace
holds the arithmetic alone; a few rewrites then take out what only the transforms needed and fuse sums into products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
Flat = Callable[..., Sequence[Tensor]]


def trace(fn: Flat, args: Sequence[Tensor]) -> Flat:
    """fn, a pure function of tensors, specialised to the shapes, strides and dtypes of args."""
    module = _make(fn, args)
    schemas = [getattr(node.target, "_schema", None) for node in module.graph.nodes]
    if any(schema is not None and schema.is_mutable for schema in schemas):
        # The rewrites move reads; they are right only where nothing is overwritten on the way.
        module = _make(functionalize(fn, remove="mutations_and_views"), args)
    graph = module.graph
    for rewrite in (_drop_idle, _fold_scalars, _fuse_scaled_sums, _fuse_sums_of_products):
        for node in list(graph.nodes):
            if node.op == "call_function":
                rewrite(graph, node)
        graph.eliminate_dead_code()
    module.recompile()
    return module


def _make(fn: Flat, args: Sequence[Tensor]) -> fx.GraphModule:
    module = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    module.graph.eliminate_dead_code()
    return module


def _form(node: Any) -> Any:
    """Shape and dtype of what a node computes; None for numbers and for several tensors at once."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _drop_idle(graph: fx.Graph, node: fx.Node) -> None:
    """Views of the shape a tensor has already, a transpose of its transpose, a product with 1."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return
    same = _form(source) is not None and _form(source) == _form(node)
    idle = same and node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    if same and node.target is aten.mul.Scalar and node.args[1] == 1:
        idle = True
    if node.target is aten.transpose.int and source.target is aten.transpose.int and source.args[1:] == node.args[1:]:
        source, idle = source.args[0], True
    if idle:
        node.replace_all_uses_with(source)


def _fold_scalars(graph: fx.Graph, node: fx.Node) -> None:
    """vmap turns a number into a tensor of its own at every use; a number it can stay."""
    if node.target in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor) and len(node.args) == 2:
        other = node.args[1]
        if isinstance(other, fx.Node) and other.target is aten._to_copy.default and isinstance(other.args[0], float):
            node.update_arg(1, other.args[0])


def _fuse_scaled_sums(graph: fx.Graph, node: fx.Node) -> None:
    """a + s b as one operation."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
        return
    a, b = node.args
    if not isinstance(b, fx.Node) or b.target is not aten.mul.Tensor or len(b.users) > 1:
        return
    alike = _form(a) is not None and _form(a) == _form(b) == _form(b.args[0])
    if alike and isinstance(b.args[1], (int, float)):
        node.args, node.kwargs = (a, b.args[0]), {"alpha": b.args[1]}


def _fuse_sums_of_products(graph: fx.Graph, node: fx.Node) -> None:
    """A1 B1 + A2 B2 accumulated in place: the two gradients of a weight are never added by themselves."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return
    a, b = node.args
    products = all(isinstance(p, fx.Node) and p.target is aten.bmm.default and len(p.users) == 1 for p in (a, b))
    if products and a is not b and _form(a) == _form(b) == _form(node):
        with graph.inserting_before(node):
            total = graph.call_function(aten.baddbmm_.default, (a, *b.args))  # type: ignore[union-attr]
        total.meta.update(node.meta)
        node.replace_all_uses_with(total)
