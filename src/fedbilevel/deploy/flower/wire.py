"""What crosses the wire: the messages between server and clients, and their encoding.

A message is a dict of named values. `encode` turns it into the two records that Flower carries:

- `tensors`: one flat array per dtype, in which all tensors of this dtype follow each other, as raw
  little-endian bytes. Flower transfers every array in separate requests, and one array per tensor
  would be many times slower.
- `header`: JSON with the version of this format, the dtype and shape of every tensor, and the
  values, in which each tensor is replaced by its index (see `fedbilevel.core.codec`).

`bundle` puts both into one record, for short messages to and from warm nodes: Flower transfers a
message as a tree of objects with a request for each, 6 of them without a bundle and 3 with one, and
such a message takes as long as its requests.

The header of a message to a client also has a fresh random `token`, and that of the reply a
`proof`: a digest of the reply, keyed with the token. A reply to another message is refused,
whatever task number it repeats (`stamp`, `seal`, and `decode` with a token).

There is no pickle, and nothing that arrives is executed. `decode` reads a message of either form,
and refuses with a `WireError` what `encode` could not have produced, and what is larger than its
reader expects (`Limits`), before anything is computed from it.

These are all messages, by Flower's message type:

| type | server to client | client to server |
| --- | --- | --- |
| `query`, a greeting | `job`, `table` | `client`, `samples` |
| `query`, a farewell | `job`, `table`, `ended`, `x`, `y` | |
| `train`, a client task | `job`, `table`, `phase`, `number`, `steps`, `key`, `round`, \
`iteration`, `kept`, `shared`, `kinds`, `each` | `number`, `values`, `cost` |
| `evaluate`, the losses | `job`, `table`, `x`, `y`, `share` | `client`, `upper`, `lower` |
| `evaluate`, metrics of the client's own model | `job`, `table`, `x`, `y` | `client`, `metrics` |

| name | meaning |
| --- | --- |
| `job` | name of the run, hexadecimal; the client stores its memory under it |
| `table` | the experiment, as nested tables |
| `ended` | how the study has ended, "completed" or "diverged" |
| `client`, `samples` | index of the client; the sizes of its training and validation data |
| `phase` | registered name and fields of the phase; never code |
| `number`, `key` | number of the client task, which its reply repeats; root of its random draws |
| `steps`, `round`, `iteration` | number of local steps; when the task was sent |
| `kept` | units of the submodel, or None for the whole model |
| `shared`, `each` | the values sent to every client of the cohort, and to this client alone |
| `kinds` | whether a shared value that went through stages is shaped like x or like y |
| `values`, `cost` | the reply; samples, gradients, FLOPs and peak bytes of the task |
| `x`, `y` | where to evaluate, or the final variables; without what clients own |
| `share` | the most samples per level |
| `upper`, `lower` | the two losses of the client |
| `metrics` | numbers by name; none if the task measures nothing on this client's data |
"""

from __future__ import annotations

import hmac
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.codec import pack, unpack

VERSION = 5
JSON, TOKEN, PROOF = "json", "token", "proof"  # the entries of a header
BUNDLE = "bundle"  # name of the record of a message that is one record
MAX_BUNDLE_BYTES = 2**20  # Flower stores equal arrays to several nodes once, but not equal bundles
MAX_HEADER_CHARS = 2**20
MAX_DIMENSIONS = 32  # of a tensor
MAX_SIZE = 2**63 - 1  # of a dimension, and of all of them multiplied: PyTorch's sizes
MAX_LINE_CHARS = 300
RAW = "raw"  # how arrays are serialized; Flower only passes it on
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Values = dict[str, Any]  # a decoded message: numbers, strings, trees, tensors and nests of them


class WireError(ValueError):
    """A message that this side refuses; the text is one line that says why."""


class Limits(NamedTuple):
    """How large a message may be for its reader.

    Args:
        header_chars: Characters of the header.
        tensor_bytes: Bytes of all tensors together.

    Examples:
        >>> Limits(tensor_bytes=400)
        Limits(header_chars=1048576, tensor_bytes=400)
    """

    header_chars: int = MAX_HEADER_CHARS
    tensor_bytes: int = MAX_SIZE


ANY_SIZE = Limits()
SHORT = Limits(header_chars=2**14, tensor_bytes=2**14)


def one_line(error: object) -> str:
    """Format an error for a log: one line, of limited length.

    The text of an error may quote what another machine has sent.

    Args:
        error: An exception, or anything else with a `str`.

    Returns:
        The text without line breaks and control characters, at most 300 characters.

    Examples:
        >>> one_line(ValueError("x is 3;   it must be positive"))
        'x is 3; it must be positive'
    """
    return checks.one_line(str(error))[:MAX_LINE_CHARS]


