"""Data sets: what is read is what is in the files, and files that are not what they should be are refused."""

import gzip
import io
import os
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import platformdirs
import pytest
import torch
from PIL import Image

from fedbilevel import data
from fedbilevel.data import sources

REAL = os.environ.get("FEDBILEVEL_DATA")


def holds(name: str) -> bool:
    source = sources.SOURCES[name]
    return REAL is not None and all(
        Path(REAL, source.folder, file).is_file() for file in source.files
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty user's cache, no $FEDBILEVEL_DATA, and a `datasets` package that cannot be imported."""
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path / "cache" / "fedbilevel"


@pytest.fixture
def pixels():
    return {
        split: np.random.default_rng(7).integers(0, 256, (n, 28, 28))
        for split, n in (("train", 5), ("t10k", 3))
    }


@pytest.fixture
def root(tmp_path, pixels):
    """A folder with a tiny MNIST, written by hand."""
    folder = tmp_path / "files" / "mnist"
    folder.mkdir(parents=True)
    for split, images in pixels.items():
        n = len(images)
        write(
            folder / f"{split}-images-idx3-ubyte.gz",
            struct.pack(">IIII", 0x803, n, 28, 28) + images.astype("u1").tobytes(),
        )
        write(
            folder / f"{split}-labels-idx1-ubyte.gz",
            struct.pack(">II", 0x801, n) + bytes([9, 0, 4, 1, 2][:n]),
        )
    return folder.parent


def write(file, content):
    file.write_bytes(gzip.compress(content))


def test_names():
    assert data.names() == ["breast-cancer", "cifar10", "covertype", "digits", "mnist", "omniglot"]


def test_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match=r"name is 'mnsit'.*'mnist'.*did you mean 'mnist'\?"):
        data.load("mnsit")


def test_digits():
    digits = data.load("digits")
    (x, y), (x_test, y_test) = digits.train, digits.test
    assert (digits.name, digits.classes) == ("digits", 10)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.shape[1:] == x_test.shape[1:] == (1, 8, 8)
    assert len(x) + len(x_test) == len(y) + len(y_test) == 1797
    torch.testing.assert_close(
        torch.stack([x.mean(), x.std()]), torch.tensor([0.0, 1.0]), atol=1e-5, rtol=0
    )
    share = y_test.bincount() / torch.cat([y, y_test]).bincount()
    assert (share - 0.2).abs().max() < 0.003


def test_digits_split_holds_every_image_once():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    x = torch.cat([digits.train[0], digits.test[0]]).flatten(1)
    levels = ((x - x.min()) / (x.max() - x.min()) * 16).round().to(torch.int64)
    rows = torch.cat(
        [levels, torch.cat([digits.train[1], digits.test[1]]).unsqueeze(1)], 1
    ).tolist()
    images, labels = load_digits(return_X_y=True)
    assert sorted(rows) == sorted(np.column_stack([images, labels]).astype(int).tolist())


def test_digits_split_is_always_the_same():
    data._read.cache_clear()
    first = data.load("digits")
    data._read.cache_clear()
    assert torch.equal(first.test[0], data.load("digits").test[0])


def test_mnist_files(root, pixels):
    mnist = data.load("mnist", root)
    for (x, y), split in ((mnist.train, "train"), (mnist.test, "t10k")):
        expected = (torch.from_numpy(pixels[split]).double() / 255 - 0.1307) / 0.3081
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(x, expected.float().unsqueeze(1))
        assert y.tolist() == [9, 0, 4, 1, 2][: len(y)]


def test_loading_is_cached(root):
    assert data.load("mnist", root) is data.load("mnist", str(root))


