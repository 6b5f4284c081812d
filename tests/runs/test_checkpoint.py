"""The checkpoint file: values come back unchanged, writes are atomic, damage is noticed."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.runs import checkpoint
from tests.support.values import identical

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    tensor = numbers.to(draw(st.sampled_from(DTYPES)))
    if tensor.is_floating_point() and tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[0] = draw(st.sampled_from([math.nan, math.inf, -0.0]))
    if tensor.ndim == 2:
        return tensor.T.T
    return tensor


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
        st.dictionaries(st.text(max_size=5), tensors(), max_size=3).map(fb.Tree),
    )


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
nested = st.recursive(scalars | tensors(), containers, max_leaves=8)


@settings(deadline=None, derandomize=True)
@given(value=nested)
def test_a_saved_value_is_loaded_unchanged(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.safetensors"
    checkpoint.save(path, value)
    assert identical(checkpoint.load(path), value)


def test_tensors_that_share_memory_or_have_strides_are_loaded_unchanged(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    value = {
        "matrix": matrix,
        "row": matrix[1],
        "transposed": matrix.T,
        "again": [matrix, matrix.requires_grad_()],
    }
    checkpoint.save(tmp_path / "a", value)
    loaded = checkpoint.load(tmp_path / "a")
    assert torch.equal(loaded["transposed"], matrix.T)
    assert torch.equal(loaded["row"], matrix[1])


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("value", [{1, 2}, object(), Pair(1, 2), {"a": b"bytes"}])
def test_a_value_that_would_be_loaded_as_another_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint cannot hold"):
        checkpoint.save(tmp_path / "a", value)
    assert not list(tmp_path.iterdir())


def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"round": 1})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, {"round": 2})
    assert checkpoint.load(path) == {"round": 1}
    # A process that is killed while it writes leaves an incomplete file.
    (tmp_path / "a.safetensors.new").write_bytes(b"half")
    checkpoint.save(path, {"round": 3})
    assert checkpoint.load(path) == {"round": 3}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """A change is refused in one line, or does not matter: in the header a tab may be a space."""
    value = {"x": fb.Tree(w=torch.arange(6.0).reshape(2, 3)), "n": 3, "s": "text"}
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, value)
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 + position % 255
        path.write_bytes(changed)
        message = ""
        loaded = None
        try:
            loaded = checkpoint.load(path)
        except ValueError as error:
            message = str(error)
        refused = str(path) in message and "\n" not in message
        assert refused or identical(loaded, value)


def test_loaded_tensors_are_aligned_as_pytorch_aligns_its_own(tmp_path: Path) -> None:
    """Kernels round differently where they are not, and a resumed run would be another one."""
    tensors = [torch.randn(size) for size in (1, 3, 17, 1000)]
    checkpoint.save(tmp_path / "a.safetensors", tensors)
    loaded = checkpoint.load(tmp_path / "a.safetensors")
    assert identical(loaded, tensors)
    assert {tensor.data_ptr() % 64 for tensor in loaded} == {0}
