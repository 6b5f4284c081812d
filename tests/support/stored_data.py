"""Data sets that are stored on this machine, in $FEDBILEVEL_DATA, for tests that need real data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedbilevel.data import datasets, sources

FOLDER = os.environ.get("FEDBILEVEL_DATA")


def is_stored(name: str) -> bool:
    """Whether $FEDBILEVEL_DATA holds all files of a data set."""
    if FOLDER is None:
        return False
    source = sources.SOURCES[name]
    return all(Path(FOLDER, source.folder, file).is_file() for file in source.files)


def needs(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where a data set is not stored."""
    return pytest.mark.skipif(not is_stored(name), reason=f"needs {name} in $FEDBILEVEL_DATA")


def forget_loaded() -> None:
    """Make the next `data.load` and `data.characters` read files, and free what was loaded."""
    datasets._load.cache_clear()
    datasets._load_characters.cache_clear()
