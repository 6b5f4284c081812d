"""Trace a function of tensors once and replay it as a flat list of operations.

A step that runs thousands of times under `vmap` and `grad` spends much of its time in their
bookkeeping. Its trace holds the arithmetic alone. A few rewrites then remove what only the
transforms needed, and fuse sums into products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fedbilevel.execution.stacked._recording import Form, record

aten = torch.ops.aten
ADD = aten.add.Tensor
SUB = aten.sub.Tensor
MUL = aten.mul.Tensor
DIV = aten.div.Tensor
FILL_VALUES: dict[object, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}
CONSTANT_SOURCES = (aten.scalar_tensor, aten.arange)  # their results depend on numbers alone
MAX_CONSTANT_SIZE = 1 << 16  # entries; a trace holds its constants as long as it lives
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
TRANSPOSES = (aten.transpose.int, aten.t.default)
# Operations that PyTorch also offers as functions or methods with the same arguments. They are
# called in half the time that entries of `torch.ops` take.
FUNCTIONS = """
    abs add addcmul addmm baddbmm bmm cat clone cos div eq exp expand ge gt index_select le log lt
    mean mm mul mv ne neg permute pow select sigmoid sin sqrt squeeze stack sub sum t tanh transpose
    unsqueeze view where
"""

FlatFunction = Callable[..., Sequence[Tensor]]
Rewrite = Callable[[fx.Graph, fx.Node], None]  # rewrites one node of a graph
ShapeAndDtype = tuple[torch.Size, torch.dtype]


def trace(fn: FlatFunction, args: Sequence[Tensor]) -> FlatFunction:
    """Trace a pure function of tensors.

    Args:
        fn: The function.
        args: Example arguments; the trace is valid for their shapes, strides and dtypes.

    Returns:
        A function that computes the same up to rounding, without the overhead of transforms.
    """
    module = record(fn, args)
    rewrites = (
        _drop_means_of_one,
        _drop_identities,
        _inline_scalars,
        _FoldConstants(module),
        _drop_identities,
        _MergeDuplicates(),
        _FuseScaledSums(),
        _fuse_products,
        _add_in_place,
        _call_functions,
    )
    _apply_rewrites(module, rewrites)
    return module.forward


def compile_trace(fn: FlatFunction, args: Sequence[Tensor]) -> FlatFunction:
    """Trace a function as `trace` does, and compile it with PyTorch's compiler.

    That takes seconds to minutes. The compiler fuses everything but matrix products.
    """
    import torch._inductor  # the import takes a second

    module = record(fn, args)
    # The compiler counts in 32 bits, which is too few for the constants of random draws.
    _apply_rewrites(module, [_FoldConstants(module, least=2**31)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice such as to use TF32 is not for the user
        run: FlatFunction = torch._inductor.compile(module, list(args))
    return run


def _apply_rewrites(module: fx.GraphModule, rewrites: Sequence[Rewrite]) -> None:
    for rewrite in rewrites:
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                rewrite(module.graph, node)
        module.graph.eliminate_dead_code()
    module.recompile()


def _shape_and_dtype(node: object) -> ShapeAndDtype | None:
    """Return what a node computes; None for a number or for several tensors at once."""
    form: Form | None = node.meta.get("form") if isinstance(node, fx.Node) else None
    if form is None:
        return None
    return form.shape, form.dtype


def _drop_means_of_one(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a mean over dimensions with one entry, such as a client's only sample, by a view."""
    if node.target is not aten.mean.dim or node.kwargs:
        return
    source: Any = node.args[0]
    dims: Any = node.args[1]
    expected = _shape_and_dtype(node)
    given = _shape_and_dtype(source)
    if expected is None or given is None or given[1] != expected[1]:
        return
    if dims and all(given[0][dim] == 1 for dim in dims):
        node.target = aten.view.default
        node.args = (source, list(expected[0]))


