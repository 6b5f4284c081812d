"""Record the operations of a function of tensors, as a graph.

PyTorch's `make_fx` does the same, but imports PyTorch's compiler, which takes longer than the first
rounds of a run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

ALIASES = (aten.detach.default, aten.alias.default)  # the same tensor, without a graph of autograd
FRESH = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of a tensor made from numbers
DEPENDS_ON_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Form(NamedTuple):
    """What is known of a node's result without its values; `node.meta["form"]`."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def record(fn: Callable[..., Sequence[Tensor]], args: Sequence[Tensor]) -> fx.GraphModule:
    """Run a function once, and return its operations in functional form: nothing is overwritten.

    Args:
        fn: The function. An argument that it overwrites is overwritten by the graph, not now.
        args: Its arguments; other arguments must have the same shapes, strides and dtypes.

    Raises:
        ValueError: The function branches on a value of its arguments.
    """
    recorder = _Recorder()
    for j, tensor in enumerate(args):
        recorder.track(tensor, recorder.graph.placeholder(f"arg{j}"))
    functional = functionalize(fn, remove="mutations")
    with recorder:
        results = functional(*args)
    recorder.graph.output([recorder.node_of(result) for result in results])
    recorder.graph.eliminate_dead_code()
    module = fx.GraphModule(recorder.constants, recorder.graph)
    for name, value in list(module.named_buffers()):
        delattr(module, name)
        setattr(module, name, value)  # a plain attribute is looked up faster than a buffer
    return module


class _Recorder(TorchDispatchMode):
    """Runs operations, and adds a node for each to a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self._nodes = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from importing its compiler, which takes a second, for this class."""
        return False

    def track(self, tensor: Tensor, node: fx.Node) -> None:
        """Note that a node computes a tensor."""
        node.meta["form"] = Form(tensor.shape, tensor.dtype, tensor.device)
        self._nodes[tensor] = node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that computes a tensor; a tensor from outside becomes a constant."""
        if tensor not in self._nodes:
            name = f"outside_{len(self.constants)}"
            self.constants[name] = tensor
            # `graph.get_attr` would look for a module that has the attribute already.
            self.track(tensor, self.graph.create_node("get_attr", name))
        node: fx.Node = self._nodes[tensor]
        return node

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in ALIASES:
            result = func(*args)
            self._nodes[result] = self.node_of(args[0])
            return result
        if any(tag in DEPENDS_ON_VALUES for tag in func.tags):
            return self._read(func, args, kwargs)
        if func is aten.copy_.default:  # `functionalize` ends so if an argument is overwritten
            result = args[0]
        else:
            result = func(*args, **kwargs)
        outputs = pytree.tree_leaves(result)
        if not any(isinstance(output, Tensor) for output in outputs):
            return result  # a property such as a size
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        node = self.graph.call_function(func, node_args, node_kwargs)
        if isinstance(result, Tensor):
            self.track(result, node)
            return result
        for j, output in enumerate(result):
            if isinstance(output, Tensor):
                item = self.graph.call_function(operator.getitem, (node, j))
                self.track(output, item)
        return result

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run an operation whose result depends on values, if they are those of constants."""
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and not self._is_constant(tensor):
                raise ValueError(f"{func} reads a value, so that what follows depends on it")
        return func(*args, **kwargs)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is from outside, or a copy of one."""
        node = self.node_of(tensor)
        while node.target in FRESH:
            node = node.args[0]  # type: ignore[assignment]
        return node.op == "get_attr"
