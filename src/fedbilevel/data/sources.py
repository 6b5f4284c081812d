"""How each data set is read from its files, and how those files are written after a download."""

import gzip
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

Labelled = tuple[Tensor, Tensor]
Rows = Mapping[
    str, Iterable[Mapping[str, Any]]
]  # Hugging Face: split -> rows, images decoded by Pillow

CLASSES = {"breast-cancer": 2, "cifar10": 10, "covertype": 7, "digits": 10, "mnist": 10}
CHARACTERS = ("digits", "omniglot")

MNIST = {  # split -> (images, labels)
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
CIFAR10 = {"train": "train.parquet", "test": "test.parquet"}
COVERTYPE = "covtype.npz"
COVERTYPE_MEASURED = 10  # columns; the other 44 are indicators of wilderness areas and soil types
OMNIGLOT = "omniglot28.npz"
OMNIGLOT_ZIPS = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
DRAWINGS = 20  # of a character


class Source(NamedTuple):
    folder: str
    files: tuple[str, ...]
    read: Callable[[Path], tuple[Any, Any]]  # (training, test) data
    fetch: Callable[[], Any]
    write: Callable[[Any, Path], None]  # what was fetched, as files


def read_digits() -> tuple[Labelled, Labelled]:
    """The 1797 digits of 8x8 pixels inside scikit-learn; a fifth of each class, always the same, is for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, test = _hold_out(labels)
    x = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)
    x = (x - x[train].mean()) / x[train].std()
    y = torch.from_numpy(labels).long()
    return (x[train], y[train]), (x[test], y[test])


def read_breast_cancer() -> tuple[Labelled, Labelled]:
    """The 569 tumours of 30 measurements inside scikit-learn (Wolberg et al. 1995): 0 malignant, 1 benign."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return _table(features, labels, measured=features.shape[1])


def read_covertype(folder: Path) -> tuple[Labelled, Labelled]:
    """Covertype (Blackard and Dean 1999) from an npz file with X (N, 54) and y (N,) in 1 to 7, here 0 to 6."""
    file = folder / COVERTYPE
    X, y = _arrays(file, "X", "y")
    _check(X, y, (54,), file, range(1, CLASSES["covertype"] + 1))
    return _table(X, y.astype(np.int64) - 1, COVERTYPE_MEASURED)


def _arrays(file: Path, *names: str) -> list[NDArray[Any]]:
    try:
        with np.load(file) as arrays:
            return [arrays[name] for name in names]
    except (KeyError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        wanted = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"{file} must be an npz file with the arrays {wanted}") from error


def _table(
    features: NDArray[Any], labels: NDArray[Any], measured: int
) -> tuple[Labelled, Labelled]:
    """Shuffled rows, a fifth of each class for testing; the first `measured` columns are standardised.

    Indicator columns stay 0 or 1: standardised, those of rare soils would be hundreds.
    """
    order = np.random.default_rng(np.random.SeedSequence(1)).permutation(len(labels))
    x, y = (
        torch.from_numpy(features[order].astype(np.float32)),
        torch.from_numpy(labels[order]).long(),
    )
    train, test = _hold_out(labels[order])
    head = x[:, :measured].double()
    x[:, :measured] = ((head - head[train].mean(0)) / head[train].std(0)).float()
    return (x[train], y[train]), (x[test], y[test])


def _hold_out(labels: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows for training and, a fifth of each class, for testing: always the same, in the order of the data."""
    rng = np.random.default_rng(np.random.SeedSequence(0))
    shuffled = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    train = np.concatenate([rows[round(len(rows) / 5) :] for rows in shuffled])
    test = np.concatenate([rows[: round(len(rows) / 5)] for rows in shuffled])
    return np.sort(train), np.sort(test)


def read_mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """MNIST (LeCun et al. 1998) from its four gzipped idx files."""
    return _read_mnist_split(folder, "train"), _read_mnist_split(folder, "test")


def _read_mnist_split(folder: Path, split: str) -> Labelled:
    images, labels = (
        read_idx(folder / file, axes) for file, axes in zip(MNIST[split], (3, 1), strict=True)
    )
    _check(images, labels, (28, 28), folder / MNIST[split][1], range(CLASSES["mnist"]))
    x = torch.from_numpy(images).float().div_(255).sub_(0.1307).div_(0.3081)
    return x.unsqueeze(1), torch.from_numpy(labels).long()


def read_cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    """CIFAR-10 (Krizhevsky 2009) from parquet files with the columns img (an encoded image) and label.

    The pixels are those of the files. A download keeps the original ones (PNG); the copy that our own results come from
    is a lossy JPEG re-encoding, whose accuracies are not strictly comparable with published ones.
    """
    return _read_cifar10_split(folder / CIFAR10["train"]), _read_cifar10_split(
        folder / CIFAR10["test"]
    )


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
        images = np.stack(
            [
                np.asarray(Image.open(io.BytesIO(img)).convert("RGB"))
                for img in table["img"].to_pylist()
            ]
        )
    except (ArrowException, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} must be parquet with the columns img (encoded images of one size) and label"
        ) from error
    labels = table["label"].to_numpy()
    _check(images, labels, (32, 32, 3), file, range(CLASSES["cifar10"]))
    mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).reshape(
        2, 3, 1, 1
    )
    x = (
        torch.from_numpy(images)
        .permute(0, 3, 1, 2)
        .contiguous()
        .float()
        .div_(255)
        .sub_(mean)
        .div_(std)
    )
    return x, torch.from_numpy(labels.astype(np.int64))


def read_digit_characters() -> tuple[Tensor, Tensor]:
    """The digits inside scikit-learn as characters: 3, 4 and 7 in four rotations for testing, the others for training.

    Those in four rotations and their mirror images, each drawn by two hands: 112 characters of 56 kinds, in an order in
    which any 56 in a row are of different kinds. The hands of a kind share no image. Upside down a 6 is a 9, and a 0 or
    an 8 is itself: 3, 4 and 7 are the digits that rotations tell apart best.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    drawings = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)

    def characters(digits: Iterable[int], hands: int, turns: int) -> Tensor:
        found = []
        for hand in range(hands):
            for turn in range(turns):  # by 90 degrees; from the fourth on mirrored
                first = (4 * hand + turn) % 8 * DRAWINGS
                for digit in digits:
                    own = drawings[labels == digit][first : first + DRAWINGS].rot90(turn, (-2, -1))
                    found.append(own.flip(-1) if turn >= 4 else own)
        return torch.stack(found)

    return characters((0, 1, 2, 5, 6, 8, 9), hands=2, turns=8), characters(
        (3, 4, 7), hands=1, turns=4
    )


def read_omniglot(folder: Path) -> tuple[Tensor, Tensor]:
    """Omniglot (Lake et al. 2015), 28x28 with ink 1 on 0: the 964 characters of the 30 background alphabets and the 659
    of the 20 evaluation alphabets, sorted by alphabet.

    From an npz file with images (N, 28, 28), ink 0 on 255; the number of each one's alphabet and character; and which
    alphabets are the background.
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
    order = np.argsort(character, kind="stable")
    drawings = 1 - torch.from_numpy(images[order]).float().div_(255).reshape(
        -1, DRAWINGS, 1, 28, 28
    )
    seen = torch.from_numpy(background[alphabet[order[::DRAWINGS]]] == 1)
    return drawings[seen], drawings[~seen]


def read_idx(file: Path, axes: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in a gzipped idx file: magic 0x0800 + axes, big-endian sizes, then the bytes."""
    try:
        content = gzip.decompress(file.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a complete gzip file") from error
    magic, *shape = (int.from_bytes(content[4 * i : 4 * i + 4]) for i in range(axes + 1))
    if magic != 0x0800 + axes:
        raise ValueError(
            f"{file} begins with {magic:#010x}; it must begin with the idx magic number {0x0800 + axes:#010x}"
        )
    body = np.frombuffer(
        bytearray(content[4 * (axes + 1) :]), dtype=np.uint8
    )  # a bytearray is writable, for torch
    if len(body) != math.prod(shape):
        raise ValueError(
            f"{file} holds {len(body)} bytes; its sizes {shape} need {math.prod(shape)}"
        )
    return body.reshape(shape)


def _check(
    inputs: NDArray[Any], labels: NDArray[Any], shape: tuple[int, ...], file: Path, allowed: range
) -> None:
    needed = (len(labels), *shape)
    if inputs.shape != needed:
        raise ValueError(
            f"{file} has {len(labels)} labels, which need inputs of shape {needed}, not {inputs.shape}"
        )
    wrong = np.flatnonzero(~np.isin(labels, allowed))
    if len(wrong):
        raise ValueError(
            f"{file} has the label {labels[wrong[0]]} at row {wrong[0]}; it must be {allowed[0]} to {allowed[-1]}"
        )


def download(source: Source, folder: Path) -> None:
    """Fetch, and put the files that `source.read` reads into `folder`, each of them whole."""
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
    """The inverse of `read_idx`."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">u4")
    file.write_bytes(gzip.compress(header.tobytes() + array.tobytes()))


def _write_cifar10(rows: Rows, folder: Path) -> None:
    from pyarrow import parquet, table

    def png(image: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    for split, file in CIFAR10.items():
        pairs = [(png(row["img"]), row["label"]) for row in rows[split]]
        parquet.write_table(
            table({"img": [img for img, _ in pairs], "label": [y for _, y in pairs]}), folder / file
        )


def _fetch_covertype() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import fetch_covtype

    with (
        tempfile.TemporaryDirectory() as unused,
        warnings.catch_warnings(),
    ):  # its own cache is larger than our file
        warnings.simplefilter("ignore", UserWarning)  # that it tries again
        return fetch_covtype(data_home=unused, return_X_y=True, n_retries=1, delay=0.1)  # type: ignore[no-any-return]


def _write_covertype(arrays: tuple[NDArray[Any], NDArray[Any]], folder: Path) -> None:
    X, y = arrays
    np.savez_compressed(folder / COVERTYPE, X=X.astype(np.int16), y=y.astype(np.uint8))


def _fetch_omniglot() -> list[zipfile.ZipFile]:
    archives = []
    for name in ("images_background", "images_evaluation"):
        with urlopen(f"{OMNIGLOT_ZIPS}/{name}.zip", timeout=60) as answer:
            content = answer.read()
        try:
            archives.append(zipfile.ZipFile(io.BytesIO(content)))
        except zipfile.BadZipFile as error:
            raise OSError(f"what came from {answer.url} is not a zip file") from error
    return archives


def _write_omniglot(archives: list[zipfile.ZipFile], folder: Path) -> None:
    """Every 105x105 image as the exact area average of 28x28: each pixel repeated 4x4, then means of 15x15."""
    from PIL import Image

    average = np.eye(28).repeat(15, 1) @ np.eye(105).repeat(4, 0) / 15
    drawings = []  # (alphabet, character, file, whether background, pixels)
    for archive, background in zip(archives, (1, 0), strict=True):
        for path in archive.namelist():
            if path.endswith(".png"):
                ink = np.asarray(
                    Image.open(io.BytesIO(archive.read(path))).convert("L"), dtype=float
                )
                pixels = np.rint(average @ ink @ average.T).astype(np.uint8)
                drawings.append((*path.split("/")[-3:], background, pixels))
    drawings.sort(key=lambda drawing: drawing[:3])
    names, alphabet = np.unique([drawing[0] for drawing in drawings], return_inverse=True)
    character = np.unique(
        [drawing[0] + "/" + drawing[1] for drawing in drawings], return_inverse=True
    )[1]
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
