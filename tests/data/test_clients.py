"""`fb.clients`: frames, arrays and data sets, divided by site or by a partition."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb

TABLE: dict[str, list[Any]] = {
    "age": [50.0, 61.0, 44.0, 39.0, 70.0, 55.0, 48.0, 33.0],
    "sex": ["f", "m", "m", "f", "m", "f", "f", "m"],
    "visits": [1, 0, 3, 2, 5, 1, 0, 2],
    "hospital": ["b", "a", "a", "b", "b", "a", "a", "b"],
    "sick": ["yes", "no", "no", "yes", "yes", "no", "yes", "no"],
}


def as_datasets(table: dict[str, list[Any]]) -> Any:
    return datasets.Dataset.from_dict(table)


def as_arrow(table: dict[str, list[Any]]) -> Any:
    import pyarrow

    return pyarrow.table(table)


@pytest.fixture(autouse=True)
def cache() -> None:
    """These tests load no data set; the `datasets` package may be imported."""


READERS = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": as_arrow,
    "hugging face": as_datasets,
    "dict": dict,
}


@pytest.mark.parametrize("kind", READERS)
def test_every_kind_of_table_gives_the_same_clients(kind: str) -> None:
    found = fb.clients(READERS[kind](TABLE), by="hospital", target="sick", test=0.25, seed=3)
    assert found.names == ["a", "b"]
    assert found.features == ["age", "sex=f", "sex=m", "visits"]
    assert found.classes == ["no", "yes"]
    plain = fb.clients(TABLE, by="hospital", target="sick", test=0.25, seed=3)
    for client, expected in zip(found, plain, strict=True):
        assert torch.equal(client.train[0], expected.train[0])  # type: ignore[index]
        assert torch.equal(client.val[1], expected.val[1])  # type: ignore[index]
    assert found.test is not None
    assert len(found.test[0]) == 2
    train = torch.cat([client.train[0] for client in found])  # type: ignore[misc]
    assert train.dtype == torch.float32
    assert train[:, 0].mean() == pytest.approx(0, abs=1e-6)  # over the training rows of all clients
    assert train[:, 0].std(correction=0) == pytest.approx(1)
    assert set(train[:, 1].tolist()) <= {0.0, 1.0}


def test_new_rows_are_encoded_as_the_training_rows_were() -> None:
    found = fb.clients(pd.DataFrame(TABLE), by="hospital", target="sick", standardise=False)
    new = pl.DataFrame({"visits": [9], "sex": ["x"], "age": [20.0], "other": [1]})
    with pytest.warns(UserWarning, match="column 'sex' holds 'x', which no row of the fitted"):
        assert found.encode(new).tolist() == [[20.0, 0.0, 0.0, 9.0]]  # 'x' is neither f nor m
    with pytest.raises(ValueError, match="column 'age' is missing"):
        found.encode({"visits": [1], "sex": ["f"]})


def test_arrays_and_data_sets_of_pytorch_are_taken_as_they_are() -> None:
    inputs = torch.randn(12, 1, 4, 4)
    labels = torch.arange(12) % 3
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    from_dataset = fb.clients(dataset, count=3)
    from_array = fb.clients(inputs.numpy(), target=labels.numpy(), count=3)
    for found in (from_dataset, from_array):
        assert found.classes == [0, 1, 2]
        assert found.features == []
        assert {client.train[0].shape[1:] for client in found} == {(1, 4, 4)}  # type: ignore[index]
        joined = torch.cat([side[0] for c in found for side in (c.train, c.val)])  # type: ignore[index]
        assert sorted(joined.sum((1, 2, 3)).tolist()) == sorted(inputs.sum((1, 2, 3)).tolist())
    matrix = fb.clients(np.arange(12.0).reshape(6, 2), target=np.arange(6.0), count=2)
    assert (matrix.features, matrix.classes) == (["x0", "x1"], None)
    with pytest.raises(ValueError, match="tensors as they are"):
        from_array.encode(inputs)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(30, 80),
    people=st.integers(12, 25),
    validation=st.floats(0.1, 0.5),
    test=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
)
def test_sides_are_disjoint_exhaustive_and_keep_groups_together(
    rows: int, people: int, validation: float, test: float, seed: int
) -> None:
    person = np.arange(rows) % people
    table = {"row": np.arange(rows), "person": person, "y": person % 2}
    found = fb.clients(
        table,
        by=person % 3,
        target="y",
        group="person",
        features=["row", "person"],
        validation=validation,
        test=test,
        seed=seed,
        standardise=False,
    )
    sides = [side[0] for client in found for side in (client.train, client.val)]  # type: ignore[index]
    if found.test is not None:
        sides.append(found.test[0])
    assert sorted(torch.cat(sides)[:, 0].tolist()) == list(range(rows))
    owners = [set(side[:, 1].tolist()) for side in sides]
    assert sum(map(len, owners)) == people


def test_whole_numbers_stay_classes_and_names_where_others_were_missing() -> None:
    table: dict[str, list[Any]] = {"age": [50.0, 61.0, 44.0, 39.0, 70.0]}
    table["site"] = [1, 1, 2, 2, None]
    table["sick"] = [1, 0, 1, 0, 1]
    frame = pd.DataFrame(table)
    found = fb.clients(frame, by="site", target="sick", missing="drop")
    assert (found.names, found.classes) == (["1", "2"], [0, 1])
    frame.loc[4, "sick"] = None
    found = fb.clients(frame, by="site", target="sick", missing="drop")
    assert (found.names, found.classes) == (["1", "2"], [0, 1])
    frame.loc[0, "sick"] = 0.5
    assert fb.clients(frame, by="site", target="sick", missing="drop").classes is None


def test_missing_values_are_refused_dropped_or_imputed() -> None:
    frame = pd.DataFrame(TABLE)
    frame.loc[2, "age"] = np.nan
    frame.loc[5, "sex"] = None
    options: dict[str, Any] = {"by": "hospital", "target": "sick", "standardise": False}
    with pytest.raises(ValueError, match="column 'age' holds 1 missing values; fill them in, or"):
        fb.clients(frame, **options)
    dropped = fb.clients(frame, **options, missing="drop")
    assert sum(train + val for _, train, val in dropped.rows()) == 6
    imputed = fb.clients(frame, **options, missing="impute", validation=0.3)
    assert sum(train + val for _, train, val in imputed.rows()) == 8
    everything = torch.cat([s[0] for c in imputed for s in (c.train, c.val)])  # type: ignore[index]
    assert bool(torch.isfinite(everything).all())
    frame.loc[0, "sick"] = None
    with pytest.raises(
        ValueError, match=r"'sick' holds 1 missing values, and is the target of .* missing='drop'"
    ):
        fb.clients(frame, **options, missing="impute")


def test_an_imputed_number_is_the_mean_of_the_training_rows() -> None:
    table = {"a": [1.0, 2.0, 6.0, np.nan], "y": [0, 1, 0, 1]}
    found = fb.clients(table, by=[0] * 4, target="y", missing="impute", standardise=False)
    train = found[0].train[0][:, 0].tolist()  # type: ignore[index]
    val = found[0].val[0][:, 0].tolist()  # type: ignore[index]
    known = [a for a in (1.0, 2.0, 6.0) if a in train]
    assert sum(known) / len(known) in [pytest.approx(value) for value in train + val]


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "quantity", "feature-shift"])
def test_rows_are_partitioned_by_name(partition: str) -> None:
    rng = np.random.default_rng(0)
    table = {"a": rng.normal(size=400), "b": rng.normal(size=400), "y": rng.integers(0, 4, 400)}
    found = fb.clients(table, target="y", count=8, partition=partition, validation=0.2)
    sizes = [train + val for _, train, val in found.rows()]
    assert sum(sizes) == 400
    equal = partition in ("iid", "shards", "feature-shift")
    assert (max(sizes) - min(sizes) <= 8) == equal
    classes = [len(client.train[1].unique()) for client in found]  # type: ignore[index]
    if partition == "shards":
        assert max(classes) <= 3
    means = [float(client.train[0][:, 0].mean()) for client in found]  # type: ignore[index]
    if partition == "iid":
        assert max(map(abs, means)) < 0.6
    again = fb.clients(table, target="y", count=8, partition=partition, validation=0.2)
    assert all(torch.equal(a.val[0], b.val[0]) for a, b in zip(found, again, strict=True))  # type: ignore[index]


def test_a_feature_shift_moves_the_features_of_the_clients_apart() -> None:
    rng = np.random.default_rng(0)
    table = {"a": 5 * rng.normal(size=200), "b": rng.normal(size=200), "y": rng.integers(0, 2, 200)}
    options: dict[str, Any] = {"target": "y", "count": 4, "standardise": False}
    shifted = fb.clients(table, partition="feature-shift", **options)
    ranges = sorted(
        (float(c.train[0][:, 0].min()), float(c.train[0][:, 0].max()))  # type: ignore[index]
        for c in shifted
    )
    assert all(low[1] < high[0] + 0.5 for low, high in pairwise(ranges))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"by": "hospitl"},
            r"by is 'hospitl' \(did you mean 'hospital'\?\); it must be a column: age, sex",
        ),
        ({"by": "hospital", "count": 3}, "by or count must say who the clients are; both are"),
        ({}, "by or count must say who the clients are; neither"),
        ({"by": "hospital", "target": None}, "target is missing"),
        (
            {"by": "hospital", "features": ["agee"]},
            r"'agee' \(did you mean 'age'\?\); it must be a column",
        ),
        ({"by": "hospital", "partition": "shards"}, "partition and its options must not be given"),
        ({"by": [1, 2]}, r"by has shape \(2,\); it must hold one by for each of the 8 rows"),
        ({"by": "age"}, "client '33.0' has 1 rows; it needs at least 2"),
        ({"by": "hospital", "missing": "guess"}, "missing is 'guess'"),
        ({"by": "hospital", "validation": 0.5, "test": 0.5}, "together they must be below 1"),
        ({"count": 3, "partition": "sharp"}, "partition is 'sharp'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        fb.clients(TABLE, **{"target": "sick", **options})
    assert "\n" not in str(raised.value)


def test_columns_that_are_no_features_are_refused() -> None:
    frame = pd.DataFrame(TABLE)
    with pytest.raises(ValueError, match="column 'born' holds Timestamp"):
        fb.clients(frame.assign(born=pd.Timestamp("2000-1-1")), by="hospital", target="sick")
    many = pd.DataFrame({"note": [f"note {i}" for i in range(90)], "y": [0, 1] * 45})
    with pytest.raises(ValueError, match=r"column 'note' holds .* different texts"):
        fb.clients(many, count=3, target="y")
    with pytest.raises(
        TypeError, match=r"data is 'patients\.csv'; read the file first, as by pandas"
    ):
        fb.clients("patients.csv", count=2, target="y")
    with pytest.raises(TypeError, match=r"features is 'age'; it must be a list of .*\['age'\]"):
        fb.clients(frame, by="hospital", target="sick", features="age")
    with pytest.raises(TypeError, match="data is int; it must be a frame of pandas"):
        fb.clients(3, count=2, target="y")
    with pytest.raises(ValueError, match="column 'age' holds infinity"):
        fb.clients(frame.assign(age=np.inf), by="hospital", target="sick")


def test_columns_that_contradict_each_other_are_refused() -> None:
    frame = pd.DataFrame(TABLE)
    with pytest.raises(ValueError, match="two columns of data have the same name"):
        fb.clients(pd.concat([frame, frame[["age"]]], axis=1), by="hospital", target="sick")
    with pytest.raises(ValueError, match="features holds 'sick', which is the target"):
        fb.clients(frame, by="hospital", target="sick", features=["age", "sick"])
    renamed = frame.rename(columns={"age": "target"}).astype({"target": float})
    renamed.loc[0, "target"] = np.nan  # a feature of this name is not the target
    assert (
        sum(
            t + v
            for _, t, v in fb.clients(
                renamed, by="hospital", target="sick", missing="impute"
            ).rows()
        )
        == 8
    )


def test_numbers_that_are_declared_as_categories_are_categories() -> None:
    frame = pd.DataFrame({"a": pd.Categorical([1, 2, 1, 2]), "y": [0.5, 1.5, 2.5, 0.0]})
    found = fb.clients(frame, by=[0, 0, 1, 1], target="y")
    assert (found.features, found.classes) == (["a=1", "a=2"], None)


def test_a_partition_is_shown_as_a_picture_and_in_a_line(tmp_path: Path) -> None:
    found = fb.clients(TABLE, by="hospital", target="sick")
    assert repr(found) == "Clients(2; training + validation samples: a: 3 + 1, b: 3 + 1)"
    bars = found.plot().axes[0].patches
    assert sum(bar.get_width() for bar in bars) == 8  # type: ignore[attr-defined]
    assert "data:image/png" in found._repr_html_()
    numbers = fb.clients(
        {**TABLE, "sick": [float(i) for i in range(8)]}, by="hospital", target="sick"
    )
    assert len(numbers.plot().axes[0].get_legend().texts) == 10  # type: ignore[union-attr]


def test_a_csv_file_with_a_site_column_becomes_a_federation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=300), "site": rng.integers(0, 5, 300)})
    frame["y"] = (frame["a"] + 0.3 * rng.normal(size=300) > 0).astype(int)
    frame.to_csv(tmp_path / "data.csv", index=False)
    found = fb.clients(pd.read_csv(tmp_path / "data.csv"), by="site", target="y")

    def loss(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        logits = batch[0] @ y["w"]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[1].float())

    def lower(x: fb.Tree, y: fb.Tree, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return loss(x, y, batch) + (x["log_ridge"].exp() * y["w"] ** 2).sum()

    problem = fb.Problem(loss, lower, {"log_ridge": torch.zeros(1)}, {"w": torch.zeros(1)})
    method = fb.algorithms.SimFBO(lr_y=1.0, server_lr_y=1.0, lr_x=0.5, server_lr_x=0.5)
    result = fb.solve(problem, found, method, rounds=100)
    assert result.history[-1]["upper_loss"] < 0.45 < result.history[0]["upper_loss"]


CHECKED = [True, False, True, False, False, False, False, True]  # a row of each hospital at least


def test_trusted_rows_are_the_validation_rows() -> None:
    options: dict[str, Any] = {"by": "hospital", "target": "sick", "standardise": False}
    frame = pd.DataFrame(TABLE).assign(checked=CHECKED)
    by_column = fb.clients(frame, **options, validation="checked")
    by_row = fb.clients(TABLE, **options, validation=np.array(CHECKED))
    assert by_column.features == by_row.features == ["age", "sex=f", "sex=m", "visits"]
    for found in (by_column, by_row):
        assert found.rows() == [("a", 3, 1), ("b", 2, 2)]
        ages = [client.val[0][:, 0].tolist() for client in found]  # type: ignore[index]
        assert ages == [[44.0], [50.0, 33.0]]
        rest = [age for age, trusted in zip(TABLE["age"], CHECKED, strict=True) if not trusted]
        train = [age for client in found for age in client.train[0][:, 0].tolist()]  # type: ignore[index]
        assert sorted(train) == sorted(rest)


def test_where_rows_are_trusted_those_of_the_test_are_some_of_them() -> None:
    row = np.arange(60.0)
    trusted = row % 3 == 0
    found = fb.clients(
        {"row": row, "y": row % 2 == 0},
        by=row // 30,
        target="y",
        validation=trusted,
        test=0.8,  # of the trusted rows: 8 of the 10 of a client
        standardise=False,
    )
    assert found.rows() == [("0.0", 20, 2), ("1.0", 20, 2)]
    assert found.test is not None
    held_out = found.test[0][:, 0].tolist()
    assert len({*held_out}) == 16
    val = [value for client in found for value in client.val[0][:, 0].tolist()]  # type: ignore[index]
    assert sorted(held_out + val) == row[trusted].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": "sex"}, "validation is 'sex' and holds 'f', 'm'; it must hold truth"),
        ({"validation": [True] + [False] * 7}, "client 'a' has 0 trusted samples; it needs at"),
        ({"validation": CHECKED, "test": 0.5}, "client 'a' has 1 trusted samples; it needs at l"),
        ({"validation": [True] * 8}, "client 'a' has no samples but trusted ones; it needs at l"),
        ({"validation": CHECKED, "test": 1.0}, "test is 1.0; it must be at least 0 and below 1"),
        ({"validation": CHECKED, "group": list("abababab")}, "the same for all rows of a group"),
    ],
)
def test_trusted_rows_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fb.clients(TABLE, by="hospital", target="sick", **options)
