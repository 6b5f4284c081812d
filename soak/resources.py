"""What processes hold over time: memory, open descriptors, and the files in a folder."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Sample(NamedTuple):
    """What a process held at a moment."""

    seconds: float
    megabytes: float
    descriptors: int


def peak_megabytes() -> float:
    """Return the most memory that this process has held since `reset_peak`."""
    return _status("self", "VmHWM")


def reset_peak() -> float:
    """Let the peak start at the memory that this process holds now, and return that."""
    _return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_megabytes()


def _status(pid: int | str, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def processes_in(folder: Path) -> set[int]:
    """Return the processes that work in a folder or below."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                cwd = Path(os.readlink(entry / "cwd"))
            except OSError:  # the process has ended, or is another user's
                continue
            if cwd.is_relative_to(folder):
                found.add(int(entry.name))
    return found


def count_files(folder: Path) -> int:
    """Return the number of files below a folder."""
    return sum(len(files) for _, _, files in os.walk(folder))


@dataclass
class Monitor:
    """Samples what processes hold, by role, and files by folder.

    Attributes:
        samples: The samples of each role. Several processes may have the same role, one after the
            other.
        files: The numbers of files of each folder that is watched.
    """

    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    files: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    started: float = field(default_factory=time.monotonic)

    def sample(self, role: str, pid: int | str = "self") -> None:
        """Sample one process; one that has ended is left out."""
        if pid == "self":
            _return_free_memory()
        try:
            megabytes = _status(pid, "VmRSS")
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, IndexError):  # it has ended; a zombie holds no memory
            return
        elapsed = time.monotonic() - self.started
        self.samples[role].append(Sample(elapsed, megabytes, descriptors))

    def count(self, role: str, folder: Path) -> None:
        """Count the files in a folder."""
        self.files[role].append(count_files(folder))

    def show(self, title: str) -> None:
        """Print medians over each quarter of the time: a leak shows as a growing row."""
        table = Table(
            "held by", "samples", "MB, by quarters of the time", "descriptors", title=title
        )
        for role, samples in self.samples.items():
            megabytes = [sample.megabytes for sample in samples]
            descriptors = [sample.descriptors for sample in samples]
            table.add_row(
                role, str(len(samples)), _quarters(megabytes, ".1f"), _quarters(descriptors, ".0f")
            )
        for role, counts in self.files.items():
            table.add_row(f"files: {role}", str(len(counts)), "", _quarters(counts, ".0f"))
        Console(width=110).print(table)


def _return_free_memory() -> None:
    """Return what this process does not use to the system, so that the rest is what it holds.

    glibc keeps memory that was freed: after some minutes of attacks, more than what is in use.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _quarters(values: list[float] | list[int], spec: str) -> str:
    """Format the median of each quarter of some values."""
    medians = []
    for quarter in range(4):
        part = values[quarter * len(values) // 4 : (quarter + 1) * len(values) // 4]
        if part:
            medians.append(format(statistics.median(part), spec))
    return "  ".join(medians)
