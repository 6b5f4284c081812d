"""Messages come back bit for bit, malformed ones are refused, and the overhead is small."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedbilevel.core.tree import Tree
from fedbilevel.deploy.flower.wire import Limits, WireError, bundle, decode, encode, is_bundle
from tests.support.flower import DESCEND, QUADRATIC, FakeGrid, resolve_config

HEADER = {
    "version": 5,
    "tensors": [["float32", [2]]],
    "values": {"dict": [["x", {"tensor": "0"}]]},
}
TEXT = {"json": json.dumps(HEADER)}
TWICE = [{"tensor": "0"}, {"tensor": "0"}]
TWO_FLOATS = Array("float32", (2,), "raw", bytes(8))
MANY_NINES = [9] * 20_000  # their product has 19,000 digits
DEEP_HEADER = '{"version":5,"tensors":[],"values":' + "[" * 900 + "]" * 900 + "}"


def raw(count: int, value: int = 0) -> Array:
    return Array("", (), "raw", bytes([value]) * count)


def content(header: object, **arrays: Array) -> RecordDict:
    text = header if isinstance(header, str) else json.dumps(header)
    return RecordDict({"tensors": ArrayRecord(arrays), "header": ConfigRecord({"json": text})})


@pytest.mark.parametrize("form", [lambda content: content, bundle], ids=["records", "bundle"])
def test_a_message_comes_back_bit_for_bit(form: Callable[[RecordDict], RecordDict]) -> None:
    values = {
        "x": Tree(
            w=torch.randn(3, 4, dtype=torch.float64), b=torch.tensor(2.5, dtype=torch.float64)
        ),
        "half": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 3),
        "numbers": (1, -(2**62), 0.1, True, None, "ä"),
        "nested": {"said": {3: (1, Tree(w=torch.arange(4)))}},
    }
    decoded = decode(form(encode(**values)))
    assert decoded["numbers"] == values["numbers"]
    assert torch.equal(decoded["x"]["w"], values["x"]["w"])
    assert decoded["x"]["b"].shape == ()
    assert torch.equal(decoded["half"], values["half"])
    assert decoded["empty"].shape == (0, 3)
    assert torch.equal(decoded["nested"]["said"][3][1]["w"], torch.arange(4))


def test_a_dtype_that_cannot_be_sent_is_refused_by_the_sender() -> None:
    with pytest.raises(TypeError, match=r"holds a torch\.complex64 tensor; it must be one of"):
        encode(x=torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("malformed", "reason"),
    [
        (content("{"), "cannot be read"),
        (content({**HEADER, "version": 1}, float32=TWO_FLOATS), "version 1; this side reads"),
        (content(HEADER), "cannot be read"),
        (
            content(HEADER, float32=raw(4)),
            "the header declares more float32 values than the payload holds",
        ),
        (
            content(HEADER, float32=raw(12)),
            "the payload holds float32 values that the header does not declare",
        ),
        (content(HEADER, float32=raw(9)), "not a whole number of float32 values"),
        (content(HEADER, float32=Array(np.zeros(2, "f4"))), "header does not declare"),
        (content({**HEADER, "tensors": [["bool", [1]]]}, bool=raw(1, 7)), "neither 0 nor 1"),
        (content({**HEADER, "tensors": [["float32", MANY_NINES]]}, float32=raw(8)), "0 to 32"),
        (content({**HEADER, "tensors": [["float32", [10**30]]]}, float32=raw(8)), "list of sizes"),
        (content({**HEADER, "tensors": [["float32", [2**62] * 3]]}, float32=raw(8)), "too large"),
        (content({**HEADER, "tensors": [["float32", "2"]]}, float32=raw(8)), "0 to 32"),
        (content({**HEADER, "values": {"dict": [["x", TWICE]]}}, float32=raw(8)), "ValueError"),
        (content({**HEADER, "tensors": [["float32", [-2]]]}, float32=TWO_FLOATS), "shape"),
        (
            content({**HEADER, "tensors": [["float32", [0, 2**70]]]}, float32=TWO_FLOATS),
            "not a list of sizes",
        ),
        (content(HEADER, object=TWO_FLOATS), "array of dtype 'object'"),
        (content(DEEP_HEADER), "RecursionError"),
        (content({**HEADER, "tensors": [], "values": 3}), "holds no named values"),
        (content(" " * (2**20 + 1)), "at most"),
        (
            RecordDict({"tensors": ConfigRecord({"float32": 1}), "header": ConfigRecord(TEXT)}),
            "something else than arrays",
        ),
        (RecordDict({"a": ConfigRecord({})}), "other records"),
        (RecordDict({"bundle": ConfigRecord({"float32": b""})}), "cannot be read"),
        (RecordDict({"bundle": ConfigRecord({**TEXT, "float32": 1})}), "float32 are not bytes"),
        (RecordDict({"bundle": ConfigRecord({**TEXT, "float32": b"PK"})}), "a whole number"),
        (RecordDict({"bundle": ArrayRecord({"float32": TWO_FLOATS})}), "cannot be read"),
    ],
)
def test_a_malformed_message_is_refused_in_one_line(malformed: RecordDict, reason: str) -> None:
    with pytest.raises(WireError, match=reason) as caught:
        decode(malformed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", [lambda content: content, bundle], ids=["records", "bundle"])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(tensor_bytes=19), "more than 19 bytes of tensors"),
        (Limits(header_chars=50), "at most 50 characters"),
    ],
)
def test_a_message_that_is_larger_than_its_reader_expects_is_refused(
    form: Callable[[RecordDict], RecordDict], limits: Limits, reason: str
) -> None:
    message = form(encode(x=torch.zeros(3), n=torch.zeros(1, dtype=torch.int64)))
    assert len(decode(message, Limits(header_chars=200, tensor_bytes=20))) == 2
    with pytest.raises(WireError, match=reason):
        decode(message, limits)


def test_a_tensor_with_too_many_dimensions_is_refused_by_the_sender() -> None:
    decode(encode(x=torch.zeros([1] * 32)))
    with pytest.raises(ValueError, match="33 dimensions; at most 32 are allowed"):
        encode(x=torch.zeros([1] * 33))


def test_a_message_is_little_larger_than_its_tensors() -> None:
    tree = Tree({f"layer{j}.weight": torch.randn(40, 100) for j in range(40)})
    table = resolve_config(QUADRATIC).table
    FakeGrid(1)  # without a task of Flower no message can be made
    message = Message(
        encode(job="a" * 16, table=table, phase=DESCEND, shared={"x": tree}), 1, "train"
    )
    sent = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
    assert tree.nbytes == 640_000
    assert sent < 1.05 * tree.nbytes


def test_a_bundle_is_three_objects_and_a_large_message_is_not_bundled() -> None:
    FakeGrid(1)  # without a task of Flower no message can be made
    small = encode(x=torch.zeros(10), n=torch.arange(3))
    large = encode(x=torch.zeros(2**18 + 1))
    assert is_bundle(bundle(small))
    assert bundle(large) is large
    assert len(get_all_nested_objects(Message(small, 1, "train"))) > 5
    assert len(get_all_nested_objects(Message(bundle(small), 1, "train"))) == 3
