"""What clients remember between their tasks, in a simulation: a mapping from client to memory.

What a client remembers is declared by its phase (`Phase.remembers`, federation/phase.py) and by
stages with error feedback; `client_memory.py` has the parts of it. A real client keeps it in a
local file (deploy/flower/client.py).

The recently used memories are cached, the others are in an append-only file, so that a run may have
more clients than fit into memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from torch.utils import _pytree as pytree

from fedbilevel.core import ranks
from fedbilevel.core.tree import nbytes
from fedbilevel.execution._record_file import RecordFile, encode_record
from fedbilevel.execution.client_memory import Memory

SLACK = 2**26  # a file is rewritten when its outdated bytes exceed its valid ones by this many

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
