"""What clients keep between tasks: the last used in memory, the others in a file."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.codec import pack, unpack
from fedbilevel.core.tree import nbytes

SLACK = (
    2**26
)  # outdated bytes, beside as many as are not, that a file may hold before it is written anew

STAGES = "stages "  # where a client's memory holds what its stages remember; no name of a phase's own ends so

Memory = dict[str, Any]
Saved = (
    dict[int, Memory] | tuple[str, int] | None
)  # all there is, or a file in the run's folder and its length


class Memories(MutableMapping[int, Memory]):
    """By client; an empty one is none. At most `most` bytes are held in memory.

    Files are only ever appended to, so that a change, a checkpoint and the way back cost what has changed, not what
    there is: a checkpoint holds the file's length, and `back` undoes the changes since the last `mark`. Without a
    `folder` the file is a temporary one, and what is saved is everything.
    """

    def __init__(self, device: str, most: int) -> None:
        self.device, self.most = device, most
        self.folder: Path | None = None
        self._marks = 0
        self._forget()

    def _forget(self) -> None:
        self._near: dict[int, Memory] = {}  # the last used last
        self._size = 0  # of these
        self._changed: set[int] = set()  # those of which the file does not have the latest
        self._undo: dict[int, Memory] = {}
        self._records = Records()
        self._before: list[Records] = []  # of checkpoints, until the first change
        self._outdated: list[
            Path
        ] = []  # files that the last checkpoint needs, and the next will not
        self._needless: list[Path] = []  # files that no checkpoint needs

    def __iter__(self) -> Iterator[int]:
        found = itertools.chain(
            self._near, self._records.places, *(records.places for records in self._before)
        )
        return (client for client in dict.fromkeys(found) if self._near.get(client, True))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, client: int) -> Memory:
        if client in self._near:
            memory = self._near[client]
        elif records := self._holder(client):
            memory = pytree.tree_map(lambda t: t.to(self.device), records.read(client))
        else:
            raise KeyError(client)
        self._put(client, memory)
        if not memory:
            raise KeyError(client)
        return memory

    def __setitem__(self, client: int, memory: Memory) -> None:
        if client not in self._undo:
            self._undo[client] = self.get(client, {})
        if memory or self._holder(client):
            self._changed.add(client)
            self._put(client, memory)
        else:
            self._changed.discard(client)
            self._size -= nbytes(self._near.pop(client, {}))

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self[client] = {}

    def _put(self, client: int, memory: Memory) -> None:
        self._size += nbytes(memory) - nbytes(self._near.pop(client, {}))
        self._near[client] = memory
        while self._size > self.most:
            oldest = next(iter(self._near))
            self._write(oldest)
            self._size -= nbytes(self._near.pop(oldest, {}))

    def mark(self) -> int:
        self._undo, self._marks = {}, self._marks + 1
        return self._marks

    def back(self, mark: int) -> None:
        if mark != self._marks:
            raise RuntimeError(
                f"mark is {mark}; the last one is {self._marks}, and there is a way back to that alone"
            )
        for client, memory in self._undo.items():
            self[client] = memory

    def save(self) -> Saved:
        """For a checkpoint; what the last one needs stays until the one after this."""
        if self.folder is None:
            return dict(self)
        for client in sorted(self._changed):
            self._write(client)
        if self._before or self._records.places:
            self._own()
        for path in self._needless:
            path.unlink(missing_ok=True)
        self._outdated, self._needless = [], self._outdated
        if self._records.path is None:
            return None
        self._records.file.flush()
        return self._records.path.name, self._records.end

    def restore(self, saved: Sequence[Saved]) -> None:
        """What every rank has saved, as far as it is of this one's clients. The files stay as they are."""
        self._forget()
        files = dict(part for part in saved if isinstance(part, tuple))
        for path in sorted(self.folder.glob("memories-*")) if self.folder else ():
            if ranks.mine(int(path.name.split("-")[1])):
                (self._outdated if path.name in files else self._needless).append(path)
        for client, memory in itertools.chain(
            *(part.items() for part in saved if isinstance(part, dict))
        ):
            if ranks.mine(client):
                self[client] = pytree.tree_map(lambda t: t.to(self.device), memory)
        self._before = [
            Records((self.folder or Path()) / name, length) for name, length in files.items()
        ]
        self.mark()

    def _holder(self, client: int) -> Records | None:
        """Where on disk a client's memory is."""
        return next(
            (records for records in (self._records, *self._before) if client in records.places),
            None,
        )

    def _write(self, client: int) -> None:
        if client not in self._changed:
            return
        self._changed.discard(client)
        records = self._own()
        if records.end > 2 * records.live + SLACK:
            self._outdated += [records.path] if records.path else []
            self._before, self._records = [records], Records()
            records = self._own()
        records.append(client, Records.made(client, self._near[client]))
        if not self._near[client]:
            del self._near[client]

    def _own(self) -> Records:
        """The file to write to, with all there is; a file of a checkpoint is read, and then left alone."""
        if self.folder and not self._records.path:
            names = (f"memories-{ranks.rank()}-{number}" for number in itertools.count())
            self._before.append(self._records)
            self._records = Records(
                next(path for name in names if not (path := self.folder / name).exists())
            )
        while self._before:
            old = self._before.pop()
            for client in filter(ranks.mine, old.places):
                self._records.append(client, old.record(client))
        return self._records