def test_where_files_are_looked_for(root, cache, monkeypatch, tmp_path):
    mnist = data.load("mnist", root)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(root))
    assert data.load("mnist") is data.load("mnist", tmp_path / "elsewhere") is mnist
    monkeypatch.delenv("FEDBILEVEL_DATA")
    cache.mkdir(parents=True)
    (root / "mnist").rename(cache / "mnist")
    assert torch.equal(data.load("mnist").train[0], mnist.train[0])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "mnist/train"),
        ("cifar10", "cifar10/train"),
        ("covertype", "covtype/covtype.npz"),
        ("omniglot", "omniglot/omniglot28.npz"),
    ],
)
def test_missing_files_say_where_was_looked_and_what_to_do(
    name, file, cache, tmp_path, monkeypatch
):
    monkeypatch.setattr("socket.create_connection", no_network)
    folder = file.split("/")[0]
    with pytest.raises(FileNotFoundError) as error:
        (data.characters if name == "omniglot" else data.load)(name, tmp_path / "elsewhere")
    message = str(error.value)
    for part in (
        tmp_path / "elsewhere" / folder,
        cache / folder,
        "FEDBILEVEL_DATA",
        "--data-dir",
        file,
    ):
        assert str(part) in message
    assert "\n" not in message


def no_network(*asked, **options):
    raise ConnectionError("no route to the hub")


def test_no_network_is_missing_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=no_network))
    with pytest.raises(FileNotFoundError, match="no route to the hub"):
        data.load("mnist")


def broken(root, file, content):
    write(root / "mnist" / file, content)
    return root


def test_wrong_magic_is_refused(root):
    broken(
        root, "train-images-idx3-ubyte.gz", struct.pack(">IIII", 0x801, 5, 28, 28) + bytes(5 * 784)
    )
    with pytest.raises(
        ValueError, match=r"train-images-idx3-ubyte.gz begins with 0x00000801;.* 0x00000803"
    ):
        data.load("mnist", root)


def test_missing_pixels_are_refused(root):
    broken(
        root,
        "t10k-images-idx3-ubyte.gz",
        struct.pack(">IIII", 0x803, 3, 28, 28) + bytes(3 * 784 - 1),
    )
    with pytest.raises(
        ValueError, match=r"t10k-images-idx3-ubyte.gz holds 2351 bytes; its sizes .* need 2352"
    ):
        data.load("mnist", root)


def test_truncated_gzip_is_refused(root):
    file = root / "mnist" / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz is not a complete gzip file"):
        data.load("mnist", root)


def test_other_count_of_labels_is_refused(root):
    broken(root, "train-labels-idx1-ubyte.gz", struct.pack(">II", 0x801, 4) + bytes(4))
    with pytest.raises(
        ValueError,
        match=r"train-labels-idx1-ubyte.gz has 4 labels, .* \(4, 28, 28\), not \(5, 28, 28\)",
    ):
        data.load("mnist", root)


def test_label_out_of_range_is_refused(root):
    broken(
        root, "train-labels-idx1-ubyte.gz", struct.pack(">II", 0x801, 5) + bytes([0, 1, 10, 3, 4])
    )
    with pytest.raises(
        ValueError, match=r"train-labels-idx1-ubyte.gz has the label 10 at row 2; it must be 0 to 9"
    ):
        data.load("mnist", root)


def hub(monkeypatch, repository, column, shape, labels=(3, 0, 9)):
    """A `datasets` package whose `load_dataset` gives these images; returns them by split."""
    rng = np.random.default_rng(1)
    images = {
        split: rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
        for split in ("train", "test")
    }

    def load_dataset(asked):
        assert asked == repository
        return {
            split: [
                {column: Image.fromarray(x), "label": y}
                for x, y in zip(images[split], labels, strict=True)
            ]
            for split in images
        }

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return images


