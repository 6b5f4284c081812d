"""An append-only file of client memories, in which every record has a digest."""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedbilevel.core.codec import pack, unpack
from fedbilevel.execution.client_memory import Memory


class RecordFile:
    """An append-only file of client memories. The last record of a client is the valid one.

    A record has a header, the structure of the memory as JSON, and the bytes of its tensors. The
    digest in the header is checked when a file is opened and whenever a record is read. A record
    without a body says that the client remembers nothing.

    Args:
        path: The file; None for a temporary one.
        length: How many bytes of an existing file to read; 0 creates a new file.

    Attributes:
        positions: Where each client's valid record begins, and its length.
        end: Bytes of the file.
        live_bytes: Bytes of the valid records.

    Raises:
        ValueError: An existing file is damaged.
    """

    HEADER = struct.Struct("<qqq16s")  # client, length of the JSON, length of the tensors, digest

    def __init__(self, path: Path | None = None, length: int = 0) -> None:
        self.path = path
        self.positions: dict[int, tuple[int, int]] = {}
        self.end = 0
        self.live_bytes = 0
        self._length = length
        while self.end < length:
            self.handle.seek(self.end)
            header = self.handle.read(self.HEADER.size)
            client, json_length, tensor_length, _ = self._unpack_header(header)
            size = self.HEADER.size + json_length + tensor_length
            if min(json_length, tensor_length) < 0 or self.end + size > length:
                raise self._damaged()
            self._read_checked(self.end, size)  # a damaged header could name another client
            self._index(client, size)

    @functools.cached_property
    def handle(self) -> IO[bytes]:
        """The open file."""
        handle: IO[bytes]
        if self.path is None:
            handle = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the finalizer)
        elif self._length:
            handle = self.path.open("rb")
        else:
            handle = self.path.open("x+b")
        weakref.finalize(self, handle.close)
        return handle

    def append(self, client: int, record: bytes) -> None:
        """Append a record, which becomes the valid one of its client."""
        with self._add_path_to_errors():
            self.handle.seek(self.end)
            self.handle.write(record)
        self._index(client, len(record))

    def sync(self) -> None:
        """Write everything to the disk, as is done with the checkpoint that names the file."""
        with self._add_path_to_errors():
            self.handle.flush()
            os.fsync(self.handle.fileno())

    @contextmanager
    def _add_path_to_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = self.path or "a temporary file for memories of clients"
            raise OSError(f"{name} cannot be written: {error.strerror or error}") from error

    def _index(self, client: int, size: int) -> None:
        """Note that a record of this size lies at the end."""
        _, old_size = self.positions.pop(client, (0, 0))
        self.live_bytes -= old_size
        if size > self.HEADER.size:
            self.positions[client] = (self.end, size)
            self.live_bytes += size
        self.end += size

    def read_record(self, client: int) -> bytes:
        """Return the valid record of a client, after checking its digest."""
        return self._read_checked(*self.positions[client])

    def _read_checked(self, begin: int, size: int) -> bytes:
        self.handle.seek(begin)
        record = self.handle.read(size)
        *header, digest = self._unpack_header(record)
        if digest != _digest(header, record[self.HEADER.size :]):
            raise self._damaged()
        return record

    def read(self, client: int) -> Memory:
        """Return the memory of a client, on the CPU."""
        record = self.read_record(client)
        _, json_length, *_ = self._unpack_header(record)
        position = self.HEADER.size + json_length
        structure, dtypes_and_shapes = _parse(record[self.HEADER.size : position])
        tensors: dict[str, Tensor] = {}
        for name, (dtype_name, shape) in dtypes_and_shapes.items():
            dtype = getattr(torch, dtype_name)
            count = math.prod(shape)
            size = count * dtype.itemsize
            # `frombuffer` refuses an empty buffer, so an empty tensor is cut from 8 bytes.
            # The copy lies where PyTorch aligns tensors, as that of `checkpoint.load`.
            buffer = bytearray(record[position : position + size] or b"\0" * 8)
            tensors[name] = torch.frombuffer(buffer, dtype=dtype)[:count].reshape(shape).clone()
            position += size
        return unpack(structure, tensors)  # type: ignore[no-any-return]

    def _unpack_header(self, record: bytes) -> tuple[Any, ...]:
        if len(record) < self.HEADER.size:
            raise self._damaged()
        return self.HEADER.unpack(record[: self.HEADER.size])

    def _damaged(self) -> ValueError:
        name = self.path or "the temporary file of client memories"
        return ValueError(f"{name} is damaged: its contents do not match their digests")


@functools.lru_cache(maxsize=64)
def _parse(structure: bytes) -> Any:
    """Parse the structure of a memory, which most clients have in common; nobody may change it."""
    return json.loads(structure)


def encode_record(client: int, memory: Memory) -> bytes:
    """Encode a client's memory as a record of a `RecordFile`."""
    structure = b""
    data = b""
    if memory:
        tensors: dict[str, Tensor] = {}
        packed = pack(memory, tensors)
        dtypes_and_shapes = {
            name: (str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in tensors.items()
        }
        structure = json.dumps([packed, dtypes_and_shapes]).encode()
        arrays = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
        data = b"".join(array.tobytes() for array in arrays)
    header = [client, len(structure), len(data)]
    body = structure + data
    return RecordFile.HEADER.pack(*header, _digest(header, body)) + body


def _digest(header: Sequence[int], body: bytes) -> bytes:
    digest = blake2b(repr(header).encode(), digest_size=16)
    digest.update(body)
    return digest.digest()
