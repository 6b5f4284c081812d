"""Kinds: what each value of a message or a reply is shaped like.

A phase declares a kind for every value that it replies with (`Phase.reply`). The executor checks a
reply against its declaration before it leaves the client, and `Replies` checks it again when it
arrives: a client can send anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.core.problem import Problem
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, unflatten

# Shaped like x, shaped like y, a single number, or a tree with a shape for each of its names.
Kind = Literal["x", "y", "scalar"] | Mapping[str, tuple[int, ...]]


class ReplyError(TypeError):
    """The replies of a phase have not the names and shapes that it declares."""


def reply_mismatch(
    values: Mapping[str, Any],
    declared: Mapping[str, Kind],
    problem: Problem,
    submodel: Submodel | None,
    *leading: int,
) -> str | None:
    """Say how a reply differs from its declaration.

    Args:
        values: The reply, or a stack of replies.
        declared: The kind of each value (`Phase.reply`).
        problem: Has the shapes and the dtype of x and y.
        submodel: The part of the model that the client holds; None is the whole model.
        *leading: The sizes of the leading axes of a stack; none for a single reply.

    Returns:
        A phrase that continues "phase ... " or "client ...: ", or None if the reply matches.
    """
    if values.keys() != declared.keys():
        return f"replied with {sorted(values)}; it declares {sorted(declared)}"
    dtype = next(iter(problem.x.values())).dtype
    for name, kind in declared.items():
        value = values[name]
        tensors = {"": value}
        if kind != "scalar" and isinstance(value, Tree):
            tensors = value
        if not _have_shapes(tensors, _kind_shapes(kind, problem, submodel), leading):
            what = repr(kind) if isinstance(kind, str) else "the tree"
            return f"replied with {name!r} of another shape than {what}, which it declares"
        if kind in ("x", "y"):
            for tensor in tensors.values():
                if tensor.dtype != dtype:
                    return f"replied with {name!r} of another dtype than {dtype}"
    return None


def _have_shapes(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], leading: tuple[int, ...]
) -> bool:
    """Whether these are tensors of these names and shapes, after the leading axes."""
    if tensors.keys() != shapes.keys():
        return False
    for name, shape in shapes.items():
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or tensor.shape != leading + tuple(shape):
            return False
    return True


def templates(
    kinds: Mapping[str, Kind], problem: Problem, submodel: Submodel | None
) -> dict[str, Tree]:
    """For each value that is a tree, a tree with its names, its shapes and the problem's dtype.

    Stages decode a payload into the shapes of its template (`Stage.decode`).
    """
    tensor = next(iter(problem.x.values()))
    trees = {}
    for name, kind in kinds.items():
        if kind != "scalar":
            shapes = _kind_shapes(kind, problem, submodel)
            trees[name] = Tree({key: tensor.new_zeros(shape) for key, shape in shapes.items()})
    return trees


def unflatten_value(vector: Tensor, kind: Kind, problem: Problem) -> Tree | Tensor:
    """A value of this kind from all its entries in one vector; a scalar is returned as it is."""
    if isinstance(kind, str):
        if kind == "scalar":
            return vector
        return unflatten(vector, _variable(kind, problem))
    return unflatten(vector, Tree({n: torch.empty(s, device="meta") for n, s in kind.items()}))


def message_kinds(message: Mapping[str, object], problem: Problem) -> dict[str, Kind]:
    """The kinds of the values of a message that have the names of x or of y; others have none."""
    kinds: dict[str, Kind] = {}
    x, y = problem.sent
    for name, value in message.items():
        if isinstance(value, Tree) and value.keys() == x.keys():
            kinds[name] = "x"
        elif isinstance(value, Tree) and value.keys() == y.keys():
            kinds[name] = "y"
    return kinds


def client_kinds(message: Mapping[str, object], problem: Problem) -> dict[str, Kind]:
    """The kinds of the values of a message that have a part which belongs to the clients."""
    if not problem.client_names:
        return {}
    kinds = message_kinds(message, problem)
    return {name: kind for name, kind in kinds.items() if kind in problem.client_levels}


def _variable(kind: str, problem: Problem) -> Tree:
    """The part of a variable that is sent."""
    x, y = problem.sent
    return x if kind == "x" else y


def _kind_shapes(
    kind: Kind, problem: Problem, submodel: Submodel | None
) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tensor of a value of this kind; a scalar is a tensor without a name."""
    if not isinstance(kind, str):
        return kind
    if kind == "scalar":
        return {"": ()}
    if submodel is None:
        return problem.sent_shapes[kind]
    return submodel.shapes(_variable(kind, problem))