def test_downloaded_mnist_is_stored_and_read_again(monkeypatch, cache):
    images = hub(monkeypatch, "ylecun/mnist", "image", (28, 28))
    mnist = data.load("mnist")
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(
        sources.SOURCES["mnist"].files
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    data._read.cache_clear()
    again = data.load("mnist")
    assert torch.equal(again.train[0], mnist.train[0])
    assert again.test[1].tolist() == [3, 0, 9]
    restored = (again.test[0].squeeze(1) * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(
        restored, torch.from_numpy(images["test"]).float(), atol=1e-3, rtol=0
    )


def test_downloaded_cifar10_keeps_the_pixels_and_normalises_each_channel(monkeypatch, cache):
    images = hub(monkeypatch, "uoft-cs/cifar10", "img", (32, 32, 3))
    x, y = data.load("cifar10").train
    assert sorted(path.name for path in (cache / "cifar10").iterdir()) == [
        "test.parquet",
        "train.parquet",
    ]
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, [3, 0, 9])
    expected = (images["train"] / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    torch.testing.assert_close(
        x, torch.from_numpy(expected).float().permute(0, 3, 1, 2), atol=1e-5, rtol=1e-5
    )


def test_interrupted_download_leaves_nothing(monkeypatch, cache):
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda repository: {"train": []})
    )
    with pytest.raises(ValueError, match="need at least one array"):
        data.load("mnist")
    assert list((cache / "mnist").iterdir()) == []


def test_cifar10_label_out_of_range_is_refused(monkeypatch):
    hub(monkeypatch, "uoft-cs/cifar10", "img", (32, 32, 3), labels=(3, -1))
    with pytest.raises(
        ValueError, match=r"train.parquet has the label -1 at row 1; it must be 0 to 9"
    ):
        data.load("cifar10")


@pytest.mark.parametrize(
    "columns", [{"image": [b""], "label": [1]}, {"img": [b"not an image"], "label": [1]}]
)
def test_other_parquet_is_refused(tmp_path, columns):
    from pyarrow import parquet, table

    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):
        parquet.write_table(table(columns), tmp_path / "cifar10" / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"train.parquet must be parquet with the columns img"):
        data.load("cifar10", tmp_path)


def test_breast_cancer_is_standardised_and_split_by_class():
    from sklearn.datasets import load_breast_cancer

    (x, y), (x_test, y_test) = (loaded := data.load("breast-cancer")).train, loaded.test
    assert (loaded.classes, x.shape, x_test.shape) == (2, (456, 30), (113, 30))
    assert (y_test.bincount().tolist(), y.bincount().tolist()) == ([42, 71], [170, 286])
    torch.testing.assert_close(x.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(30))
    raw, labels = load_breast_cancer(return_X_y=True)
    held = torch.cat([x, x_test]).double()
    raw = torch.from_numpy(raw)
    for column in (0, 29):  # the same values, moved and scaled
        order, back = held[:, column].argsort(), raw[:, column].argsort()
        assert (
            float(torch.corrcoef(torch.stack([held[order, column], raw[back, column]]))[0, 1])
            > 1 - 1e-9
        )
    assert int(torch.cat([y, y_test]).sum()) == labels.sum()


def covertype(folder, X, y):
    (folder / "covtype").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "covtype" / "covtype.npz", X=X, y=y)
    return folder


def forest(rows=100):
    rng = np.random.default_rng(2)
    X = np.concatenate(
        [rng.integers(-50, 3000, (rows, 10)), rng.integers(0, 2, (rows, 44))], 1
    ).astype(np.int16)
    return X, (1 + np.arange(rows) % 7).astype(np.uint8)


def test_covertype_standardises_what_is_measured_and_leaves_indicators(tmp_path):
    X, y = forest()
    X[:, 53] = y  # a column from which to tell each row's label
    loaded = data.load("covertype", covertype(tmp_path, X, y))
    (x, labels), (x_test, test_labels) = loaded.train, loaded.test
    assert (loaded.classes, len(x) + len(x_test)) == (7, 100)
    assert test_labels.bincount().tolist() == [3] * 7
    torch.testing.assert_close(x[:, :10].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, :10].std(0), torch.ones(10))
    assert torch.equal(torch.cat([x, x_test])[:, 53], torch.cat([labels, test_labels]) + 1.0)
    rows = torch.cat([x, x_test])[:, 10:].tolist()
    assert sorted(rows) == sorted(X[:, 10:].tolist())
    assert rows != X[:, 10:].tolist()