def _drop_identities(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a node that returns one of its arguments unchanged by that argument."""
    source = _unchanged_argument(node)
    if source is not None:
        node.replace_all_uses_with(source)


def _unchanged_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node returns unchanged.

    Such nodes are views of the shape that a tensor has already, products with 1, powers of 1, sums
    with 0, and transposes of transposes.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is MUL:
        return _factor_of_one(node)
    if node.target in TRANSPOSES and source.target is node.target:
        if source.args[1:] != node.args[1:]:
            return None
        return source.args[0]  # type: ignore[return-value]
    if node.target is ADD:
        return _term_beside_zero(node)
    if not _same_shape(source, node):
        return None
    if node.target in VIEWS:
        return source
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1:
        return source
    return None


def _factor_of_one(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a product multiplies by ones, if the product has its shape."""
    for ones, other in (node.args, reversed(node.args)):
        is_one = isinstance(ones, fx.Node) and ones.meta.get("ones")
        if is_one and isinstance(other, fx.Node) and _same_shape(other, node):
            return other
    return None


def _term_beside_zero(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a sum adds zeros to, if the sum has its shape."""
    a, b = node.args
    for zero, other in ((a, b), (b, a)):
        if _is_zero(zero) and isinstance(other, fx.Node) and _same_shape(other, node):
            return other
    return None


def _same_shape(source: fx.Node, node: fx.Node) -> bool:
    """Tell whether both nodes compute one tensor, of the same shape and dtype."""
    shape_and_dtype = _shape_and_dtype(source)
    return shape_and_dtype is not None and shape_and_dtype == _shape_and_dtype(node)


def _is_zero(node: object) -> bool:
    zeros = (aten.zeros_like.default, aten.zeros.default)
    return isinstance(node, fx.Node) and node.target in zeros


def _inline_scalars(graph: fx.Graph, node: fx.Node) -> None:
    """Use a number directly where `vmap` has turned it into a tensor first."""
    if node.target not in (MUL, ADD, SUB, DIV) or len(node.args) != 2:
        return
    other = node.args[1]
    if not isinstance(other, fx.Node) or other.target is not aten._to_copy.default:
        return
    if isinstance(other.args[0], float):
        node.update_arg(1, other.args[0])


class _FuseScaledSums:
    """Computes a + s b in one operation; s is a number or a 0-d tensor such as a step size."""

    def __init__(self) -> None:
        self.numbers: dict[fx.Node, fx.Node] = {}  # by the 0-d tensor that they are read from

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        if node.target not in (ADD, SUB) or node.kwargs:
            return
        a, product = node.args
        if not isinstance(product, fx.Node) or product.target is not MUL or len(product.users) > 1:
            return
        b, scale = product.args
        expected = _shape_and_dtype(a)
        if expected is None or not expected == _shape_and_dtype(product) == _shape_and_dtype(b):
            return
        if isinstance(scale, (int, float)):
            node.args = (a, b)
            node.kwargs = {"alpha": scale}
        elif isinstance(scale, fx.Node) and _shape_and_dtype(scale) == (torch.Size(), expected[1]):
            self._scale_by_tensor(graph, node, (a, b, scale))

    def _scale_by_tensor(
        self, graph: fx.Graph, node: fx.Node, operands: tuple[Any, Any, fx.Node]
    ) -> None:
        a, b, scale = operands
        if (
            scale.meta["form"].device.type == "cuda"
        ):  # reading a number from a GPU would wait for it
            node.kwargs = {"value": 1 if node.target is ADD else -1}
            node.target = aten.addcmul.default
            node.args = operands
            return
        if scale not in self.numbers:
            with graph.inserting_after(scale):
                number = graph.call_function(aten._local_scalar_dense.default, (scale,))
            self.numbers[scale] = number
        node.args = (a, b)
        node.kwargs = {"alpha": self.numbers[scale]}


def _fuse_products(graph: fx.Graph, node: fx.Node) -> None:
    """Add a matrix product to something in one operation.

    A1 B1 + A2 B2, such as the two gradients of a weight, is accumulated in the first product.
    A + A1 B1, such as a layer with a bias, is one `baddbmm`.
    """
    if node.target is not ADD or node.kwargs:
        return
    a, b = node.args
    if not _is_unshared_product(b):
        a, b = b, a
    if not isinstance(b, fx.Node) or not _is_unshared_product(b) or a is b:
        return
    shape_of_a = _shape_and_dtype(a)
    shape_of_b = _shape_and_dtype(b)
    if shape_of_b is None or shape_of_b != _shape_and_dtype(node):
        return
    if _is_unshared_product(a) and shape_of_a == shape_of_b:
        fused = aten.baddbmm_.default
    elif shape_of_a is not None and shape_of_a[1] == shape_of_b[1]:
        fused = aten.baddbmm.default
    else:
        return
    _replace_node(graph, node, fused, (a, *b.args))


def _is_unshared_product(node: object) -> bool:
    """Tell whether a node is a matrix product that only one other node uses."""
    return isinstance(node, fx.Node) and node.target is aten.bmm.default and len(node.users) == 1


def _add_in_place(graph: fx.Graph, node: fx.Node) -> None:
    """Write a sum over an operand that nothing uses later: allocating costs more than adding."""
    if node.target not in (ADD, SUB) or _shape_and_dtype(node) is None:
        return
    a, b = node.args
    if _can_overwrite(a, node):
        target = aten.add_.Tensor if node.target is ADD else aten.sub_.Tensor
        _replace_node(graph, node, target, (a, b))
    elif node.target is ADD and not node.kwargs and _can_overwrite(b, node):
        _replace_node(graph, node, aten.add_.Tensor, (b, a))


def _can_overwrite(operand: object, node: fx.Node) -> bool:
    """Tell whether a node may write its result over an operand.

    It may if the operand has the result's shape and memory that nothing else shares, and if every
    other use of it comes before.
    """
    if not isinstance(operand, fx.Node) or operand.op != "call_function":
        return False
    if _shape_and_dtype(operand) != _shape_and_dtype(node) or not _owns_memory(operand):
        return False
    others = [user for user in operand.users if user != node]
    return all(_owns_memory(user) and user < node for user in others)


def _owns_memory(node: fx.Node) -> bool:
    """Tell whether the result of a node shares no memory with its arguments."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if node.target is aten._unsafe_view.default:  # it shares memory, and its schema hides that
        return False
    return all(value.alias_info is None for value in schema.returns)


def _replace_node(
    graph: fx.Graph, node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Replace a node by another operation with the same keyword arguments."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args, dict(node.kwargs))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)


def _call_functions(graph: fx.Graph, node: fx.Node) -> None:
    """Call a function of `torch` or a method of tensors instead of an entry of `torch.ops`."""
    name = getattr(node.target, "_opname", "")
    if name.rstrip("_") in FUNCTIONS.split():
        node.target = getattr(torch, name, None) or getattr(Tensor, name)


class _MergeDuplicates:
    """Computes once what is computed twice."""

    def __init__(self) -> None:
        self.seen: dict[object, fx.Node] = {}

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return
        key = _hashable((node.target, node.args, dict(node.kwargs)))
        first = self.seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def _hashable(value: object) -> object:
    """Return a key that is equal for equal values of equal types: 1 and 1.0 differ."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, (fx.Node, bool, int, float)):
        return type(value), value
    return type(value), repr(value)


class _FoldConstants:
    """Computes once, while tracing, what depends on shapes alone.

    An example is the gradient of a loss with respect to itself, and what follows from it. What only
    led to such a shape is then not computed at all: a loss whose gradient alone is used.

    Args:
        module: Holds the constants.
        least: Constants whose entries are all smaller are left as they are.
    """

    def __init__(self, module: fx.GraphModule, least: int = 0) -> None:
        self.module = module
        self.least = least
        self.known: dict[fx.Node, Tensor] = {}

    def __call__(self, graph: fx.Graph, node: fx.Node) -> None:
        value = self._value(node)
        if value is None:
            return
        self.known[node] = value
        if self.least and not (value.double().abs() >= self.least).any():
            return
        name = f"constant_{len(self.known)}"
        setattr(self.module, name, value)
        with graph.inserting_before(node):
            # `graph.get_attr` wants buffers, which are slow to look up.
            constant = graph.create_node("get_attr", name)
            # Results are copies: a caller that changes one must not change the constant.
            copy = graph.call_function(aten.clone.default, (constant,))
        constant.meta.update(node.meta)
        if value.is_cpu:  # reading it would wait for a GPU
            constant.meta["ones"] = bool((value == 1).all())
        self.known[constant] = value
        node.replace_all_uses_with(constant, delete_user_cb=lambda user: user.op != "output")
        node.replace_all_uses_with(copy)

    def _value(self, node: fx.Node) -> Tensor | None:
        """Return what a node computes if that is a constant of moderate size."""
        form: Form | None = node.meta.get("form")
        if form is None or form.shape.numel() > MAX_CONSTANT_SIZE:
            return None
        if node.target in FILL_VALUES:
            fill = FILL_VALUES[node.target]
            return torch.full(form.shape, fill, dtype=form.dtype, device=form.device)
        inputs = node.all_input_nodes
        from_constants = bool(inputs) and all(source in self.known for source in inputs)
        from_numbers = getattr(node.target, "overloadpacket", None) in CONSTANT_SOURCES
        if not from_constants and not from_numbers:
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]
