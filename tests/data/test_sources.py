"""Sources of data sets: what their files hold is read, and other files are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedbilevel import data
from fedbilevel.data import sources
from tests.support import stored_data
from tests.support.downloads import no_network, serve_images

# Digits


def test_digits() -> None:
    digits = data.load("digits")
    x, y = digits.train
    x_test, y_test = digits.test
    assert (digits.name, digits.classes) == ("digits", 10)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.shape[1:] == x_test.shape[1:] == (1, 8, 8)
    assert len(x) + len(x_test) == len(y) + len(y_test) == 1797
    moments = torch.stack([x.mean(), x.std()])
    torch.testing.assert_close(moments, torch.tensor([0.0, 1.0]), atol=1e-5, rtol=0)
    share = y_test.bincount() / torch.cat([y, y_test]).bincount()
    assert (share - 0.2).abs().max() < 0.003


def test_the_split_of_digits_holds_every_image_once() -> None:
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    x = torch.cat([digits.train[0], digits.test[0]]).flatten(1)
    y = torch.cat([digits.train[1], digits.test[1]])
    levels = ((x - x.min()) / (x.max() - x.min()) * 16).round().to(torch.int64)
    rows = torch.cat([levels, y.unsqueeze(1)], 1).tolist()
    images, labels = load_digits(return_X_y=True)
    assert sorted(rows) == sorted(np.column_stack([images, labels]).astype(int).tolist())


def test_the_split_of_digits_is_always_the_same() -> None:
    _, (first, _) = sources.read_digits()
    _, (second, _) = sources.read_digits()
    assert torch.equal(first, second)


def test_digit_characters_differ_in_kind_and_share_no_image() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    digit_of = {}
    for image, label in zip(images.tolist(), labels.tolist(), strict=True):
        digit_of[tuple(image)] = label

    def kind(character: Tensor) -> tuple[tuple[int, int], set[tuple[float, ...]]]:
        """Return (digit, turn), and the images of scikit-learn; turns above 3 are mirrored."""
        for turn in range(8):
            upright = character.flip(-1) if turn >= 4 else character
            upright = upright.rot90(-turn, (-2, -1))
            originals = [tuple(image) for image in (16 * upright).flatten(1).tolist()]
            if originals[0] in digit_of:
                (digit,) = {digit_of[image] for image in originals}
                return (digit, turn), set(originals)
        raise AssertionError("not one of scikit-learn's digits")

    digits = data.characters("digits")
    assert digits.train.shape == (112, 20, 1, 8, 8)
    assert digits.test.shape == (12, 20, 1, 8, 8)
    test_kinds = [kind(character)[0] for character in digits.test]
    assert sorted(test_kinds) == [(digit, turn) for digit in (3, 4, 7) for turn in range(4)]
    kinds, image_sets = zip(*map(kind, digits.train), strict=True)
    all_kinds = [(digit, turn) for digit in (0, 1, 2, 5, 6, 8, 9) for turn in range(8)]
    assert sorted(kinds[:56]) == all_kinds
    assert sorted(kinds[30:86]) == all_kinds
    for first, second in zip(image_sets[:56], image_sets[56:], strict=True):
        assert len(first | second) == 40


# MNIST


def write_mnist(root: Path, file: str, content: bytes) -> None:
    (root / "mnist" / file).write_bytes(gzip.compress(content))


def test_mnist_files(mnist_root: Path, mnist_pixels: dict[str, Any]) -> None:
    mnist = data.load("mnist", mnist_root)
    for (x, y), split in ((mnist.train, "train"), (mnist.test, "t10k")):
        expected = (torch.from_numpy(mnist_pixels[split]).double() / 255 - 0.1307) / 0.3081
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(x, expected.float().unsqueeze(1))
        assert y.tolist() == [9, 0, 4, 1, 2][: len(y)]


def test_a_wrong_magic_number_is_refused(mnist_root: Path) -> None:
    header = struct.pack(">IIII", 0x801, 5, 28, 28)
    write_mnist(mnist_root, "train-images-idx3-ubyte.gz", header + bytes(5 * 784))
    message = r"train-images-idx3-ubyte.gz begins with 0x00000801;.* 0x00000803"
    with pytest.raises(ValueError, match=message):
        data.load("mnist", mnist_root)


def test_missing_pixels_are_refused(mnist_root: Path) -> None:
    header = struct.pack(">IIII", 0x803, 3, 28, 28)
    write_mnist(mnist_root, "t10k-images-idx3-ubyte.gz", header + bytes(3 * 784 - 1))
    message = r"t10k-images-idx3-ubyte.gz holds 2351 bytes; its sizes .* need 2352"
    with pytest.raises(ValueError, match=message):
        data.load("mnist", mnist_root)


def test_a_truncated_gzip_file_is_refused(mnist_root: Path) -> None:
    file = mnist_root / "mnist" / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz is not a complete gzip file"):
        data.load("mnist", mnist_root)


def test_another_number_of_labels_than_images_is_refused(mnist_root: Path) -> None:
    header = struct.pack(">II", 0x801, 4)
    write_mnist(mnist_root, "train-labels-idx1-ubyte.gz", header + bytes(4))
    message = r"train-labels-idx1-ubyte.gz has 4 labels, .* \(4, 28, 28\), not \(5, 28, 28\)"
    with pytest.raises(ValueError, match=message):
        data.load("mnist", mnist_root)


def test_a_label_out_of_range_is_refused(mnist_root: Path) -> None:
    header = struct.pack(">II", 0x801, 5)
    write_mnist(mnist_root, "train-labels-idx1-ubyte.gz", header + bytes([0, 1, 10, 3, 4]))
    message = r"train-labels-idx1-ubyte.gz has the label 10 at row 2; it must be 0 to 9"
    with pytest.raises(ValueError, match=message):
        data.load("mnist", mnist_root)


def test_downloaded_mnist_is_stored_and_read_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    images = serve_images(monkeypatch, "ylecun/mnist", "image", (28, 28))
    mnist = data.load("mnist")
    files = [path.name for path in (cache / "mnist").iterdir()]
    assert sorted(files) == sorted(sources.SOURCES["mnist"].files)
    monkeypatch.setitem(sys.modules, "datasets", None)
    stored_data.forget_loaded()
    again = data.load("mnist")
    assert torch.equal(again.train[0], mnist.train[0])
    assert again.test[1].tolist() == [3, 0, 9]
    restored = (again.test[0].squeeze(1) * 0.3081 + 0.1307) * 255
    original = torch.from_numpy(images["test"]).float()
    torch.testing.assert_close(restored, original, atol=1e-3, rtol=0)


def test_an_interrupted_download_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    hub = SimpleNamespace(load_dataset=lambda repository: {"train": []})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(ValueError, match="need at least one array"):
        data.load("mnist")
    assert list((cache / "mnist").iterdir()) == []


@stored_data.needs("mnist")
def test_real_mnist(caplog: pytest.LogCaptureFixture) -> None:
    stored_data.forget_loaded()
    mnist = data.load("mnist", stored_data.FOLDER)
    x, y = mnist.train
    x_test, y_test = mnist.test
    assert (x.shape, x_test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert y_test.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3
    assert not caplog.messages, "another copy than that of our results"


# CIFAR-10


def test_downloaded_cifar10_keeps_the_pixels_and_normalises_each_channel(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    images = serve_images(monkeypatch, "uoft-cs/cifar10", "img", (32, 32, 3))
    x, y = data.load("cifar10").train
    files = [path.name for path in (cache / "cifar10").iterdir()]
    assert sorted(files) == ["test.parquet", "train.parquet"]
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, [3, 0, 9])
    normalised = (images["train"] / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    expected = torch.from_numpy(normalised).float().permute(0, 3, 1, 2)
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)


def test_a_cifar10_label_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_images(monkeypatch, "uoft-cs/cifar10", "img", (32, 32, 3), labels=(3, -1))
    message = r"train.parquet has the label -1 at row 1; it must be 0 to 9"
    with pytest.raises(ValueError, match=message):
        data.load("cifar10")


@pytest.mark.parametrize(
    "columns", [{"image": [b""], "label": [1]}, {"img": [b"not an image"], "label": [1]}]
)
def test_other_parquet_files_are_refused(tmp_path: Path, columns: dict[str, Any]) -> None:
    from pyarrow import parquet, table

    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):
        parquet.write_table(table(columns), tmp_path / "cifar10" / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"train.parquet must be parquet with the columns img"):
        data.load("cifar10", tmp_path)


@stored_data.needs("cifar10")
def test_real_cifar10() -> None:
    cifar10 = data.load("cifar10", stored_data.FOLDER)
    x, y = cifar10.train
    x_test, y_test = cifar10.test
    assert (x.shape, x_test.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert y.bincount().tolist() == [5000] * 10
    assert y_test.bincount().tolist() == [1000] * 10
    assert x.mean((0, 2, 3)).abs().max() < 0.01
    # In a copy that was re-encoded as JPEG, deviations are slightly below 1.
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.01
    stored_data.forget_loaded()  # 700 MB


# Breast cancer and Covertype


def test_breast_cancer_is_standardised_and_split_by_class() -> None:
    from sklearn.datasets import load_breast_cancer

    loaded = data.load("breast-cancer")
    x, y = loaded.train
    x_test, y_test = loaded.test
    assert (loaded.classes, x.shape, x_test.shape) == (2, (456, 30), (113, 30))
    assert y.bincount().tolist() == [170, 286]
    assert y_test.bincount().tolist() == [42, 71]
    torch.testing.assert_close(x.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(30))
    features, labels = load_breast_cancer(return_X_y=True)
    standardised = torch.cat([x, x_test]).double()
    for column in (0, 29):  # the same values, up to shift and scale
        ours = standardised[:, column].sort().values
        original = torch.from_numpy(features[:, column]).sort().values
        assert float(torch.corrcoef(torch.stack([ours, original]))[0, 1]) > 1 - 1e-9
    assert int(torch.cat([y, y_test]).sum()) == labels.sum()


def write_covertype(folder: Path, X: Any, y: Any) -> Path:
    (folder / "covtype").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "covtype" / "covtype.npz", X=X, y=y)
    return folder


def random_covertype(rows: int = 100) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    measured = rng.integers(-50, 3000, (rows, 10))
    indicators = rng.integers(0, 2, (rows, 44))
    X = np.concatenate([measured, indicators], 1).astype(np.int16)
    return X, (1 + np.arange(rows) % 7).astype(np.uint8)


def test_covertype_standardises_measurements_and_leaves_indicators(tmp_path: Path) -> None:
    X, y = random_covertype()
    X[:, 53] = y  # so that a row shows its label
    loaded = data.load("covertype", write_covertype(tmp_path, X, y))
    x, labels = loaded.train
    x_test, test_labels = loaded.test
    assert (loaded.classes, len(x) + len(x_test)) == (7, 100)
    assert test_labels.bincount().tolist() == [3] * 7
    torch.testing.assert_close(x[:, :10].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, :10].std(0), torch.ones(10))
    assert torch.equal(torch.cat([x, x_test])[:, 53], torch.cat([labels, test_labels]) + 1.0)
    rows = torch.cat([x, x_test])[:, 10:].tolist()
    assert sorted(rows) == sorted(X[:, 10:].tolist())
    assert rows != X[:, 10:].tolist()


def test_downloaded_covertype_is_stored_and_read_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    X, y = random_covertype()
    arrays = X.astype(float), y.astype(np.int32)
    monkeypatch.setattr("sklearn.datasets.fetch_covtype", lambda **options: arrays)
    first = data.load("covertype")
    assert [path.name for path in (cache / "covtype").iterdir()] == ["covtype.npz"]
    monkeypatch.setattr("sklearn.datasets.fetch_covtype", no_network)
    stored_data.forget_loaded()
    again = data.load("covertype")
    assert torch.equal(again.train[0], first.train[0])
    assert torch.equal(again.test[1], first.test[1])


def test_other_covertype_files_are_refused(tmp_path: Path) -> None:
    X, y = random_covertype()
    message = r"covtype.npz has the label 0 at row 0; it must be 1 to 7"
    with pytest.raises(ValueError, match=message):
        data.load("covertype", write_covertype(tmp_path, X, y - 1))
    message = r"covtype.npz has 99 labels, which need inputs of shape \(99, 54\)"
    with pytest.raises(ValueError, match=message):
        data.load("covertype", write_covertype(tmp_path, X, y[1:]))
    message = r"covtype.npz must be an npz file with the arrays X and y"
    np.savez(tmp_path / "covtype" / "covtype.npz", features=X, y=y)
    with pytest.raises(ValueError, match=message):
        data.load("covertype", tmp_path)
    (tmp_path / "covtype" / "covtype.npz").write_bytes(b"PK, but no archive")
    with pytest.raises(ValueError, match=message):
        data.load("covertype", tmp_path)


@stored_data.needs("covertype")
def test_real_covertype() -> None:
    covertype = data.load("covertype", stored_data.FOLDER)
    x, y = covertype.train
    x_test, y_test = covertype.test
    assert (x.shape, x_test.shape) == ((464810, 54), (116202, 54))
    counts = [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert torch.cat([y, y_test]).bincount().tolist() == counts
    shares = y[:10000].bincount() / 10000
    assert (shares - torch.tensor(counts) / 581012).abs().max() < 0.02  # rows are shuffled
    assert torch.equal(x[:, 14:].sum(1), torch.ones(len(x)))
    stored_data.forget_loaded()  # 125 MB


# Omniglot

BACKGROUND = {"A/character01": 1, "A/character02": 1, "B/character01": 0}


def write_omniglot(folder: Path, **changes: Any) -> Any:
    """Write a small Omniglot file and return its images; an array that is None is left out."""
    (folder / "omniglot").mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(3).integers(0, 256, (60, 28, 28)).astype(np.uint8)
    character = (np.arange(60) % 3).astype(np.int16)  # not sorted
    arrays = {
        "images": images,
        "character": character,
        "alphabet": (character == 2).astype(np.uint8),
        "alphabet_is_background": np.array([1, 0], dtype=np.uint8),
        **changes,
    }
    present = {name: array for name, array in arrays.items() if array is not None}
    np.savez(folder / "omniglot" / "omniglot28.npz", **present)
    return images


def test_omniglot_files(tmp_path: Path) -> None:
    images = write_omniglot(tmp_path)
    omniglot = data.characters("omniglot", tmp_path)
    assert omniglot.train.shape == (2, 20, 1, 28, 28)
    torch.testing.assert_close(omniglot.train[1, :, 0], 1 - torch.from_numpy(images[1::3]) / 255)
    torch.testing.assert_close(omniglot.test[0, :, 0], 1 - torch.from_numpy(images[2::3]) / 255)
    assert data.characters("omniglot", str(tmp_path)) is omniglot


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"alphabet": None},
            "must be an npz file with the arrays images, alphabet, character and "
            "alphabet_is_background",
        ),
        (
            {"images": np.zeros((60, 105, 105))},
            r"has 60 labels, which need inputs of shape \(60, 28, 28\), not \(60, 105",
        ),
        ({"alphabet": np.full(60, 2)}, "has the label 2 at row 0; it must be 0 to 1"),
        ({"character": np.arange(60) % 4}, "has 15 drawings of character 0; there must be 20"),
    ],
)
def test_other_omniglot_files_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_omniglot(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"omniglot28.npz {message}"):
        data.characters("omniglot", tmp_path)


def test_downloaded_omniglot_is_averaged_stored_and_read_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    pixels = {}
    for number, name in enumerate(BACKGROUND):
        pixels[name] = np.random.default_rng(number).random((20, 105, 105)) < 0.5

    archives = {}
    for part in sources.OMNIGLOT_ZIPS:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for number, (name, background) in enumerate(BACKGROUND.items()):
                if ("background" in part) != background:
                    continue
                for drawer, drawing in enumerate(pixels[name]):
                    png = io.BytesIO()
                    Image.fromarray(drawing).save(png, "PNG")
                    file = f"images/{name}/{number:04d}_{drawer:02d}.png"
                    archive.writestr(file, png.getvalue())
        archives[part] = content.getvalue()

    def open_url(url: str, timeout: float) -> io.BytesIO:
        response = io.BytesIO(archives[Path(url).stem])
        response.url = url  # type: ignore[attr-defined]
        return response

    monkeypatch.setattr(sources, "urlopen", open_url)
    with pytest.raises(FileNotFoundError, match=r"images_background.zip has the MD5 \w+, not 68d2"):
        data.characters("omniglot")
    assert not list(cache.rglob("*.npz"))
    sums = {name: hashlib.md5(zipped).hexdigest() for name, zipped in archives.items()}
    monkeypatch.setattr(sources, "OMNIGLOT_ZIPS", sums)
    first = data.characters("omniglot")
    assert [path.name for path in (cache / "omniglot").iterdir()] == ["omniglot28.npz"]
    for drawings, original in zip([*first.train, *first.test], pixels.values(), strict=True):
        means = original.repeat(4, 1).repeat(4, 2).reshape(20, 28, 15, 28, 15).mean((2, 4))
        assert (drawings[:, 0] - (1 - torch.from_numpy(means))).abs().max() <= 0.501 / 255
    stored_data.forget_loaded()
    monkeypatch.setattr(sources, "urlopen", no_network)
    assert torch.equal(data.characters("omniglot").test, first.test)


@stored_data.needs("omniglot")
def test_real_omniglot() -> None:
    omniglot = data.characters("omniglot", stored_data.FOLDER)
    assert omniglot.train.shape == (964, 20, 1, 28, 28)
    assert omniglot.test.shape == (659, 20, 1, 28, 28)
    assert 0.07 < omniglot.train.mean() < 0.09  # little ink, and it is 1
    means = torch.cat([omniglot.train, omniglot.test]).flatten(2).mean(1)
    assert len(means.unique(dim=0)) == 1623