def test_downloaded_covertype_is_stored_and_read_again(monkeypatch, cache):
    X, y = forest()
    monkeypatch.setattr(
        "sklearn.datasets.fetch_covtype", lambda **options: (X.astype(float), y.astype(np.int32))
    )
    first = data.load("covertype")
    assert [path.name for path in (cache / "covtype").iterdir()] == ["covtype.npz"]
    monkeypatch.setattr("sklearn.datasets.fetch_covtype", no_network)
    data._read.cache_clear()
    again = data.load("covertype")
    assert torch.equal(again.train[0], first.train[0])
    assert torch.equal(again.test[1], first.test[1])


def test_other_covertype_files_are_refused(tmp_path):
    X, y = forest()
    with pytest.raises(
        ValueError, match=r"covtype.npz has the label 0 at row 0; it must be 1 to 7"
    ):
        data.load("covertype", covertype(tmp_path, X, y - 1))
    with pytest.raises(
        ValueError, match=r"covtype.npz has 99 labels, which need inputs of shape \(99, 54\)"
    ):
        data.load("covertype", covertype(tmp_path, X, y[1:]))
    np.savez(tmp_path / "covtype" / "covtype.npz", features=X, y=y)
    with pytest.raises(
        ValueError, match=r"covtype.npz must be an npz file with the arrays X and y"
    ):
        data.load("covertype", tmp_path)
    (tmp_path / "covtype" / "covtype.npz").write_bytes(b"PK, but no archive")
    with pytest.raises(
        ValueError, match=r"covtype.npz must be an npz file with the arrays X and y"
    ):
        data.load("covertype", tmp_path)


def test_digit_characters_are_whole_digits_apart_and_hands_share_no_image():
    from sklearn.datasets import load_digits

    where = {
        tuple(image): label
        for image, label in zip(*map(np.ndarray.tolist, load_digits(return_X_y=True)), strict=True)
    }

    def kind(character):
        """(digit, rotation, mirrored), and the images of scikit-learn."""
        for turn in range(8):
            back = (character.flip(-1) if turn >= 4 else character).rot90(-turn, (-2, -1))
            images = [tuple(image) for image in (16 * back).flatten(1).tolist()]
            if images[0] in where:
                (digit,) = {where[image] for image in images}
                return (digit, turn), set(images)
        raise AssertionError("not of scikit-learn's digits")

    digits = data.characters("digits")
    assert (digits.train.shape, digits.test.shape) == ((112, 20, 1, 8, 8), (12, 20, 1, 8, 8))
    tests = [kind(character) for character in digits.test]
    assert sorted(found for found, _ in tests) == [
        (digit, turn) for digit in (3, 4, 7) for turn in range(4)
    ]
    kinds, images = zip(*map(kind, digits.train), strict=True)
    assert (
        sorted(kinds[:56])
        == sorted(kinds[30:86])
        == [(d, turn) for d in (0, 1, 2, 5, 6, 8, 9) for turn in range(8)]
    )
    for one, other in zip(images[:56], images[56:], strict=True):
        assert len(one | other) == 40


OMNIGLOT = {
    "A/character01": 1,
    "A/character02": 1,
    "B/character01": 0,
}  # characters, and which are in the background


def write_omniglot(folder, **changes):
    (folder / "omniglot").mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(3).integers(0, 256, (60, 28, 28)).astype(np.uint8)
    character = (np.arange(60) % 3).astype(np.int16)  # not sorted
    arrays = {
        "images": images,
        "character": character,
        "alphabet": (character == 2).astype(np.uint8),
    }
    arrays |= {"alphabet_is_background": np.array([1, 0], dtype=np.uint8), **changes}
    np.savez(
        folder / "omniglot" / "omniglot28.npz",
        **{name: a for name, a in arrays.items() if a is not None},
    )
    return images


def test_omniglot_files(tmp_path):
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
            "must be an npz file with the arrays images, alphabet, character and alphabet_is_backgr",
        ),
        (
            {"images": np.zeros((60, 105, 105))},
            r"has 60 labels, which need inputs of shape \(60, 28, 28\), not \(60, 105",
        ),
        ({"alphabet": np.full(60, 2)}, "has the label 2 at row 0; it must be 0 to 1"),
        ({"character": np.arange(60) % 4}, "has 15 drawings of character 0; there must be 20"),
    ],
)
def test_other_omniglot_files_are_refused(tmp_path, changes, message):
    write_omniglot(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"omniglot28.npz {message}"):
        data.characters("omniglot", tmp_path)