def encode(**values: object) -> RecordDict:
    """Encode a message.

    Args:
        **values: Numbers, strings, booleans, None, tensors, trees, and dicts, lists and tuples of
            them.

    Returns:
        The records for the content of a Flower `Message`.

    Raises:
        TypeError: A value is of another type, or a tensor of a dtype that is not in `DTYPES`.
        ValueError: The header is longer than a receiver accepts, or a tensor has more dimensions.

    Examples:
        >>> import torch
        >>> import fedbilevel as fb
        >>> content = encode(number=7, values={"qx": fb.Tree(w=torch.ones(2))})
        >>> sorted(content)
        ['header', 'tensors']
        >>> list(content["tensors"])
        ['float32']
    """
    tensors: dict[str, Tensor] = {}
    packed = pack(values, tensors)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    specs = []
    for tensor in tensors.values():
        if tensor.dtype not in DTYPE_NAMES:
            allowed = ", ".join(DTYPES)
            raise TypeError(f"a message holds a {tensor.dtype} tensor; it must be one of {allowed}")
        if tensor.ndim > MAX_DIMENSIONS:
            raise ValueError(
                f"a message holds a tensor of {tensor.ndim} dimensions; "
                f"at most {MAX_DIMENSIONS} are allowed"
            )
        dtype = DTYPE_NAMES[tensor.dtype]
        parts[dtype].append(tensor.reshape(-1))
        specs.append([dtype, list(tensor.shape)])
    fields = {"version": VERSION, "tensors": specs, "values": packed}
    header = json.dumps(fields, separators=(",", ":"))
    if len(header) > MAX_HEADER_CHARS:
        raise ValueError(
            f"the header of a message has {len(header)} characters; "
            f"at most {MAX_HEADER_CHARS} are allowed"
        )
    arrays = {dtype: _to_array(dtype, torch.cat(flat)) for dtype, flat in parts.items()}
    return RecordDict({"tensors": ArrayRecord(arrays), "header": ConfigRecord({"json": header})})


def bundle(content: RecordDict) -> RecordDict:
    """Put the records of an encoded message into one.

    Args:
        content: The content of a Flower `Message`.

    Returns:
        Content with one record; the given content if `encode` has not produced it, or if it is
        larger than `MAX_BUNDLE_BYTES`.

    Examples:
        >>> content = encode(number=7)
        >>> list(bundle(content))
        ['bundle']
        >>> decode(bundle(content))
        {'number': 7}
    """
    if set(content) != {"tensors", "header"}:
        return content
    parts = ConfigRecord(dict(content.config_records["header"]))
    nbytes = 0
    for dtype, array in content.array_records["tensors"].items():
        parts[dtype] = array.data
        nbytes += len(array.data)
    if nbytes > MAX_BUNDLE_BYTES:
        return content
    return RecordDict({BUNDLE: parts})


def is_bundle(content: RecordDict) -> bool:
    """Tell whether the content of a message is one record, as `bundle` returns it.

    Args:
        content: The content of a Flower `Message`.

    Returns:
        Whether it has the form; what is in the record is not validated.

    Examples:
        >>> is_bundle(bundle(encode(number=7))), is_bundle(encode(number=7))
        (True, False)
    """
    return set(content) == {BUNDLE}


def stamp(content: RecordDict, token: str) -> RecordDict:
    """Add a token to an encoded message.

    Args:
        content: What `encode` returned; it is not changed, and may be stamped for others, too.
        token: A text that nobody else knows.

    Returns:
        The message with the token in its header.

    Examples:
        >>> token_of(stamp(encode(number=7), "1a2b"))
        '1a2b'
    """
    header = ConfigRecord({**content.config_records["header"], TOKEN: token})
    return RecordDict({**content, "header": header})


def token_of(content: RecordDict) -> str:
    """Read the token of a message.

    Args:
        content: The content of a Flower `Message`, with or without `bundle`.

    Returns:
        The token; empty if there is none.

    Examples:
        >>> token_of(encode(number=7))
        ''
    """
    for name in (BUNDLE, "header"):
        if name in content.config_records:
            token = content.config_records[name].get(TOKEN)
            if isinstance(token, str):
                return token
    return ""


def seal(content: RecordDict, token: str) -> RecordDict:
    """Add the proof that a reply answers the message with this token.

    Args:
        content: The encoded reply; it must not be changed any more, but may be bundled.
        token: The token of the message.

    Returns:
        The reply with the proof in its header.

    Examples:
        >>> reply = seal(encode(number=7), "1a2b")
        >>> decode(reply, token="1a2b")
        {'number': 7}
        >>> decode(reply, token="3c4d")
        Traceback (most recent call last):
        fedbilevel.deploy.flower.wire.WireError: the reply is not to the message that was sent
    """
    header = content.config_records["header"]
    arrays = {name: array.data for name, array in content.array_records["tensors"].items()}
    proof = _proof(header[JSON], arrays, token)
    return RecordDict({**content, "header": ConfigRecord({**header, PROOF: proof})})


