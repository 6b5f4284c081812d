"""Reading and resolving experiments: defaults, short forms, schedules, budgets, the library."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli_w

from fedbilevel import algorithms
from fedbilevel.core import schedules
from fedbilevel.experiments import config as configs
from tests.support.experiments import resolve_text
from tests.support.tool import (
    QUADRATIC,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    write,
)


def assert_config_gives_same_run(run: Path, other: Path) -> None:
    """Run the config.toml of a run in another folder, and compare the two."""
    invoke_ok("run", run / "config.toml", "--out", other)
    assert (run / "config.toml").read_bytes() == (other / "config.toml").read_bytes()
    assert read_metrics(run) == read_metrics(other)


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    table = resolve_text('task = "quadratic"\nruntime.threads = 1', tmp_path).table
    assert table["task"] == {
        "name": "quadratic",
        "clients": 8,
        "dim_x": 5,
        "dim_y": 4,
        "condition": 10.0,
        "heterogeneity": 1.0,
        "samples": 1,
        "noise": 0.0,
        "dtype": "float64",
    }
    settings = {field.name for field in dataclasses.fields(algorithms.SimFBO)}
    assert table["algorithm"].keys() == {"name", *settings}
    assert table["environment"] == {
        "participation": 1.0,
        "local_steps": 1,
        "batch_size": "full",
        "min_replies": 1,
        "capacity": 1.0,
    }
    assert table["rounds"] == 100
    assert table["seed"] == 0
    assert table["device"] == "cpu"
    assert table["checkpoint_every"] == 10
    assert table["runtime"] == {
        "mode": "stack",
        "memory": 2**31,
        "precision": "fp32",
        "derivatives": "auto",
        "compile": "auto",
        "threads": 1,
    }


@pytest.mark.parametrize(
    "extra",
    [
        "",
        'algorithm = { name = "asfbo", lr_x = { schedule = "power", start = 0.02, after = 5 } }',
        "every = { bytes = 700 }",
        "stop = { samples = 20 }",
        'weights = "samples"\nalgorithm = "shrofbo"\ncheckpoint_every = 1\nseed = 3',
    ],
)
def test_a_resolved_config_gives_the_same_run_again(tmp_path: Path, extra: str) -> None:
    invoke_ok("run", write(tmp_path / "a.toml", extra + QUADRATIC), "--out", tmp_path / "a")
    assert_config_gives_same_run(tmp_path / "a", tmp_path / "b")


def test_a_resolved_digits_run_gives_the_same_run_again(tmp_path: Path) -> None:
    invoke_ok("run", "digits", "--set", "data.clients=10", "--rounds", 2, "--out", tmp_path / "a")
    data = {"name": "digits", "partition": "shards", "clients": 10, "validation": 0.25}
    assert read_config(tmp_path / "a")["data"] == data
    assert_config_gives_same_run(tmp_path / "a", tmp_path / "b")


def test_schedules_are_tables(tmp_path: Path) -> None:
    power = '{ schedule = "power", start = 0.1, power = 1.0 }'
    cosine = '{ schedule = "cosine", start = 0.1, end = 0.01, iterations = 10 }'
    text = f'task = "quadratic"\nalgorithm = {{ name = "simfbo", lr_x = {power}, lr_y = {cosine} }}'
    algorithm = resolve_text(text, tmp_path, "algorithm.lr_x.start=0.2").algorithm
    assert isinstance(algorithm, algorithms.SimFBO)
    assert algorithm.lr_x == schedules.Power(0.2, power=1.0)
    assert algorithm.lr_y == schedules.Cosine(0.1, 0.01, 10)
    # A table that is set replaces a table, including keys that the new one does not have.
    replaced = resolve_text(text, tmp_path, f"algorithm.lr_x={cosine}").algorithm
    assert isinstance(replaced, algorithms.SimFBO)
    assert replaced.lr_x == algorithm.lr_y


@pytest.mark.parametrize(
    ("text", "value", "resolved"),
    [
        ("3", 3, 3),
        ("[2, 5]", (2, 5), [2, 5]),
        ("{ clients = [1, 2] }", [1, 2], {"clients": [1, 2]}),
        ("{ clients = [1, 2, 3] }", [1, 2, 3], {"clients": [1, 2, 3]}),
    ],
)
def test_local_steps_are_a_number_a_range_or_one_per_client(
    tmp_path: Path, text: str, value: object, resolved: object
) -> None:
    config = resolve_text(f'task = "quadratic"\nenvironment.local_steps = {text}', tmp_path)
    assert config.environment.local_steps == value
    again = resolve_text(tomli_w.dumps(config.table), tmp_path)
    assert again.environment == config.environment
    assert again.table["environment"]["local_steps"] in (resolved, value)
    other = 'task = "quadratic"\nenvironment.local_steps = {clients = [7]}'
    overridden = resolve_text(other, tmp_path, f"environment.local_steps={text}")
    assert overridden.environment == config.environment


def test_a_full_batch_is_a_word_in_toml(tmp_path: Path) -> None:
    text = 'task = "quadratic"\nenvironment.batch_size = 5'
    config = resolve_text(text, tmp_path, "environment.batch_size=full")
    assert config.environment.batch_size is None
    assert config.table["environment"]["batch_size"] == "full"


def test_evaluations_are_spaced_by_bytes(tmp_path: Path) -> None:
    run = ["run", write(tmp_path / "a.toml"), "--rounds", 6]
    invoke_ok(*run, "--out", tmp_path / "all")
    whole = read_metrics(tmp_path / "all")
    sent = [metrics["bytes_up"] + metrics["bytes_down"] for metrics in whole]
    step = sent[1] + 1
    invoke_ok(*run, "--set", f"every.bytes={step}", "--out", tmp_path / "bytes")
    due = [k for k in range(1, 7) if k == 6 or sent[k] // step > sent[k - 1] // step]
    assert 2 < len(due) < 6
    expected = [{**whole[k], "projection_active": 0.0} for k in due]
    assert read_metrics(tmp_path / "bytes")[1:] == expected


@pytest.mark.parametrize("unit", ["samples", "bytes"])
def test_a_run_stops_at_a_budget_in_other_units_than_rounds(tmp_path: Path, unit: str) -> None:
    run = ["run", write(tmp_path / "a.toml"), "--rounds", 6]
    invoke_ok(*run, "--out", tmp_path / "all")
    whole = read_metrics(tmp_path / "all")
    costs = {"samples": whole[3]["samples"], "bytes": whole[3]["bytes_up"] + whole[3]["bytes_down"]}
    invoke_ok(*run, "--set", f"stop.{unit}={costs[unit]}", "--out", tmp_path / "stopped")
    assert read_metrics(tmp_path / "stopped") == whole[:4]
    assert read_summary(tmp_path / "stopped")["status"] == "completed"


def test_a_run_stops_at_a_test_accuracy(tmp_path: Path) -> None:
    settings = ["--set", "stop.test_accuracy=0.5", "--set", "data.partition=iid"]
    invoke_ok("run", "digits", "--rounds", 30, *settings, "--out", tmp_path / "run")
    accuracies = [metrics["test_accuracy"] for metrics in read_metrics(tmp_path / "run")]
    assert accuracies[-1] >= 0.5 > max(accuracies[:-1])
    assert len(accuracies) < 31


@pytest.mark.parametrize("name", configs.names())
def test_every_experiment_of_the_library_runs_with_smoke(tmp_path: Path, name: str) -> None:
    if name == "survival" and find_spec("lifelines") is None:
        pytest.skip("lifelines, which ships the data, is not installed")
    invoke_ok("run", name, "--smoke", "--out", tmp_path / "run")
    assert read_summary(tmp_path / "run")["status"] in ("completed", "diverged")
    assert read_config(tmp_path / "run")["rounds"] == 2
    source, table = configs.read(name)
    for algorithm in table.get("compare", []):
        configs.resolve(source, table, algorithm=algorithm)
        assert configs.resolve(source, table, algorithm=algorithm, smoke=True).label == algorithm