def test_downloaded_omniglot_is_averaged_stored_and_read_again(monkeypatch, cache):
    pixels = {
        name: np.random.default_rng(i).random((20, 105, 105)) < 0.5
        for i, name in enumerate(OMNIGLOT)
    }

    def answer(url, timeout):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as content:
            for number, (name, background) in enumerate(OMNIGLOT.items()):
                for drawer, drawing in enumerate(
                    pixels[name] if ("background" in url) == background else []
                ):
                    file = io.BytesIO()
                    Image.fromarray(drawing).save(file, "PNG")
                    content.writestr(
                        f"images/{name}/{number:04d}_{drawer:02d}.png", file.getvalue()
                    )
        archive.seek(0)
        archive.url = url
        return archive

    monkeypatch.setattr(sources, "urlopen", answer)
    first = data.characters("omniglot")
    assert [path.name for path in (cache / "omniglot").iterdir()] == ["omniglot28.npz"]
    parts = zip([*first.train, *first.test], pixels.values(), strict=True)
    for drawings, original in parts:
        means = original.repeat(4, 1).repeat(4, 2).reshape(20, 28, 15, 28, 15).mean((2, 4))
        assert (drawings[:, 0] - (1 - torch.from_numpy(means))).abs().max() <= 0.501 / 255
    data._read_characters.cache_clear()
    monkeypatch.setattr(sources, "urlopen", no_network)
    assert torch.equal(data.characters("omniglot").test, first.test)


@pytest.mark.skipif(not holds("omniglot"), reason="$FEDBILEVEL_DATA holds no omniglot")
def test_real_omniglot():
    omniglot = data.characters("omniglot", REAL)
    assert (omniglot.train.shape, omniglot.test.shape) == (
        (964, 20, 1, 28, 28),
        (659, 20, 1, 28, 28),
    )
    assert 0.07 < omniglot.train.mean() < 0.09  # little ink, and it is 1
    means = torch.cat([omniglot.train, omniglot.test]).flatten(2).mean(1)
    assert len(means.unique(dim=0)) == 1623


@pytest.mark.skipif(not holds("mnist"), reason="$FEDBILEVEL_DATA holds no mnist")
def test_real_mnist():
    mnist = data.load("mnist", REAL)
    (x, y), (x_test, y_test) = mnist.train, mnist.test
    assert (x.shape, x_test.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert y_test.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


@pytest.mark.skipif(not holds("cifar10"), reason="$FEDBILEVEL_DATA holds no cifar10")
def test_real_cifar10():
    cifar10 = data.load("cifar10", REAL)
    (x, y), (x_test, y_test) = cifar10.train, cifar10.test
    assert (x.shape, x_test.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert y.bincount().tolist() == [5000] * 10
    assert y_test.bincount().tolist() == [1000] * 10
    assert x.mean((0, 2, 3)).abs().max() < 0.01
    assert (
        x.std((0, 2, 3)) - 1
    ).abs().max() < 0.01  # a copy re-encoded as JPEG is a little below 1
    data._read.cache_clear()  # 700 MB


@pytest.mark.skipif(not holds("covertype"), reason="$FEDBILEVEL_DATA holds no covtype")
def test_real_covertype():
    covertype = data.load("covertype", REAL)
    (x, y), (x_test, y_test) = covertype.train, covertype.test
    assert (x.shape, x_test.shape) == ((464810, 54), (116202, 54))
    counts = [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert torch.cat([y, y_test]).bincount().tolist() == counts
    assert (
        y[:10000].bincount() / 10000 - torch.tensor(counts) / 581012
    ).abs().max() < 0.02  # shuffled
    assert torch.equal(x[:, 14:].sum(1), torch.ones(len(x)))
    data._read.cache_clear()  # 125 MB
