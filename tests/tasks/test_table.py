"""The task of a table of one's own: what is in the file is what `fb.clients` is given."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from tests.support.tool import assert_refused, invoke, write

ROWS = 400


def patients() -> pd.DataFrame:
    """Four hospitals; at Oslo the answers that nobody has checked are exchanged."""
    rng = np.random.default_rng(0)
    age = rng.normal(60, 10, ROWS)
    frame = pd.DataFrame({"age": age, "sex": rng.choice(["f", "m"], ROWS)})
    frame["hospital"] = rng.choice(["Bonn", "Lyon", "Oslo", "Turin"], ROWS)
    frame["checked"] = rng.random(ROWS) < 0.3
    frame["person"] = np.arange(ROWS) // 2 * 2 + frame["checked"]  # of one hospital mostly
    exchanged = (frame["hospital"] == "Oslo") & ~frame["checked"]
    frame["ill"] = (age + rng.normal(0, 5, ROWS) > 60) ^ exchanged
    frame["days"] = age / 10
    return frame


@pytest.fixture
def file(tmp_path: Path) -> Path:
    patients().to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


COLUMNS: dict[str, Any] = {"by": "hospital", "target": "ill", "features": ["age", "sex"]}


def test_csv_and_parquet_are_the_table_in_the_file(file: Path, tmp_path: Path) -> None:
    pd.read_csv(file).to_parquet(tmp_path / "patients.parquet")
    options: dict[str, Any] = {**COLUMNS, "validation": "checked", "test": 0.5, "seed": 3}
    from_frame = fb.clients(pd.read_csv(file), **options)
    for path in (file, tmp_path / "patients.parquet"):
        task = fb.tasks.load("table", path=path, **options)
        assert task.names == ["Bonn", "Lyon", "Oslo", "Turin"]  # type: ignore[attr-defined]
        for client, expected in zip(task.clients, from_frame, strict=True):
            for side in ("train", "val"):
                for own, other in zip(getattr(client, side), getattr(expected, side), strict=False):
                    assert own.equal(other)
        assert task.evaluate is not None
        metrics = task.evaluate(*task.problem.start)
        assert metrics["test_loss"] == pytest.approx(np.log(2))
        assert metrics["weight Oslo"] == 0.25


def test_the_site_with_exchanged_answers_harms_and_loses_its_weight(file: Path) -> None:
    task = fb.tasks.load("table", path=file, **COLUMNS, validation="checked", test=0.3)
    value = fb.value(task.problem, task.clients, names=task.names)  # type: ignore[attr-defined]
    assert [value.names[site] for site in value.harmful] == ["Oslo"]
    method = fb.check(task.problem, task.clients).algorithm("unifbo")
    last = fb.solve(
        task.problem, task.clients, method, rounds=60, evaluate=task.evaluate, every=60
    ).history[-1]
    assert last["weight Oslo"] < 0.1
    assert last["test_accuracy"] > 0.8


def test_numbers_are_judged_by_the_loss_of_held_out_rows(file: Path) -> None:
    options = {"by": "hospital", "target": "days", "features": ["age"]}
    task = fb.tasks.load("table", path=file, **options, test=0.2)
    assert task.metric == fb.Metric("test_loss")
    assert task.evaluate is not None
    y = fb.solve_lower(task.problem, task.clients, task.problem.start[0])
    held_out = task.evaluate(task.problem.start[0], y)
    assert held_out["test_loss"] < 1e-3 < task.evaluate(*task.problem.start)["test_loss"]
    assert "test_accuracy" not in held_out


def test_rows_of_a_group_are_resampled_together(file: Path) -> None:
    frame = patients().assign(person=lambda f: f["hospital"] + (f.index // 40).astype(str))
    frame.to_csv(file, index=False)
    code, out, err = invoke("value", experiment(file, 'group = "person"'), "--json")
    assert (code, err) == (0, "")
    sites = fb.clients(frame, **COLUMNS, group="person")
    errors = fb.value(fb.linear_model(sites), sites).errors
    assert json.loads(out)["errors"] == pytest.approx(errors, rel=1e-4)
    alone = fb.value(fb.linear_model(sites), list(sites)).errors
    assert alone != pytest.approx(errors, rel=1e-2)


def experiment(file: Path, *options: str, by: str = "hospital", target: str = "ill") -> Path:
    """An experiment on a table; beside the table, so that it can be found from anywhere."""
    lines = ["[task]", 'name = "table"', f'path = "{file}"', f'by = "{by}"', f'target = "{target}"']
    lines.append('features = ["age", "sex"]')
    return write(file.with_name("patients.toml"), "\n".join([*lines, *options]))


def test_sites_are_valued_and_weighed_from_the_command_line(file: Path, tmp_path: Path) -> None:
    toml = experiment(file, 'validation = "checked"')
    code, out, err = invoke("value", toml, "--set", "weights=samples")
    assert (code, err) == (0, "")
    sites = fb.clients(patients(), **COLUMNS, validation="checked")
    expected = fb.value(fb.linear_model(sites), sites, weights="samples")
    assert out == f"{expected}\n"
    folder = tmp_path / "run"
    assert invoke("run", toml, "--algorithm", "unifbo", "--rounds", 3, "--out", folder).code == 0
    table = tomllib.loads((folder / "config.toml").read_text())["task"]
    assert table["path"] == str(file)
    with file.open("a") as rows:
        rows.write("1,f,Oslo,True,1,True,1\n")
    again = invoke("run", folder / "config.toml", "--out", tmp_path / "again")
    assert_refused(again, f"digest is '{table['digest']}'", "another table")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("task.path=patients.xlsx", "path is 'patients.xlsx'; it must end in .csv or .parquet"),
        ("task.path=nowhere.csv", "nowhere.csv cannot be read: No such file or directory"),
        ("task.path=broken.csv", "broken.csv is not a .csv file: "),
        ("task.path=broken.parquet", "broken.parquet is not a .parquet file: "),
        ("task.by=hospitl", "by is 'hospitl' (did you mean 'hospital'?); it must be a column"),
        ("task.validation=chekced", "validation is 'chekced' (did you mean 'checked'?)"),
        ("task.validation=sex", "validation is 'sex' and holds 'f', 'm'; it must hold truth"),
        ("task.validation=[1]", "task.validation is [1]; it must be a number"),
        ("task.features=age", "task.features is 'age'; it must be a list of strings"),
        ("task.targets=ill", "unknown key 'task.targets' (did you mean 'target'?)"),
        ("task.missing=fill", "missing is 'fill'; it must be one of 'refuse', 'drop', 'impute'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    option: str, message: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    Path("broken.csv").write_text('a,b\n1,"2\n')
    Path("broken.parquet").write_text("no\n")
    assert_refused(invoke("value", experiment(file), "--set", option), message)


def test_a_table_without_a_path_or_given_as_an_experiment_is_refused(file: Path) -> None:
    toml = write(file.with_name("a.toml"), 'task = "table"')
    assert_refused(invoke("value", toml), "task.path is missing")
    assert_refused(invoke("value", file), "patients.csv is a table; an experiment is a TOML file")
