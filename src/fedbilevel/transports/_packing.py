"""Packing: replies as rows of bytes, so that a reply that waits is one small tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.federation.task import Values


class ByteLayout(NamedTuple):
    """How the values of one reply are laid out in a row of bytes.

    Attributes:
        tensors: The dtype and the shape of each tensor.
        treespec: How the tensors are nested.
    """

    tensors: tuple[tuple[torch.dtype, torch.Size], ...]
    treespec: pytree.TreeSpec

    def unpack(self, rows: Tensor) -> Values:
        """The stack of replies that `pack` turned into these rows."""
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in self.tensors]
        values = []
        for part, (dtype, shape) in zip(rows.split(sizes, 1), self.tensors, strict=True):
            values.append(_contiguous(part).view(-1).view(dtype).view(len(rows), *shape))
        return pytree.tree_unflatten(values, self.treespec)  # type: ignore[no-any-return]


def pack(stack: Values) -> tuple[Tensor, ByteLayout]:
    """A stack of replies as a matrix of bytes with one row per reply, and its layout."""
    tensors, treespec = pytree.tree_flatten(stack)
    rows = [_contiguous(t.reshape(len(t), -1)).view(torch.uint8) for t in tensors]
    layout = ByteLayout(tuple((t.dtype, t.shape[1:]) for t in tensors), treespec)
    return torch.cat(rows, 1), layout


def _contiguous(tensor: Tensor) -> Tensor:
    # `contiguous` does not copy a single row, whose address may not be aligned for another dtype.
    return tensor.clone(memory_format=torch.contiguous_format)
