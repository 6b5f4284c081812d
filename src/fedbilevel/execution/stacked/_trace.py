"""Trace a function of tensors once, replay it as a flat list of operations.

A step that runs thousands of times under `vmap` and `grad` spends much of its time in their bookkeeping. Its trace
holds the arithmetic alone; a few rewrites then take out what only the transforms needed and fuse sums into products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
FILLS: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
SOURCES = (aten.scalar_tensor, aten.arange)  # constants that are made of numbers
LARGEST_CONSTANT = 1 << 16  # entries; a trace holds its constants for as long as it lives
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
NUMBERS = (bool, int, float)
Flat = Callable[..., Sequence[Tensor]]


def trace(fn: Flat, args: Sequence[Tensor]) -> Flat:
    """fn, a pure function of tensors, specialised to the shapes, strides and dtypes of args."""
    module = _make(fn, args)
    rewrites = (
        _drop_idle,
        _fold_scalars,
        _Constants(module),
        _drop_idle,
        _Merge(),
        _FuseScaledSums(),
        _fuse_products,
        _reuse,
    )
    _rewrite(module, rewrites)
    return module.forward


def compiled(fn: Flat, args: Sequence[Tensor]) -> Flat:
    """The same through PyTorch's compiler, which takes seconds to minutes and fuses what is not a matrix product."""
    import torch._inductor  # takes a second

    module = _make(fn, args)
    _rewrite(
        module, [_Constants(module, least=2**31)]
    )  # the compiler counts in 32 bits, too few for draws
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # what it has to say, float32 being slow above all, is not for who called
        run: Flat = torch._inductor.compile(module, list(args))
    return run


