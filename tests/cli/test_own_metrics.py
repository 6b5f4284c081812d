"""A metric of one's own: in progress, tables, the page and `stop`; with a direction and targets."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel import report
from fedbilevel.cli import comparison
from tests.support.synthetic_runs import write_comparison
from tests.support.tool import assert_refused, invoke, read_config, read_summary, write

# A regression: no accuracy anywhere, and a metric that its author calls rmse.
REGRESSION = """
import torch
import fedbilevel as fb

def rmse(x, y, batch):
    features, target = batch
    return ((features @ y["w"] - target) ** 2).mean()

def client(i):
    rng = torch.Generator().manual_seed(i)
    features = torch.randn(40, 3, generator=rng)
    target = features.sum(1) + 0.1 * torch.randn(40, generator=rng)
    return fb.ClientData(train=(features[:20], target[:20]), val=(features[20:], target[20:]))

def lower(x, y, batch):
    return rmse(x, y, batch) + (x["log_ridge"].exp() * y["w"] ** 2).sum()

def plain():
    problem = fb.Problem(rmse, lower, {"log_ridge": torch.zeros(3) - 2}, {"w": torch.zeros(3)})
    test = client(99).val
    def evaluate(x, y):
        return {"rmse": float(rmse(x, y, test)) ** 0.5, "size": float(y["w"].norm())}
    return fb.tasks.Task(problem, [client(i) for i in range(3)], evaluate)

def judged():
    task = plain()
    metric = fb.Metric("rmse", "minimize", targets=(1.0, 0.8))
    return fb.tasks.Task(task.problem, task.clients, task.evaluate, metric=metric)
