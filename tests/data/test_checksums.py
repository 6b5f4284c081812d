"""The content of data sets is compared with the copy that our results are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbilevel import data
from fedbilevel.data import checksums, sources


def test_every_data_set_has_checksums() -> None:
    files = [file for source in sources.SOURCES.values() for file in source.files]
    assert set(checksums.KNOWN) == {file for file in files if "labels" not in file}


@pytest.mark.parametrize("damaged", [None, "images", "labels"])
def test_one_changed_number_is_warned_of(
    mnist_root: Path,
    mnist_pixels: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damaged: str | None,
) -> None:
    folder = mnist_root / "mnist"
    for split in ("train", "t10k"):
        images = sources.read_idx(folder / f"{split}-images-idx3-ubyte.gz", axes=3)
        labels = sources.read_idx(folder / f"{split}-labels-idx1-ubyte.gz", axes=1)
        known = checksums.digest(images, labels)
        monkeypatch.setitem(checksums.KNOWN, f"{split}-images-idx3-ubyte.gz", known)
    if damaged is not None:
        axes = {"images": 3, "labels": 1}[damaged]
        file = folder / f"train-{damaged}-idx{axes}-ubyte.gz"
        array = sources.read_idx(file, axes)
        array.reshape(-1)[-1] ^= 1
        sources.write_idx(file, array)  # with a valid checksum of its own
    data.load("mnist", mnist_root)
    if damaged is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert "mnist/train-images-idx3-ubyte.gz is not the copy" in message