class Records:
    """A file of records, the last of a client its valid one; of a file that is there, the first `length` bytes."""

    HEAD = struct.Struct(
        "<qqq16s"
    )  # the client, the lengths of JSON and of tensors, and a digest of all of them

    def __init__(self, path: Path | None = None, length: int = 0) -> None:
        self.path = path
        self.places: dict[
            int, tuple[int, int]
        ] = {}  # where a client's record begins, and how long it is
        self.end = self.live = 0  # bytes of the file, and of the valid records in it
        self._length = length
        while self.end < length:
            self.file.seek(self.end)
            client, plain, tensors, _ = self._unpack(self.file.read(self.HEAD.size))
            if min(plain, tensors) < 0:
                raise self._damaged()
            self._valid(client, self.HEAD.size + plain + tensors, plain > 0)
        if self.end > length:
            raise self._damaged()

    @functools.cached_property
    def file(self) -> IO[bytes]:
        opened: IO[bytes] = (
            self.path.open("rb" if self._length else "x+b")
            if self.path
            else tempfile.TemporaryFile()  # noqa: SIM115
        )
        weakref.finalize(self, opened.close)
        return opened

    def append(self, client: int, record: bytes) -> None:
        self.file.seek(self.end)
        self.file.write(record)
        self._valid(client, len(record), len(record) > self.HEAD.size)

    def _valid(self, client: int, size: int, there: bool) -> None:
        _, before = self.places.pop(client, (0, 0))
        if there:
            self.places[client] = (self.end, size)
        self.live += size * there - before
        self.end += size

    def record(self, client: int) -> bytes:
        """Checked: what is damaged is neither used nor copied."""
        begin, size = self.places[client]
        self.file.seek(begin)
        record = self.file.read(size)
        *head, digest = self._unpack(record)
        if digest != _digest(head, record[self.HEAD.size :]):
            raise self._damaged()
        return record

    def read(self, client: int) -> Memory:
        record = self.record(client)
        _, plain, *_ = self._unpack(record)
        start = self.HEAD.size + plain
        form, kinds = json.loads(record[self.HEAD.size : start])
        tensors: dict[str, Tensor] = {}
        for name, (kind, shape) in kinds.items():
            dtype = getattr(torch, kind)
            size = math.prod(shape) * dtype.itemsize
            tensors[name] = torch.frombuffer(
                bytearray(record[start : start + size] or b"\0" * 8), dtype=dtype
            )
            tensors[name] = tensors[name][: math.prod(shape)].reshape(shape)
            start += size
        return unpack(form, tensors)  # type: ignore[no-any-return]

    @classmethod
    def made(cls, client: int, memory: Memory) -> bytes:
        """A record; an empty one takes a memory away."""
        if not memory:
            head, body = [client, 0, 0], b""
        else:
            tensors: dict[str, Tensor] = {}
            form = pack(memory, tensors)
            kinds = {
                name: (str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()
            }
            plain = json.dumps([form, kinds]).encode()
            values = b"".join(
                t.view(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values()
            )
            head, body = [client, len(plain), len(values)], plain + values
        return cls.HEAD.pack(*head, _digest(head, body)) + body

    def _unpack(self, record: bytes) -> tuple[Any, ...]:
        if len(record) < self.HEAD.size:
            raise self._damaged()
        return self.HEAD.unpack(record[: self.HEAD.size])

    def _damaged(self) -> ValueError:
        return ValueError(
            f"{self.path or 'what clients remember'} is damaged: its contents do not match their digests"
        )


def _digest(head: Sequence[int], body: bytes) -> bytes:
    digest = blake2b(repr(head).encode(), digest_size=16)
    digest.update(body)
    return digest.digest()


def phase_memory(memory: Memory) -> Memory:
    """What a client's phases remember."""
    return {name: value for name, value in memory.items() if name != STAGES}


def stage_memory(memory: Memory) -> Memory:
    """What a client's stages remember."""
    return memory.get(STAGES, {})  # type: ignore[no-any-return]


def joined(phase: Memory, stages: Memory) -> Memory:
    """A client's memory, of both."""
    return {**phase, STAGES: stages} if stages else phase