def _proof(header: object, arrays: dict[str, bytes], token: str) -> str:
    """Return a digest of a message, keyed with a token."""
    digest = blake2b(key=token.encode()[:64], digest_size=16)
    for name, part in [(JSON, str(header).encode()), *sorted(arrays.items())]:
        digest.update(f"{name} {len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()


def decode(content: RecordDict, limits: Limits = ANY_SIZE, token: str | None = None) -> Values:
    """Decode and validate a message; the inverse of `encode`, with or without `bundle`.

    Args:
        content: The content of a Flower `Message`; it is from another machine and not trusted.
        limits: How large the message may be.
        token: The token of the message that this one must answer. None: it answers none.

    Returns:
        The values by name, bit for bit as `encode` was given them. All tensors are on the CPU.

    Raises:
        WireError: The message is not one that `encode` could have produced, it is too large, or it
            answers another message.

    Examples:
        >>> import torch
        >>> decode(encode(number=7, point=(1.5, torch.arange(3))))
        {'number': 7, 'point': (1.5, tensor([0, 1, 2]))}
    """
    try:
        return _decode(content, limits, token)
    except WireError:
        raise
    except Exception as error:  # whatever else a malformed message leads to
        raise WireError(f"the message cannot be read ({type(error).__name__})") from error


def _decode(content: RecordDict, limits: Limits, token: str | None) -> Values:
    if is_bundle(content):
        content = _unbundle(content)
    if set(content) != {"tensors", "header"}:
        raise WireError("the message has other records than 'tensors' and 'header'")
    header = _read_header(content["header"]["json"], limits.header_chars)
    arrays: dict[str, bytes] = {}
    nbytes = 0
    for dtype, array in content["tensors"].items():
        if dtype not in DTYPES:
            raise WireError(f"the message holds an array of dtype {str(dtype)[:20]!r}")
        if not isinstance(array, Array):
            raise WireError("the record 'tensors' holds something else than arrays")
        nbytes += len(array.data)
        if nbytes > limits.tensor_bytes:
            raise WireError(f"the message holds more than {limits.tensor_bytes} bytes of tensors")
        arrays[dtype] = array.data
    if token is not None:
        proof = _proof(content["header"][JSON], arrays, token)
        if not hmac.compare_digest(proof, str(content["header"].get(PROOF, ""))):
            raise WireError("the reply is not to the message that was sent")
    flat = {dtype: _to_tensor(dtype, data) for dtype, data in arrays.items()}
    values = unpack(header["values"], _split(flat, header["tensors"]))
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise WireError("the header holds no named values")
    return values


def _unbundle(content: RecordDict) -> RecordDict:
    """Return the two records of a bundle."""
    arrays = {}
    header = ConfigRecord()
    for name, part in content.config_records[BUNDLE].items():
        if name in (JSON, TOKEN, PROOF):
            header[name] = part
        elif isinstance(part, bytes):
            arrays[name] = Array(name, (), RAW, part)
        else:
            raise WireError(f"the tensors of {one_line(name)} are not bytes")
    return RecordDict({"tensors": ArrayRecord(arrays), "header": header})


def _read_header(text: object, max_chars: int) -> Values:
    if not isinstance(text, str) or len(text) > max_chars:
        raise WireError(f"the header is not a string of at most {max_chars} characters")
    header: Values = json.loads(text)
    if header["version"] != VERSION:
        version = f"{header['version']!r:.20}"
        raise WireError(f"the message has version {version}; this side reads version {VERSION}")
    return header


def _split(arrays: dict[str, Tensor], specs: Iterable[tuple[str, list[int]]]) -> dict[str, Tensor]:
    """Cut the flat arrays into the tensors that the header declares, with nothing left over.

    The tensors are views: a header cannot make its reader allocate more than the message holds.
    """
    offsets = dict.fromkeys(arrays, 0)
    tensors = {}
    for index, (dtype, shape) in enumerate(specs):
        _check_shape(shape)
        start = offsets[dtype]
        end = start + math.prod(shape)
        if end > len(arrays[dtype]):
            raise WireError(f"the header declares more {dtype} values than the payload holds")
        tensors[str(index)] = arrays[dtype][start:end].reshape(shape)
        offsets[dtype] = end
    for dtype, array in arrays.items():
        if offsets[dtype] != len(array):
            raise WireError(f"the payload holds {dtype} values that the header does not declare")
    return tensors


def _check_shape(shape: object) -> None:
    """Refuse what is no shape, before its sizes are multiplied."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise WireError(f"the header declares a shape that has not 0 to {MAX_DIMENSIONS} sizes")
    if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
        raise WireError("the header declares a shape that is not a list of sizes")
    if math.prod(max(size, 1) for size in shape) > MAX_SIZE:  # also if one of the sizes is 0
        raise WireError("the header declares a shape that is too large")


def _to_array(dtype: str, flat: Tensor) -> Array:
    data = flat.view(torch.uint8).numpy().tobytes()
    return Array(dtype, tuple(flat.shape), RAW, data)


def _to_tensor(dtype: str, data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=DTYPES[dtype])
    if len(data) % DTYPES[dtype].itemsize != 0:
        raise WireError(f"the payload is not a whole number of {dtype} values")
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == "bool" and values.max() > 1:
        raise WireError("the payload holds bool values that are neither 0 nor 1")
    return values.view(DTYPES[dtype])