def _make(fn: Flat, args: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of fn, none of which overwrites anything: rewrites that move reads are right only then."""
    pure = functionalize(fn, remove="mutations")
    module = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    module.graph.eliminate_dead_code()
    return module


def _rewrite(
    module: fx.GraphModule, rewrites: Sequence[Callable[[fx.Graph, fx.Node], None]]
) -> None:
    for rewrite in rewrites:
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                rewrite(module.graph, node)
        module.graph.eliminate_dead_code()
    module.recompile()


def _form(node: Any) -> Any:
    """Shape and dtype of what a node computes; None for numbers and for several tensors at once."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _drop_idle(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a node that computes nothing new by what it was given."""
    source = _unchanged(node)
    if source is not None:
        node.replace_all_uses_with(source)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that a node returns as it is.

    That is so for a view of the shape a tensor has already, for a product with 1, for a sum with 0, and for a
    transpose of a transpose.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        return source.args[0] if source.args[1:] == node.args[1:] else None  # type: ignore[return-value]
    if node.target is aten.add.Tensor:
        other = node.args[1]
        if _is_zero(source) and _form(other) == _form(node):
            return other  # type: ignore[return-value]
        return source if _is_zero(other) and _same_form(source, node) else None
    if not _same_form(source, node):
        return None
    if node.target is aten.mul.Scalar:
        return source if node.args[1] == 1 else None
    return source if node.target in VIEWS else None


def _same_form(source: fx.Node, node: fx.Node) -> bool:
    return _form(source) is not None and _form(source) == _form(node)


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in (
        aten.zeros_like.default,
        aten.zeros.default,
    )


def _fold_scalars(graph: fx.Graph, node: fx.Node) -> None:
    """vmap turns a number into a tensor of its own at every use; a number it can stay."""
    if (
        node.target in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
        and len(node.args) == 2
    ):
        other = node.args[1]
        if (
            isinstance(other, fx.Node)
            and other.target is aten._to_copy.default
            and isinstance(other.args[0], float)
        ):
            node.update_arg(1, other.args[0])


class _FuseScaledSums:
    """a + s b as one operation, where s is a number or a 0-d tensor such as a step size."""

    def __init__(self) -> None:
        self.read: dict[fx.Node, fx.Node] = {}  # numbers that were read from 0-d tensors

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            return
        a, product = node.args
        if (
            not isinstance(product, fx.Node)
            or product.target is not aten.mul.Tensor
            or len(product.users) > 1
        ):
            return
        b, scale = product.args
        if _form(a) is None or not _form(a) == _form(product) == _form(b):
            return
        if isinstance(scale, (int, float)):
            node.args, node.kwargs = (a, b), {"alpha": scale}
        elif isinstance(scale, fx.Node) and _form(scale) == (torch.Size(), _form(a)[1]):
            self._by_tensor(graph, node, (a, b, scale))

    def _by_tensor(
        self, graph: fx.Graph, node: fx.Node, operands: tuple[Any, Any, fx.Node]
    ) -> None:
        a, b, scale = operands
        if scale.meta["val"].is_cuda:  # a GPU is not waited for
            value = 1 if node.target is aten.add.Tensor else -1
            node.target, node.args, node.kwargs = aten.addcmul.default, operands, {"value": value}
            return
        if scale not in self.read:
            with graph.inserting_after(scale):
                self.read[scale] = graph.call_function(aten._local_scalar_dense.default, (scale,))
        node.args, node.kwargs = (a, b), {"alpha": self.read[scale]}


def _fuse_products(graph: fx.Graph, node: fx.Node) -> None:
    """A1 B1 + A2 B2 accumulated in place: the two gradients of a weight are never added by themselves. A + A1 B1, as of
    a bias, as one operation."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return
    a: Any
    b: Any
    a, b = node.args if _only_product(node.args[1]) else reversed(node.args)
    if not _only_product(b) or a is b or _form(b) != _form(node):
        return
    into = _only_product(a) and _form(a) == _form(b)
    if not into and (_form(a) is None or _form(a)[1] != _form(b)[1]):
        return
    with graph.inserting_before(node):
        total = graph.call_function((aten.baddbmm_ if into else aten.baddbmm).default, (a, *b.args))
    total.meta.update(node.meta)
    node.replace_all_uses_with(total)


def _reuse(graph: fx.Graph, node: fx.Node) -> None:
    """A sum takes the place of an operand that nothing else needs from then on: new memory costs more than a sum."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or _form(node) is None:
        return
    a, b = node.args
    if _spent(a, node):
        target = (aten.add_ if node.target is aten.add.Tensor else aten.sub_).Tensor
    elif node.target is aten.add.Tensor and not node.kwargs and _spent(b, node):
        (a, b), target = (b, a), aten.add_.Tensor
    else:
        return
    with graph.inserting_before(node):
        total = graph.call_function(target, (a, b), dict(node.kwargs))
    total.meta.update(node.meta)
    node.replace_all_uses_with(total)


def _spent(value: Any, by: fx.Node) -> bool:
    """Whether a node computes a tensor of its own, of this form, and this is the last use of it."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or _form(value) != _form(by):
        return False
    return _is_fresh(value) and all(
        user == by or (_is_fresh(user) and user < by) for user in value.users
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether what it returns shares no memory with what it was given; `_unsafe_view` does, and does not say so."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target is aten._unsafe_view.default:
        return False
    return all(value.alias_info is None for value in schema.returns)


def _only_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.bmm.default and len(node.users) == 1


class _Merge:
    """What is computed twice is computed once."""

    def __init__(self) -> None:
        self.seen: dict[Any, fx.Node] = {}

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return
        first = self.seen.setdefault(_frozen((node.target, node.args, dict(node.kwargs))), node)
        if first is not node:
            node.replace_all_uses_with(first)


def _frozen(value: Any) -> Any:
    """A value to look things up by; 1 and 1.0 are different ones."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return type(value), value if isinstance(value, (fx.Node, *NUMBERS)) else repr(value)


class _Constants:
    """What depends on shapes alone is computed here, once: the gradient of a loss in itself, and what comes of it.

    What only led to such a shape is not computed at all: a loss of which the gradient alone is used. least: leave those
    that are below it where they are.
    """

    def __init__(self, module: fx.GraphModule, least: int = 0) -> None:
        self.module, self.least, self.known = module, least, dict[fx.Node, Tensor]()

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        form, sources = node.meta.get("val"), node.all_input_nodes
        if not isinstance(form, Tensor) or form.numel() > LARGEST_CONSTANT:
            return
        if node.target in FILLS:
            value = torch.full(form.shape, FILLS[node.target], dtype=form.dtype, device=form.device)
        elif getattr(node.target, "overloadpacket", None) in SOURCES or (
            sources and all(source in self.known for source in sources)
        ):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.known.__getitem__)
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            return
        self.known[node] = value
        if self.least and not (value.double().abs() >= self.least).any():
            return
        name = f"constant_{len(self.known)}"
        setattr(self.module, name, value)
        with graph.inserting_before(node):
            constant = graph.create_node(
                "get_attr", name
            )  # graph.get_attr wants buffers, which are slow to look up
            copy = graph.call_function(
                aten.clone.default, (constant,)
            )  # to hand out: nobody else may hold a constant
        constant.meta.update(node.meta)
        self.known[constant] = value
        node.replace_all_uses_with(constant, delete_user_cb=lambda user: user.op != "output")
        node.replace_all_uses_with(copy)