"""
EXPERIMENT = """
task = "regression:judged"
rounds = 12
every = 2
compare = ["simfbo", "fedavg"]
runtime = { threads = 1 }
[algorithms.simfbo]
lr_y = 0.1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the task and the experiment, which is not the working folder."""
    folder = tmp_path_factory.mktemp("own")
    write(folder / "regression.py", REGRESSION)
    write(folder / "a.toml", EXPERIMENT)
    return folder


def test_a_regression_is_ranked_by_its_own_metric_and_targets(folder: Path) -> None:
    options = ["--seeds", 1, "--jobs", 1, "--out", folder / "runs"]
    code, out, err = invoke("compare", folder / "a.toml", *options)
    assert code == 0, err
    assert "rmse" in err
    assert "communication rounds to each rmse" in out
    assert "≤ 1 " in out
    assert "≤ 0.8" in out
    assert "final rmse" in out
    assert "final size" in out
    assert " ± " not in out.split("\n", 1)[1]  # one seed has no deviation
    rows = [line for line in out.splitlines() if line.startswith("│ ")]
    assert rows[0].startswith("│ simfbo")
    assert rows[0].count(" - ") == 0
    html = (folder / "runs" / "report.html").read_text()
    assert "Final rmse" in html
    assert "Communication rounds to rmse" in html
    assert 'id="rmse"' in html
    assert 'id="size"' in html
    summary = read_summary(folder / "runs" / "simfbo" / "seed-0")
    assert (summary["metric"]["name"], summary["metric"]["direction"]) == ("rmse", "minimize")
    assert summary["metric"]["final"] == summary["metric"]["best"] < 0.8
    assert summary["metric"]["rounds_to"].keys() == {"1", "0.8"}
    # The resolved experiment says it all, wherever it is run again.
    config = folder / "runs" / "simfbo" / "seed-0" / "config.toml"
    assert invoke("run", config, "--out", folder / "again", "--quiet").code == 0
    again = read_summary(folder / "again")
    assert again["metric"] == summary["metric"]
    code, out, err = invoke("compare", folder / "a.toml", *options, "--resume", "--json")
    assert (code, err) == (0, "")
    best = json.loads(out)["ranked"][0]
    assert (best["metric"], best["final"]["rmse"]) == ("rmse", summary["metric"]["final"])


def test_without_targets_a_table_chooses_some_on_the_way(folder: Path, tmp_path: Path) -> None:
    options = ["--seeds", 1, "--jobs", 1, "--out", tmp_path, "--set", 'metric.name="rmse"']
    settings = ["--set", 'metric.direction="minimize"', "--algorithms", "simfbo"]
    code, out, err = invoke("compare", folder / "a.toml", *options, *settings)
    assert code == 0, err
    assert out.count("≤ ") == 5
    (row,) = [line for line in out.splitlines() if line.startswith("│ ")]
    assert " - " not in row


def test_a_run_stops_at_a_value_of_its_metric(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--set", "stop.metric=0.5", "--set", "every=1", "--rounds", 50]
    code, shown, err = invoke("run", folder / "a.toml", *options, "--out", out)
    assert code == 0, err
    assert "rmse 0." in err  # progress
    assert "completed after" in shown
    assert ", rmse 0." in shown
    summary = read_summary(out)
    assert 1 < summary["rounds"] < 50
    assert summary["metric"]["final"] <= 0.5
    assert read_config(out)["metric"]["targets"] == [1.0, 0.8]


def test_a_run_stops_when_its_metric_no_longer_improves(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--set", "stop.patience=3", "--rounds", 4000, "--set", "every=10"]
    options += ["--set", "algorithm.lr_x=1e-9", "--set", "algorithm.server_lr_x=1e-9"]
    assert invoke("run", folder / "a.toml", *options, "--out", out).code == 0
    summary = read_summary(out)
    assert summary["rounds"] < 4000
    assert summary["status"] == "completed"
    assert summary["reason"] == "rmse has not improved in 3 evaluations"
    metrics = (out / "metrics.jsonl").read_bytes()
    assert invoke("run", folder / "a.toml", *options, "--out", out, "--resume").code == 0
    assert (out / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('metric.name="speed"', "direction of the metric 'speed' is missing"),
        ('metric={name = "mae", direction = "minimize"}', "metric is 'mae', which is not measured"),
        ('metric={name = "rmse", direction = "down"}', "should be 'minimize' or 'maximize'"),
        ('metric={name = "rmse", way = "minimize"}', "unknown key 'metric.way'"),
        ("stop.test_accuracy=0.9", "metric is 'test_accuracy', which is not measured"),
        ("stop.patience=0", "stop.patience is 0"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(
    folder: Path, tmp_path: Path, settings: str, message: str
) -> None:
    outcome = invoke("run", folder / "a.toml", "--out", tmp_path / "run", "--set", settings)
    assert_refused(outcome, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_ranking_fits_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seeds: int
) -> None:
    write_comparison(tmp_path, algorithms=8, seeds=seeds)
    rows = report.ranked([tmp_path])
    monkeypatch.setattr(comparison, "_console", lambda: Console(width=80))
    comparison._print_ranking(rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "fedbioacc" in out
    assert "final accuracy" in out
    assert "≥ 97%" in out
    assert ("±" in out) == (seeds > 1)


def test_the_ranking_names_its_algorithms_however_many_metrics_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_comparison(tmp_path, algorithms=2, seeds=2)
    row = report.ranked([tmp_path])[0]
    metrics = {f"some_metric_{k}": row.finals["test_accuracy"] for k in range(20)}
    comparison._print_ranking([dataclasses.replace(row, finals={**row.finals, **metrics})])
    out = capsys.readouterr().out
    assert row.label in out
    assert "final some metric 0" in out
    assert "…" not in out


def test_an_algorithm_is_named_as_module_and_class(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = fb.algorithms.registry
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    module = f"mine_{os.getpid()}"
    write(
        folder / f"{module}.py",
        "from fedbilevel.algorithms import SimFBO, register\n"
        "class Mine(SimFBO):\n    pass\n"
        f"@register('named-{module}')\nclass Named(SimFBO):\n    pass\n"
        "number = 3\n",
    )
    for name, label in (("Mine", "mine"), ("Named", "named")):
        file = write(
            folder / "b.toml",
            f'task = "quadratic"\nrounds = 1\n[algorithms.{label}]\n'
            f'algorithm = "{module}:{name}"\nlr_x = 0.03\n[algorithm]\nname = "{label}"\n',
        )
        out = tmp_path / label
        outcome = invoke("run", file, "--out", out, "--quiet")
        assert outcome == (0, "", "")
        assert read_config(out)["algorithm"]["name"] == f"{module}:{name}"
        assert read_config(out)["algorithm"]["lr_x"] == 0.03
        again = invoke("run", out / "config.toml", "--out", tmp_path / f"{label}-2", "--quiet")
        assert again == (0, "", "")
    wrong = ["run", "quadratic", "--out", tmp_path / "x", "--algorithm"]
    file = write(folder / "c.toml", 'task = "quadratic"')
    wrong[1] = file
    assert_refused(invoke(*wrong, f"{module}:number"), "is not a class derived from Algorithm")
    assert_refused(invoke(*wrong, f"{module}:Missing"), "cannot be imported")


def test_a_file_that_names_no_module_changes_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    file = write(tmp_path / "a.toml")
    assert invoke("run", file, "--out", tmp_path / "run", "--quiet").code == 0
    assert str(tmp_path) not in sys.path
    assert "code" not in read_config(tmp_path / "run")
