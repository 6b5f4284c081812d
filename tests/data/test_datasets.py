"""Data sets by name: where files are searched for, what is cached, what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedbilevel import data
from tests.support.downloads import no_network


def test_names() -> None:
    assert data.names() == ["breast-cancer", "cifar10", "covertype", "digits", "mnist", "omniglot"]


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ValueError, match=r"name is 'mnsit' \(did you mean 'mnist'\?\); .*'cifar10'"
    ):
        data.load("mnsit")


def test_a_data_set_is_loaded_once(mnist_root: Path) -> None:
    assert data.load("mnist", mnist_root) is data.load("mnist", str(mnist_root))


def test_files_are_searched_for_in_data_dir_environment_variable_and_cache(
    mnist_root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mnist = data.load("mnist", mnist_root)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(mnist_root))
    assert data.load("mnist") is mnist
    (tmp_path / "elsewhere").mkdir()
    assert data.load("mnist", tmp_path / "elsewhere") is mnist
    monkeypatch.delenv("FEDBILEVEL_DATA")
    cache.mkdir(parents=True)
    (mnist_root / "mnist").rename(cache / "mnist")
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
def test_missing_files_are_reported_with_the_folders_searched_and_what_to_do(
    name: str, file: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.create_connection", no_network)
    load = data.characters if name == "omniglot" else data.load
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(FileNotFoundError) as error:
        load(name, tmp_path / "elsewhere")
    message = str(error.value)
    folder = file.split("/")[0]
    assert str(tmp_path / "elsewhere" / folder) in message
    assert str(cache / folder) in message
    for part in ("FEDBILEVEL_DATA", "--data-dir", file):
        assert part in message
    assert "\n" not in message


def test_a_data_dir_that_does_not_exist_is_refused(
    mnist_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(mnist_root))
    with pytest.raises(FileNotFoundError, match=r"elsewhere'; it must be a folder that exists$"):
        data.load("mnist", tmp_path / "elsewhere")


def test_without_a_network_files_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=no_network))
    with pytest.raises(FileNotFoundError, match="no route to the hub"):
        data.load("mnist")
