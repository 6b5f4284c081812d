"""Finding a data set on this machine, downloading it if necessary, and loading it once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.data import sources
from fedbilevel.data.catalogue import CHARACTERS, CLASSES, REGISTERED, names

Reader = TypeVar("Reader", bound="Callable[[Path | None], DataSet]")


@dataclass(frozen=True)
class DataSet:
    """A labelled data set for classification.

    Args:
        name: Its name.
        train: Training inputs, float32 and normalised, of shape (N, channels, height, width) or
            (N, features), and int64 labels of shape (N,).
        test: Test inputs and labels.
        classes: Labels are in [0, classes).
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


@dataclass(frozen=True)
class Characters:
    """Drawings of characters, for few-shot learning.

    No character is in both parts. Related characters are neighbours: Omniglot is sorted by
    alphabet.

    Args:
        name: The name of the data set.
        train: Training drawings, (characters, drawings, 1, height, width), ink 1 on 0.
        test: Test drawings, of the same shape.
    """

    name: str
    train: Tensor
    test: Tensor


def register(name: str) -> Callable[[Reader], Reader]:
    """Make a data set known by a name: a decorator of the function that reads it.

    The name is accepted by `load`, and so by every task that takes the name of a data set.

    Args:
        name: The name; it must not be taken.

    Returns:
        The decorator, which returns the function. The function is called with the folder of the
        data sets, or `None`, and returns a `DataSet`.

    Raises:
        ValueError: If another data set has this name.

    Examples:
        >>> from fedbilevel import data
        >>> @data.register("digits")
        ... def read(data_dir):
        ...     return data.load("mnist")
        Traceback (most recent call last):
        ValueError: a data set named 'digits' is registered already
    """

    def add(reader: Reader) -> Reader:
        if name in names():
            raise ValueError(f"a data set named {name!r} is registered already")
        REGISTERED[name] = reader
        return reader

    return add


def load(name: str, data_dir: str | Path | None = None) -> DataSet:
    """Load a data set for classification.

    Files are searched for in `data_dir`, in `$FEDBILEVEL_DATA` and in the user's cache, in this
    order, in a subfolder per data set. Missing files are downloaded into the user's cache.

    Args:
        name: "breast-cancer" or "digits" (both embedded in scikit-learn), "cifar10", "covertype"
            or "mnist", or one that was registered.
        data_dir: The first folder to search.

    Returns:
        The data set. All callers in this process share its tensors, so they must not be modified.

    Raises:
        ValueError: The name is unknown, or a file is damaged.
        FileNotFoundError: `data_dir` is not a folder, or the files are missing and cannot be
            downloaded.

    Examples:
        >>> from fedbilevel import data
        >>> data.load("digits").train[0].shape
        torch.Size([1438, 1, 8, 8])
    """
    checks.one_of("name", name, [*CLASSES, *REGISTERED])
    if name in REGISTERED:
        return _read_registered(name, data_dir)
    if name in sources.EMBEDDED:
        return _load(name, None)
    return _load(name, _find_folder(name, data_dir))


def characters(name: str, data_dir: str | Path | None = None) -> Characters:
    """Load drawings of characters for few-shot learning.

    Args:
        name: "digits" (embedded in scikit-learn) or "omniglot".
        data_dir: The first folder to search, as in `load`.

    Returns:
        The characters. All callers in this process share the tensors, so they must not be modified.

    Raises:
        ValueError: The name is unknown, or a file is damaged.
        FileNotFoundError: `data_dir` is not a folder, or the files are missing and cannot be
            downloaded.

    Examples:
        >>> from fedbilevel import data
        >>> data.characters("digits").test.shape
        torch.Size([12, 20, 1, 8, 8])
    """
    checks.one_of("name", name, CHARACTERS)
    if name in sources.EMBEDDED_CHARACTERS:
        return _load_characters(name, None)
    return _load_characters(name, _find_folder(name, data_dir))


def _read_registered(name: str, data_dir: str | Path | None) -> DataSet:
    dataset = REGISTERED[name](Path(data_dir) if data_dir else None)
    if not isinstance(dataset, DataSet):
        raise TypeError(
            f"the data set {name!r} was read as {type(dataset).__name__}; it must be a DataSet"
        )
    return dataset


@lru_cache
def _load(name: str, folder: Path | None) -> DataSet:
    if folder is None:
        train, test = sources.EMBEDDED[name]()
    else:
        train, test = sources.SOURCES[name].read(folder)
    return DataSet(name, train, test, CLASSES[name])


@lru_cache
def _load_characters(name: str, folder: Path | None) -> Characters:
    if folder is None:
        train, test = sources.EMBEDDED_CHARACTERS[name]()
    else:
        train, test = sources.SOURCES[name].read(folder)
    return Characters(name, train, test)


def _find_folder(name: str, data_dir: str | Path | None) -> Path:
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise FileNotFoundError(f"data_dir is {str(data_dir)!r}; it must be a folder that exists")
    import platformdirs  # here, because tasks without files need neither it nor a folder

    source = sources.SOURCES[name]
    cache = platformdirs.user_cache_dir("fedbilevel")
    roots = [root for root in (data_dir, os.environ.get("FEDBILEVEL_DATA"), cache) if root]
    folders = [Path(root, source.folder).expanduser().resolve() for root in roots]
    for folder in folders:
        if all((folder / file).is_file() for file in source.files):
            return folder
    try:
        sources.download(source, folders[-1])
    except (ImportError, OSError) as error:
        searched = ", ".join(map(str, folders))
        files = ", ".join(f"{source.folder}/{file}" for file in source.files)
        raise FileNotFoundError(
            f"data set {name!r} is not in {searched} and could not be downloaded ({error}): "
            f"set FEDBILEVEL_DATA or --data-dir to a folder that holds {files}, "
            "or install fedbilevel[data] and connect to the network"
        ) from error
    return folders[-1]
