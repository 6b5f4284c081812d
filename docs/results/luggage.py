"""Packs run folders into a few files of limited size, for a machine that keeps nothing.

Finished runs come first, then those with the most seconds of work per byte of checkpoint. A folder
that does not fit is left behind: its run begins again from round 0 elsewhere.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from costs import seconds_so_far
from plan import UNSCALED, is_finished

from fedbilevel.runs import folder as folders

MIB = 2**20
FILES = 8
FILE_MIB = 16.0
ALL_MIB = 64.0
NOT_PACKED = (folders.PREVIOUS_CHECKPOINT, "checkpoint/lock")


class Packed(NamedTuple):
    """What was packed, and which folders were left behind."""

    files: list[Path]
    left: list[Path]


def pack(
    out: Path,
    to: Path,
    *,
    files: int = FILES,
    file_mib: float = FILE_MIB,
    all_mib: float = ALL_MIB,
) -> Packed:
    """Write all run folders below `out` to archives.

    Args:
        out: The folder with all run folders.
        to: The folder for the archives; older ones in it are removed.
        files: The most archives.
        file_mib: The most MiB of one.
        all_mib: The most MiB of all.
    """
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob("runs-*.tar.gz"):
        old.unlink()
    archives: list[bytearray] = []
    left = []
    for folder in by_value(run_folders(out)):
        data = compressed(folder, out)
        if sum(map(len, archives)) + len(data) > all_mib * MIB:
            left.append(folder)
            continue
        fitting = (a for a in archives if len(a) + len(data) <= file_mib * MIB)
        archive = next(fitting, None)
        if archive is None:
            if len(archives) == files or len(data) > file_mib * MIB:
                left.append(folder)
                continue
            archive = bytearray()
            archives.append(archive)
        archive += data  # archives that follow each other are one
    paths = []
    for number, archive in enumerate(archives, start=1):
        paths.append(to / f"runs-{number}.tar.gz")
        paths[-1].write_bytes(archive)
    return Packed(paths, left)


def unpack(archives: Iterable[Path], out: Path) -> None:
    """Write the run folders in archives below `out`."""
    for archive in archives:
        with tarfile.open(archive, "r:gz", ignore_zeros=True) as tar:
            tar.extractall(out, filter="data")


def run_folders(out: Path) -> list[Path]:
    """Return all folders with a config or an unscaled one."""
    files = [*out.rglob(folders.CONFIG), *out.rglob(UNSCALED)]
    return sorted({file.parent for file in files})


def by_value(paths: Iterable[Path]) -> list[Path]:
    """Return run folders, the most valuable first."""

    def worth(path: Path) -> float:
        if is_finished(path) or not (path / folders.CHECKPOINT).exists():
            return float("inf")  # without a checkpoint, it is small
        return seconds_so_far(path) / (path / folders.CHECKPOINT).stat().st_size

    return sorted(paths, key=worth, reverse=True)


def compressed(folder: Path, out: Path) -> bytes:
    """Return the files of a run folder as an archive of its own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            nested = any((parent / folders.CONFIG).exists() for parent in _between(file, folder))
            if file.is_file() and name not in NOT_PACKED and not nested:
                tar.add(file, file.relative_to(out).as_posix(), recursive=False)
    return buffer.getvalue()


def _between(file: Path, folder: Path) -> list[Path]:
    """Return the folders above a file that are below another."""
    return [parent for parent in file.parents if folder in parent.parents]
