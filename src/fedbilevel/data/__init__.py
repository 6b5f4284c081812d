"""Data sets as tensors: embedded, read from files, or downloaded once into the user's cache."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs
from torch import Tensor

from fedbilevel import checks
from fedbilevel.data import sources


@dataclass(frozen=True)
class DataSet:
    """Normalised float32 inputs (N, channels, height, width) or (N, features), int64 labels (N,) in [0, classes)."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def names() -> list[str]:
    """The data sets that `load` knows."""
    return sorted(sources.CLASSES)


def load(name: str, data_dir: str | Path | None = None) -> DataSet:
    """The data set `name`, shared by all callers in this process: its tensors are to be read, not written.

    Files are looked for in `data_dir`, `$FEDBILEVEL_DATA` and the user's cache, in this order, in a folder of
    the set's own; what is in none of them is downloaded into the user's cache.
    """
    checks.one_of("name", name, names())
    return _read(name, None if name in sources.EMBEDDED else _folder(name, data_dir))


@lru_cache
def _read(name: str, folder: Path | None) -> DataSet:
    train, test = sources.EMBEDDED[name]() if folder is None else sources.SOURCES[name].read(folder)
    return DataSet(name, train, test, sources.CLASSES[name])


def _folder(name: str, data_dir: str | Path | None) -> Path:
    source = sources.SOURCES[name]
    cache = platformdirs.user_cache_dir("fedbilevel")
    roots = [root for root in (data_dir, os.environ.get("FEDBILEVEL_DATA"), cache) if root]
    folders = [Path(root, source.folder).expanduser().resolve() for root in roots]
    files = [f"{source.folder}/{file}" for file in source.files]
    for folder in folders:
        if all((folder / file).is_file() for file in source.files):
            return folder
    try:
        sources.download(source, folders[-1])
    except (ImportError, OSError) as error:
        raise FileNotFoundError(
            f"data set {name!r} is not in {', '.join(map(str, folders))} and could not be downloaded ({error}): set "
            f"FEDBILEVEL_DATA or --data-dir to a folder that holds {', '.join(files)}, "
            "or install fedbilevel[data] and connect to the network"
        ) from error
    return folders[-1]
