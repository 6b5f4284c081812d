"""Packing: a stack of replies as rows of bytes, and back."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

import fedbilevel as fb
from fedbilevel.transports._packing import pack


@pytest.mark.parametrize("clients", [1, 3])
def test_packed_replies_are_unpacked_unchanged_whatever_their_dtypes_strides_and_sizes(
    clients: int,
) -> None:
    numbers = torch.arange(60.0).view(6, 10)
    stack = {
        "flag": torch.tensor([True, False, True])[:clients],
        "tree": fb.Tree(
            a=numbers.T[:clients, 1:4],
            b=numbers.long()[:clients, :0],
            c=numbers.double()[:clients, 5],
        ),
        "strided": numbers[::2, 3:4][:clients].T.T,
    }
    rows, layout = pack(stack)
    assert rows.shape == (clients, 1 + 3 * 4 + 8 + 4)
    torch.testing.assert_close(layout.unpack(rows), stack, rtol=0, atol=0)
    for j in range(clients):
        one = tree_map(lambda t, j=j: t[j : j + 1], stack)
        torch.testing.assert_close(layout.unpack(rows[j : j + 1]), one, rtol=0, atol=0)
