"""What happens to a process: it is killed, or its disk fails, at a chosen event or size of a file.

A `Disturbance` is called in the process that it will disturb, and in a comparison its members
inherit it.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Self

WRITING = os.O_WRONLY | os.O_RDWR
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
MOST_WAIT_S = 0.003  # after an event: within the write that follows it


@dataclass
class EventCounter:
    """Counts the events below a folder that this process causes while the counter is entered."""

    folder: Path
    events: int = 0
    entered: ClassVar[EventCounter | None] = None
    has_hook: ClassVar[bool] = False

    def __enter__(self) -> Self:
        if not EventCounter.has_hook:  # a hook stays for ever
            sys.addaudithook(_count_event)
        EventCounter.has_hook = True
        EventCounter.entered = self
        return self

    def __exit__(self, *_: object) -> None:
        EventCounter.entered = None


def _count_event(event: str, arguments: tuple[Any, ...]) -> None:
    counter = EventCounter.entered
    if counter is not None and event in EVENTS and _is_below(counter.folder, arguments[0]):
        counter.events += 1


@dataclass(frozen=True)
class Disturbance:
    """What will happen to the process in which it is called.

    Args:
        kind: "kill": SIGKILL before an event of the file system below the folder, or a moment after
            it. "full": from an event on nothing can be written there. "tear": the process dies
            while it writes a file that has reached a size. "limit": such a write fails. "none":
            nothing happens.
        folder: The folder.
        at: The number of the event, from 1, or the size in bytes.
        after_s: Seconds to wait after the event.
    """

    kind: Literal["kill", "full", "tear", "limit", "none"]
    folder: Path
    at: int = 0
    after_s: float = 0.0

    def __call__(self) -> None:
        subprocess.Popen = ForkedMember  # type: ignore[misc, assignment]  # members start at once
        if self.kind in ("tear", "limit"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.at, self.at))
            if self.kind == "tear":  # the default action; Python ignores this signal
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        elif self.kind != "none":
            self._watch_events()

    def _watch_events(self) -> None:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in EVENTS or not _is_below(self.folder, arguments[0]):
                return
            if self.kind == "full":
                seen += _writes(event, arguments)
                if seen >= self.at and _writes(event, arguments):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
                return
            seen += 1
            if seen == self.at and not self.after_s:
                os.kill(os.getpid(), signal.SIGKILL)
            elif seen == self.at:
                threading.Thread(target=self._kill_later, daemon=True).start()

        sys.addaudithook(hook)

    def _kill_later(self) -> None:
        time.sleep(self.after_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _is_below(folder: Path, path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    return os.fsdecode(os.path.abspath(path)).startswith(str(folder))


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event needs space on the disk."""
    if event == "open":
        return bool(arguments[2] & WRITING)
    return event not in ("os.remove", "os.rmdir")


class ForkedMember:
    """Stands for `subprocess.Popen`: forks a member of a comparison, which then starts at once."""

    open_pipes: ClassVar[set[int]] = set()  # of all members, to their standard input

    def __init__(
        self,
        command: list[str],
        stdin: int,
        stderr: IO[bytes],
        env: Mapping[str, str] | None = None,
    ) -> None:
        reading, self.pipe = os.pipe()
        self.open_pipes.add(self.pipe)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._be_member(command, reading, stderr, env or os.environ)
        os.close(reading)

    def _be_member(
        self, command: list[str], reading: int, stderr: IO[bytes], env: Mapping[str, str]
    ) -> None:
        """Run the code of the member in the forked process; it does not return."""
        code = 1
        try:
            for pipe in self.open_pipes:
                os.close(pipe)
            os.dup2(reading, 0)
            os.dup2(stderr.fileno(), 2)
            os.environ.update(env)
            sys.argv = ["-c", *command[3:]]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(command[2], {"__name__": "__main__"})
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self) -> None:
        self.open_pipes.discard(self.pipe)
        os.close(self.pipe)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
