"""How each data set is read from its files, and how those files are written after a download."""

import gzip
import hashlib
import io
import math
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbilevel.data import checksums
from fedbilevel.data.catalogue import CLASSES

Labelled = tuple[Tensor, Tensor]
# A data set of the Hugging Face hub: split -> rows, with images decoded by Pillow.
Rows = Mapping[str, Iterable[Mapping[str, Any]]]
Array = NDArray[Any]

MNIST = {  # split -> (images, labels)
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
CIFAR10 = {"train": "train.parquet", "test": "test.parquet"}
COVERTYPE = "covtype.npz"
COVERTYPE_MEASURED = 10  # columns; the other 44 are indicators of wilderness areas and soil types
OMNIGLOT = "omniglot28.npz"
OMNIGLOT_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
OMNIGLOT_ZIPS = {  # name -> MD5, the only checksum that is published
    "images_background": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "6b91aef0f799c5bb55b94e3f2daec811",
}
DRAWINGS = 20  # per character


class Source(NamedTuple):
    """Where a data set comes from.

    Attributes:
        folder: The name of its folder.
        files: The files in that folder.
        read: Reads training and test data from the folder.
        fetch: Downloads the data set.
        write: Writes the downloaded data set as files.
    """

    folder: str
    files: tuple[str, ...]
    read: Callable[[Path], tuple[Any, Any]]
    fetch: Callable[[], Any]
    write: Callable[[Any, Path], None]


def read_digits() -> tuple[Labelled, Labelled]:
    """Read the 1797 digits of 8x8 pixels in scikit-learn; a fifth of each class is the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, test = _hold_out(labels)
    x = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)
    x = (x - x[train].mean()) / x[train].std()
    y = torch.from_numpy(labels).long()
    return (x[train], y[train]), (x[test], y[test])


def read_breast_cancer() -> tuple[Labelled, Labelled]:
    """Read the 569 tumours in scikit-learn (Wolberg et al. 1995): 0 malignant, 1 benign."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return _table(features, labels, measured=features.shape[1])


def read_covertype(folder: Path) -> tuple[Labelled, Labelled]:
    """Read Covertype (Blackard and Dean 1999) from an npz file.

    It holds X (N, 54) and y (N,) with labels 1 to 7, which become 0 to 6.
    """
    file = folder / COVERTYPE
    X, y = _arrays(file, "X", "y")
    _check(X, y, (54,), file, range(1, CLASSES["covertype"] + 1))
    checksums.compare(file, X, y)
    return _table(X, y.astype(np.int64) - 1, COVERTYPE_MEASURED)


def _arrays(file: Path, *names: str) -> list[Array]:
    try:
        with np.load(file) as arrays:
            return [arrays[name] for name in names]
    except (KeyError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        wanted = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"{file} must be an npz file with the arrays {wanted}") from error


def _table(features: Array, labels: Array, measured: int) -> tuple[Labelled, Labelled]:
    """Shuffle rows, hold out a fifth of each class, and standardise the first `measured` columns.

    Indicator columns stay 0 or 1, because those of rare soils would become hundreds.
    """
    order = np.random.default_rng(np.random.SeedSequence(1)).permutation(len(labels))
    x = torch.from_numpy(features[order].astype(np.float32))
    y = torch.from_numpy(labels[order]).long()
    train, test = _hold_out(labels[order])
    head = x[:, :measured].double()
    x[:, :measured] = ((head - head[train].mean(0)) / head[train].std(0)).float()
    return (x[train], y[train]), (x[test], y[test])


def _hold_out(labels: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return training rows and test rows (a fixed fifth of each class), in their original order."""
    rng = np.random.default_rng(np.random.SeedSequence(0))
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    train = np.concatenate([rows[round(len(rows) / 5) :] for rows in shuffled])
    test = np.concatenate([rows[: round(len(rows) / 5)] for rows in shuffled])
    return np.sort(train), np.sort(test)


def read_mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """Read MNIST (LeCun et al. 1998) from its four gzipped idx files."""
    return _read_mnist_split(folder, "train"), _read_mnist_split(folder, "test")


def _read_mnist_split(folder: Path, split: str) -> Labelled:
    image_file, label_file = MNIST[split]
    images = read_idx(folder / image_file, axes=3)
    labels = read_idx(folder / label_file, axes=1)
    _check(images, labels, (28, 28), folder / label_file, range(CLASSES["mnist"]))
    checksums.compare(folder / image_file, images, labels)
    x = torch.from_numpy(images).float().div_(255).sub_(0.1307).div_(0.3081)
    return x.unsqueeze(1), torch.from_numpy(labels).long()


def read_cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    """Read CIFAR-10 (Krizhevsky 2009) from parquet files with the columns img (encoded) and label.

    A download keeps the original pixels (PNG). Our published results used a lossy JPEG re-encoding,
    so that their accuracies are not strictly comparable with those of other publications.
    """
    train = _read_cifar10_split(folder / CIFAR10["train"])
    test = _read_cifar10_split(folder / CIFAR10["test"])
    return train, test


def _read_cifar10_split(file: Path) -> Labelled:
    try:
        from PIL import Image
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs pyarrow and pillow, which fedbilevel[data] installs"
        ) from error
    try:
        table = parquet.read_table(file, columns=["img", "label"])
        encoded = table["img"].to_pylist()
        images = np.stack(
            [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in encoded]
        )
    except (ArrowException, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} must be parquet with the columns img (encoded images of one size) and label"
        ) from error
    labels = table["label"].to_numpy()
    _check(images, labels, (32, 32, 3), file, range(CLASSES["cifar10"]))
    checksums.compare(file, images, labels)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).reshape(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).reshape(3, 1, 1)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float()
    x = x.div_(255).sub_(mean).div_(std)
    return x, torch.from_numpy(labels.astype(np.int64))


def read_digit_characters() -> tuple[Tensor, Tensor]:
    """Read the digits in scikit-learn as characters for few-shot learning.

    The test characters are 3, 4 and 7 in four rotations. These are the digits that rotations
    distinguish best: upside down, a 6 is a 9, and a 0 or an 8 is unchanged. The training characters
    are the other digits in four rotations, and their mirror images, from two disjoint sets of
    images each: 112 characters of 56 kinds, ordered so that any 56 consecutive ones differ in kind.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    drawings = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)

    def characters(digits: Iterable[int], image_sets: int, turns: int) -> Tensor:
        stacks = []
        for image_set in range(image_sets):
            for turn in range(turns):  # by 90 degrees
                first = (4 * image_set + turn) % 8 * DRAWINGS
                for digit in digits:
                    stack = drawings[labels == digit][first : first + DRAWINGS]
                    stack = stack.rot90(turn, (-2, -1))
                    if turn >= 4:
                        stack = stack.flip(-1)
                    stacks.append(stack)
        return torch.stack(stacks)

    train = characters((0, 1, 2, 5, 6, 8, 9), image_sets=2, turns=8)
    test = characters((3, 4, 7), image_sets=1, turns=4)
    return train, test


def read_omniglot(folder: Path) -> tuple[Tensor, Tensor]:
    """Read Omniglot (Lake et al. 2015), 28x28 pixels, ink 1 on 0, sorted by alphabet.

    The training characters are the 964 of the 30 background alphabets, the test characters the 659
    of the 20 evaluation alphabets. The npz file holds images (N, 28, 28), ink 0 on 255; the numbers
    of alphabet and character of each image; and which alphabets are background.
    """
    file = folder / OMNIGLOT
    images, alphabet, character, background = _arrays(
        file, "images", "alphabet", "character", "alphabet_is_background"
    )
    _check(images, character, (28, 28), file, range(1623))
    _check(images, alphabet, (28, 28), file, range(len(background)))
    numbers, counts = np.unique(character, return_counts=True)
    for number, count in zip(numbers, counts, strict=True):
        if count != DRAWINGS:
            raise ValueError(
                f"{file} has {count} drawings of character {number}; there must be {DRAWINGS}"
            )
    checksums.compare(file, images, alphabet, character, background)
    order = np.argsort(character, kind="stable")
    paper = torch.from_numpy(images[order]).float().div_(255)
    drawings = 1 - paper.reshape(-1, DRAWINGS, 1, 28, 28)
    is_background = torch.from_numpy(background[alphabet[order[::DRAWINGS]]] == 1)
    return drawings[is_background], drawings[~is_background]


def read_idx(file: Path, axes: int) -> NDArray[np.uint8]:
    """Read the array of unsigned bytes in a gzipped idx file.

    The format is the magic number 0x0800 + axes, big-endian sizes, then the bytes.
    """
    try:
        content = gzip.decompress(file.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file") from error
    magic, *shape = (int.from_bytes(content[4 * i : 4 * i + 4]) for i in range(axes + 1))
    if magic != 0x0800 + axes:
        raise ValueError(
            f"{file} begins with {magic:#010x}; "
            f"it must begin with the idx magic number {0x0800 + axes:#010x}"
        )
    writable = bytearray(content[4 * (axes + 1) :])  # torch warns about read-only arrays
    body = np.frombuffer(writable, dtype=np.uint8)
    if len(body) != math.prod(shape):
        raise ValueError(
            f"{file} holds {len(body)} bytes; its sizes {shape} need {math.prod(shape)}"
        )
    return body.reshape(shape)


def _check(
    inputs: Array, labels: Array, shape: tuple[int, ...], file: Path, allowed: range
) -> None:
    needed = (len(labels), *shape)
    if inputs.shape != needed:
        raise ValueError(
            f"{file} has {len(labels)} labels, which need inputs of shape {needed}, "
            f"not {inputs.shape}"
        )
    wrong = np.flatnonzero(~np.isin(labels, allowed))
    if len(wrong):
        raise ValueError(
            f"{file} has the label {labels[wrong[0]]} at row {wrong[0]}; "
            f"it must be {allowed[0]} to {allowed[-1]}"
        )


def download(source: Source, folder: Path) -> None:
    """Download a data set and move its files into `folder`, each one only once it is complete."""
    fetched = source.fetch()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        source.write(fetched, Path(unfinished))
        for file in source.files:
            os.replace(Path(unfinished, file), folder / file)


def _from_hub(repository: str) -> Rows:
    from datasets import load_dataset

    return load_dataset(repository)  # type: ignore[no-any-return]


def _write_mnist(rows: Rows, folder: Path) -> None:
    for split, (images, labels) in MNIST.items():
        pairs = [(np.asarray(row["image"], dtype=np.uint8), row["label"]) for row in rows[split]]
        write_idx(folder / images, np.stack([image for image, _ in pairs]))
        write_idx(folder / labels, np.array([label for _, label in pairs], dtype=np.uint8))


def write_idx(file: Path, array: NDArray[np.uint8]) -> None:
    """Write an array of unsigned bytes as a gzipped idx file, the inverse of `read_idx`."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">u4")
    file.write_bytes(gzip.compress(header.tobytes() + array.tobytes()))


def _write_cifar10(rows: Rows, folder: Path) -> None:
    from pyarrow import parquet, table

    def png(image: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    for split, file in CIFAR10.items():
        images = []
        labels = []
        for row in rows[split]:
            images.append(png(row["img"]))
            labels.append(row["label"])
        parquet.write_table(table({"img": images, "label": labels}), folder / file)


def _fetch_covertype() -> tuple[Array, Array]:
    from sklearn.datasets import fetch_covtype

    # scikit-learn caches a larger file than ours, so its cache is discarded.
    with tempfile.TemporaryDirectory() as discarded, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # announces a second attempt
        arrays: tuple[Array, Array] = fetch_covtype(
            data_home=discarded, return_X_y=True, n_retries=1, delay=0.1
        )
        return arrays


def _write_covertype(arrays: tuple[Array, Array], folder: Path) -> None:
    X, y = arrays
    np.savez_compressed(folder / COVERTYPE, X=X.astype(np.int16), y=y.astype(np.uint8))


def _fetch_omniglot() -> list[zipfile.ZipFile]:
    archives = []
    for name, published in OMNIGLOT_ZIPS.items():
        with urlopen(f"{OMNIGLOT_URL}/{name}.zip", timeout=60) as answer:
            content = answer.read()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != published:
            raise OSError(f"the download from {answer.url} has the MD5 {found}, not {published}")
        archives.append(zipfile.ZipFile(io.BytesIO(content)))
    return archives


def _write_omniglot(archives: list[zipfile.ZipFile], folder: Path) -> None:
    """Scale every image from 105x105 to 28x28 by exact area averaging, and write the npz file.

    Averaging repeats each pixel 4x4 times, then takes means of 15x15.
    """
    from PIL import Image

    average = np.eye(28).repeat(15, 1) @ np.eye(105).repeat(4, 0) / 15
    drawings = []  # (alphabet, character, file, whether background, pixels)
    for archive, background in zip(archives, (1, 0), strict=True):
        for path in archive.namelist():
            if path.endswith(".png"):
                image = Image.open(io.BytesIO(archive.read(path))).convert("L")
                gray = np.asarray(image, dtype=float)
                pixels = np.rint(average @ gray @ average.T).astype(np.uint8)
                drawings.append((*path.split("/")[-3:], background, pixels))
    drawings.sort(key=lambda drawing: drawing[:3])
    names, alphabet = np.unique([drawing[0] for drawing in drawings], return_inverse=True)
    full_names = [f"{drawing[0]}/{drawing[1]}" for drawing in drawings]
    _, character = np.unique(full_names, return_inverse=True)
    flags = {drawing[0]: drawing[3] for drawing in drawings}
    np.savez_compressed(
        folder / OMNIGLOT,
        images=np.stack([drawing[4] for drawing in drawings]),
        alphabet=alphabet.astype(np.uint8),
        character=character.astype(np.int16),
        alphabet_is_background=np.array([flags[name] for name in names], dtype=np.uint8),
    )


EMBEDDED = {"breast-cancer": read_breast_cancer, "digits": read_digits}
EMBEDDED_CHARACTERS = {"digits": read_digit_characters}
SOURCES = {
    "mnist": Source(
        "mnist",
        (*MNIST["train"], *MNIST["test"]),
        read_mnist,
        partial(_from_hub, "ylecun/mnist"),
        _write_mnist,
    ),
    "cifar10": Source(
        "cifar10",
        tuple(CIFAR10.values()),
        read_cifar10,
        partial(_from_hub, "uoft-cs/cifar10"),
        _write_cifar10,
    ),
    "covertype": Source(
        "covtype", (COVERTYPE,), read_covertype, _fetch_covertype, _write_covertype
    ),
    "omniglot": Source("omniglot", (OMNIGLOT,), read_omniglot, _fetch_omniglot, _write_omniglot),
}
