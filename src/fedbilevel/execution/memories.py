"""What clients remember between their tasks, in a simulation.

What a client remembers is declared by its phase (`Phase.remembers`, federation/phase.py) and by
stages with error feedback. A real client keeps it in a local file (deploy/flower/client.py).

`Memories` maps clients to memories. The recently used ones are cached, the others are in an
append-only file, so that a run may have more clients than fit into memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.codec import pack, unpack
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, nbytes, zeros_like
from fedbilevel.federation.kinds import Kind
from fedbilevel.federation.phase import Carry, Phase
from fedbilevel.federation.task import Broadcast, Values

SLACK = 2**26  # a file is rewritten when its outdated bytes exceed its valid ones by this many

# The entries for what stages remember, and for variables that belong to the client; the space keeps
# them apart from identifiers.
STAGES = "stages "
OWN = "own "

Memory = dict[str, Any]
Snapshot = dict[int, Memory] | tuple[str, int] | None


class Memories(MutableMapping[int, Memory]):
    """What each client remembers: a dict from client to memory.

    A memory is a dict of trees and tensors. An empty one is the same as none: setting `{}` forgets
    the client.

    Files are only ever appended to. A change, a checkpoint and a rollback therefore cost what has
    changed, not what all clients hold: a checkpoint names a file and its length, and what was
    appended later is ignored when a run resumes from it. A damaged file is refused.

    Without a `folder` the file is a temporary one, and a snapshot holds all memories.

    Args:
        device: Where cached memories are.
        cache_bytes: The most bytes of memories to cache.

    Attributes:
        folder: Where files are kept; None for a temporary file.
        cached_bytes: Bytes of the memories that are cached now.

    Examples:
        >>> import torch
        >>> from fedbilevel.execution.memories import Memories
        >>> memories = Memories("cpu", cache_bytes=2**20)
        >>> memories[3] = {"visits": torch.tensor(1)}
        >>> mark = memories.mark()
        >>> memories[3] = {"visits": torch.tensor(2)}
        >>> memories.rollback(mark)
        >>> memories[3]
        {'visits': tensor(1)}
    """

    def __init__(self, device: str, cache_bytes: int) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.folder: Path | None = None
        self._latest_mark = 0
        self._reset()

    def _reset(self) -> None:
        self.cached_bytes = 0
        self._cache: dict[int, Memory] = {}  # least recently used first
        self._sizes: dict[int, int] = {}  # bytes of each cached memory
        self._unwritten: set[int] = set()  # clients whose cached memory is newer than the file's
        self._undo: dict[int, Memory] = {}  # what changed clients remembered at the latest mark
        self._file = RecordFile()
        self._old_files: list[RecordFile] = []  # copied to `_file` before the first write
        self._outdated: list[Path] = []  # needed by the last checkpoint, but not by the next
        self._kept: list[Path] = []  # needed by the last checkpoint but one
        self._unneeded: list[Path] = []  # needed by no checkpoint

    def __iter__(self) -> Iterator[int]:
        in_files = (file.positions for file in (self._file, *self._old_files))
        clients = dict.fromkeys(itertools.chain(self._cache, *in_files))
        return (client for client in clients if self._cache.get(client, True))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, client: int) -> Memory:
        if client in self._cache:
            memory = self._cache.pop(client)
            self._cache[client] = memory  # as the most recently used one
        elif file := self._file_with(client):
            memory = file.read(client)
            if self.device != "cpu":
                memory = pytree.tree_map(lambda tensor: tensor.to(self.device), memory)
            self._put_in_cache(client, memory)
        else:
            raise KeyError(client)
        if not memory:
            raise KeyError(client)
        return memory

    def __setitem__(self, client: int, memory: Memory) -> None:
        if client not in self._undo:
            self._undo[client] = self.get(client, {})
        if memory or self._file_with(client):
            self._unwritten.add(client)
            self._put_in_cache(client, memory)
        else:
            self._unwritten.discard(client)
            self._drop_from_cache(client)

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self[client] = {}

    def _put_in_cache(self, client: int, memory: Memory) -> None:
        """Make a client the most recently used one; write out others if the cache is full."""
        self._drop_from_cache(client)
        self._cache[client] = memory
        self._sizes[client] = nbytes(memory)
        self.cached_bytes += self._sizes[client]
        while self.cached_bytes > self.cache_bytes:
            oldest = next(iter(self._cache))
            self._write(oldest)
            self._drop_from_cache(oldest)

    def _drop_from_cache(self, client: int) -> None:
        self._cache.pop(client, None)
        self.cached_bytes -= self._sizes.pop(client, 0)

    def mark(self) -> int:
        """Mark the present state, for `rollback`. Earlier marks become invalid.

        Returns:
            The mark.
        """
        self._undo = {}
        self._latest_mark += 1
        return self._latest_mark

    def rollback(self, mark: int) -> None:
        """Undo all changes since a mark. The mark stays valid.

        Args:
            mark: The latest mark.

        Raises:
            RuntimeError: There is a later mark.
        """
        if mark != self._latest_mark:
            raise RuntimeError(
                f"mark is {mark}; memories can be rolled back to the latest one only, "
                f"which is {self._latest_mark}"
            )
        for client, memory in self._undo.items():
            self[client] = memory

    def snapshot(self) -> Snapshot:
        """Return the present state for a checkpoint.

        Files that the last two checkpoints need are kept.

        Returns:
            Without a folder: all memories. With a folder: the name of a file in it and the length
            up to which the file is valid, or None if no client has ever remembered anything.
        """
        if self.folder is None:
            return dict(self)
        for client in sorted(self._unwritten):
            self._write(client)
        if self._old_files or self._file.positions:
            self._writable_file()
        for path in self._unneeded:
            path.unlink(missing_ok=True)
        self._unneeded = self._kept
        self._kept = self._outdated
        self._outdated = []
        if self._file.path is None:
            return None
        self._file.sync()
        return self._file.path.name, self._file.end

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Return to the state of a checkpoint. Its files stay as they are.

        Args:
            snapshots: The snapshot of every rank; each rank takes over its own clients.

        Raises:
            ValueError: A file is damaged.
            FileNotFoundError: A file is missing.
        """
        self._reset()
        files = dict(part for part in snapshots if isinstance(part, tuple))
        if self.folder:
            self._list_outdated(self.folder, files)
        for part in snapshots:
            if isinstance(part, dict):
                self._take_over(part)
        folder = self.folder or Path()
        self._old_files = [RecordFile(folder / name, length) for name, length in files.items()]
        self.mark()

    def _list_outdated(self, folder: Path, files: dict[str, int]) -> None:
        """Note which of this rank's files can be removed once there are newer checkpoints."""
        for path in sorted(folder.glob("memories-*")):
            rank = int(path.name.split("-")[1])
            if not ranks.is_local(rank):
                continue
            if path.name in files:
                self._outdated.append(path)
            else:
                self._kept.append(path)

    def _take_over(self, memories: dict[int, Memory]) -> None:
        for client, memory in memories.items():
            if ranks.is_local(client):
                self[client] = pytree.tree_map(lambda tensor: tensor.to(self.device), memory)

    def _file_with(self, client: int) -> RecordFile | None:
        """Return the file that holds a client's memory."""
        for file in (self._file, *self._old_files):
            if client in file.positions:
                return file
        return None

    def _write(self, client: int) -> None:
        """Append a client's cached memory to the file, unless the file has it already."""
        if client not in self._unwritten:
            return
        self._unwritten.discard(client)
        file = self._writable_file()
        if file.end > 2 * file.live_bytes + SLACK:
            if file.path:
                self._outdated.append(file.path)
            self._old_files = [file]
            self._file = RecordFile()
            file = self._writable_file()
        file.append(client, encode_record(client, self._cache[client]))
        if not self._cache[client]:
            del self._cache[client]

    def _writable_file(self) -> RecordFile:
        """Return the file to append to, after copying into it what is in other files.

        The file of a checkpoint is never written to: the run may have to resume from it again.
        """
        if self.folder and not self._file.path:
            self._old_files.append(self._file)
            self._file = RecordFile(_unused_path(self.folder))
        while self._old_files:
            old_file = self._old_files.pop()
            for client in filter(ranks.is_local, old_file.positions):
                self._file.append(client, old_file.read_record(client))
        return self._file


