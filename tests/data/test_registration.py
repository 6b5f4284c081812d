"""Data sets that are registered from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedbilevel as fb
from fedbilevel.data import catalogue
from fedbilevel.tasks.classification import load_partitioned


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> fb.data.DataSet:
    monkeypatch.setattr(catalogue, "REGISTERED", {})
    monkeypatch.setattr("fedbilevel.data.datasets.REGISTERED", catalogue.REGISTERED)
    sides = [(torch.randn(40, 5), torch.arange(40) % 4) for _ in range(2)]
    return fb.data.DataSet("toy", sides[0], sides[1], 4)


def test_a_registered_data_set_is_one_for_every_task(toy: fb.data.DataSet, tmp_path: Path) -> None:
    folders = []

    @fb.data.register("toy")
    def read(data_dir: Path | None) -> fb.data.DataSet:
        folders.append(data_dir)
        return toy

    assert "toy" in fb.data.names()
    assert fb.data.load("toy", tmp_path) is toy
    task = fb.tasks.load("regularization", data="toy", clients=4)
    assert task.problem.x["coefficients"].shape == (5,)
    assert folders == [tmp_path, None]
    with pytest.raises(ValueError, match="a data set named 'toy' is registered already"):
        fb.data.register("toy")(read)


def test_what_is_read_must_be_a_data_set(toy: fb.data.DataSet) -> None:
    fb.data.register("toy")(lambda data_dir: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="the data set 'toy' was read as int"):
        fb.data.load("toy")


@pytest.mark.parametrize("partition", ["iid", "quantity", "feature-shift"])
def test_a_data_set_is_partitioned_itself(toy: fb.data.DataSet, partition: str) -> None:
    options = {"samples": None, "test_samples": None, "seed": 0}
    dealt = load_partitioned(toy, None, partition, None, 5, 0.5, **options)  # type: ignore[arg-type]
    joined = torch.cat([part for split in dealt.splits for part in split])
    assert sorted(joined.tolist()) == list(range(40))
