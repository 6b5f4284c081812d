"""Data sets as tensors: embedded, read from files, or downloaded once into the user's cache."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.data import sources


@dataclass(frozen=True)
class DataSet:
    """Normalised float32 inputs (N, channels, height, width) or (N, features), int64 labels (N,) in [0, classes)."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


@dataclass(frozen=True)
class Characters:
    """Drawings of characters to tell apart, (characters, drawings, 1, height, width), ink 1 on 0.

    No character is in both parts. A part is in an order in which neighbours belong together (in Omniglot by alphabet).
    """

    name: str
    train: Tensor
    test: Tensor


def names() -> list[str]:
    """The data sets that `load` or `characters` know."""
    return sorted(sources.CLASSES.keys() | sources.CHARACTERS)


def load(name: str, data_dir: str | Path | None = None) -> DataSet:
    """The data set `name`, shared by all callers in this process: its tensors are to be read, not written.

    Files are looked for in `data_dir`, `$FEDBILEVEL_DATA` and the user's cache, in this order, in a folder of
    the set's own; what is in none of them is downloaded into the user's cache.
    """
    checks.one_of("name", name, sources.CLASSES)
    return _read(name, None if name in sources.EMBEDDED else _folder(name, data_dir))


def characters(name: str, data_dir: str | Path | None = None) -> Characters:
    """The characters "digits" (embedded) or "omniglot", found, downloaded and shared as by `load`."""
    checks.one_of("name", name, sources.CHARACTERS)
    return _read_characters(
        name, None if name in sources.EMBEDDED_CHARACTERS else _folder(name, data_dir)
    )


@lru_cache
def _read(name: str, folder: Path | None) -> DataSet:
    train, test = sources.EMBEDDED[name]() if folder is None else sources.SOURCES[name].read(folder)
    return DataSet(name, train, test, sources.CLASSES[name])


@lru_cache
def _read_characters(name: str, folder: Path | None) -> Characters:
    train, test = (
        sources.EMBEDDED_CHARACTERS[name]()
        if folder is None
        else sources.SOURCES[name].read(folder)
    )
    return Characters(name, train, test)


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