def _unused_path(folder: Path) -> Path:
    for number in itertools.count():
        path = folder / f"memories-{ranks.rank()}-{number}"
        if not path.exists():
            break
    return path


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


def phase_memory(memory: Memory) -> Memory:
    """Return what the phases of a client remember."""
    return {name: value for name, value in memory.items() if name not in (STAGES, OWN)}


def stage_memory(memory: Memory) -> Memory:
    """Return what the stages of a client's replies remember."""
    return memory.get(STAGES, {})  # type: ignore[no-any-return]


def personal_values(memory: Memory) -> dict[str, Tree]:
    """Return what a client has of a model for itself: its own variables, or a whole model.

    Args:
        memory: The memory of the client.

    Returns:
        Trees by name in messages, such as "y".
    """
    return {**memory.get("personal", {}), **memory.get(OWN, {})}


def own_values(memory: Memory, kinds: Mapping[str, Kind], problem: Problem) -> dict[str, Tree]:
    """Return a client's part of the values of a message, as the client has kept it.

    Args:
        memory: The memory of the client.
        kinds: "x" or "y" for each value, by name (`Broadcast.client_kinds`).
        problem: Has the start of x and y; other values start at 0.

    Returns:
        Trees by name, on the device of the problem.
    """
    kept = memory.get(OWN, {})
    values = {}
    for name, kind in kinds.items():
        start = problem.client_part(problem.x if kind == "x" else problem.y)
        if name in kept:
            values[name] = kept[name]
        elif name == kind:
            values[name] = start
        else:
            values[name] = zeros_like(start)
    return values


