"""Stand-ins for the network and for the Hugging Face hub."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image


def no_network(*arguments: object, **options: object) -> NoReturn:
    """Fail as any connection does without a network."""
    raise ConnectionError("no route to the hub")


def serve_images(
    monkeypatch: pytest.MonkeyPatch,
    repository: str,
    column: str,
    shape: tuple[int, ...],
    labels: tuple[int, ...] = (3, 0, 9),
) -> dict[str, Any]:
    """Install a `datasets` package that loads random images, and return the images by split.

    Args:
        monkeypatch: undoes the installation.
        repository: the only name that `load_dataset` accepts.
        column: the name of the column with the images.
        shape: the shape of one image.
        labels: the labels of each split.
    """
    rng = np.random.default_rng(1)
    images = {}
    for split in ("train", "test"):
        images[split] = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)

    def load_dataset(name: str) -> dict[str, list[dict[str, Any]]]:
        assert name == repository
        splits = {}
        for split, pixels in images.items():
            splits[split] = [
                {column: Image.fromarray(image), "label": label}
                for image, label in zip(pixels, labels, strict=True)
            ]
        return splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return images
