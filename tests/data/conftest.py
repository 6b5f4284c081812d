"""A machine without data sets, and a small MNIST in files."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty user's cache; no data set is stored, and `datasets` cannot be imported."""
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path / "cache" / "fedbilevel"


@pytest.fixture
def mnist_pixels() -> dict[str, Any]:
    """Return the images of a small MNIST: 5 for training and 3 for testing."""
    pixels = {}
    for split, count in (("train", 5), ("t10k", 3)):
        pixels[split] = np.random.default_rng(7).integers(0, 256, (count, 28, 28))
    return pixels


@pytest.fixture
def mnist_root(tmp_path: Path, mnist_pixels: dict[str, Any]) -> Path:
    """Return a folder with the files of that MNIST in its subfolder "mnist", written by hand."""
    folder = tmp_path / "files" / "mnist"
    folder.mkdir(parents=True)
    for split, images in mnist_pixels.items():
        count = len(images)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        content = header + images.astype("u1").tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        content = struct.pack(">II", 0x801, count) + bytes([9, 0, 4, 1, 2][:count])
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    return folder.parent