def renew(
    memory: Memory,
    *,
    phases: Memory | None = None,
    stages: Memory | None = None,
    own: Memory | None = None,
) -> Memory:
    """Return a client's memory with some of its parts replaced.

    Args:
        memory: The memory so far.
        phases: What phases remember from now on; None to leave it.
        stages: What stages remember from now on; None to leave it.
        own: Values of variables that belong to the client; values of other names are kept.
    """
    renewed = dict(phase_memory(memory) if phases is None else phases)
    stages = stage_memory(memory) if stages is None else stages
    if stages:
        renewed[STAGES] = stages
    own = {**memory.get(OWN, {}), **(own or {})}
    if own:
        renewed[OWN] = own
    return renewed


def join_message(
    values: Values, own: Mapping[str, Tree], broadcast: Broadcast, problem: Problem
) -> Values:
    """Return the values of a message whole: the server's part, and the client's own."""
    whole = dict(values)
    for name, kind in broadcast.client_kinds.items():
        whole[name] = problem.join_parts(str(kind), values[name], own[name])
    return whole


def finish_task(phase: Phase, carry: Carry, broadcast: Broadcast, problem: Problem) -> Values:
    """Return the reply of a phase, without the client's part, which is under `OWN`."""
    reply = phase.finish(carry)
    if not broadcast.client_kinds:
        return reply
    for name, kind in phase.reply.items():
        if kind in problem.client_levels and isinstance(reply.get(name), Tree):
            reply[name] = problem.server_part(reply[name])
    kept = {}
    for name, value in phase.own(carry).items():
        if part := problem.client_part(value):
            kept[name] = part
    return {**reply, OWN: kept}


def pop_memory(phase: Phase, reply: Values) -> Memory:
    """Remove and return the new memory in what the `finish` of a phase returned.

    Raises:
        TypeError: The phase remembers, but `finish` returned no memory.
    """
    if "memory" not in reply:
        raise TypeError(
            f"phase {phase.name!r} remembers; its finish must return a memory beside its reply"
        )
    return reply.pop("memory")  # type: ignore[no-any-return]
