"""`fedbilevel check`: a table with a piece of an experiment, or JSON."""

import json
import tomllib

import pytest

import fedbilevel as fb
from fedbilevel.diagnostics.advice import ADVISED
from fedbilevel.tasks.quadratic import quadratic
from tests.support.tool import QUADRATIC, assert_refused, invoke, write

CONCAVE_TASK = """
import torch
from fedbilevel import ClientData, Problem, tasks

def upper(x, y, batch):
    return ((y["y"] - 1) ** 2).sum()

def lower(x, y, batch):
    return y["y"] @ x["x"] - (y["y"] ** 2).sum()

def task():
    data = (torch.ones(2, 1),)
    problem = Problem(upper, lower, {"x": torch.ones(2)}, {"y": torch.ones(2)})
    return tasks.Task(problem, [ClientData(data, data)] * 4)
"""


def test_it_prints_a_table_and_settings_that_an_experiment_can_use(tmp_path):
    file = write(tmp_path / "a.toml")
    code, out, err = invoke("check", file)
    assert (code, err) == (0, "")
    assert "condition number L / mu" in out
    assert "strongly convex" in out
    assert "very different" in out
    assert "measured on 4 of 4 clients" in out
    snippet = out[out.index("[algorithms.") :]
    (name, settings) = tomllib.loads(snippet)["algorithms"].popitem()
    assert name == "shrofbo"
    pasted = write(tmp_path / "b.toml", f'algorithm = "shrofbo"\n{QUADRATIC}\n{snippet}')
    assert invoke("run", pasted, "--out", tmp_path / "run", "--quiet").code == 0
    algorithm = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]
    assert {key: algorithm[key] for key in settings} == settings


def test_as_json_it_prints_the_whole_report(tmp_path):
    file = write(tmp_path / "a.toml")
    code, out, err = invoke("check", file, "--json", "--seed", 3, "--set", "task.clients=3")
    assert (code, err, len(out.splitlines())) == (0, "", 1)
    printed = json.loads(out, parse_constant=pytest.fail)
    task = quadratic(clients=3, samples=3, noise=0.3, seed=3)
    environment = fb.Environment(participation=3, local_steps=(1, 2), batch_size=2)
    report = fb.check(task.problem, task.clients, environment, rounds=4, seed=3)
    assert printed["measured"]["mu"] == pytest.approx(report.measured.mu)
    assert printed["recommended"] == report.recommended == "shrofbo"
    assert printed["settings"].keys() == set(ADVISED)
    assert printed["settings"]["fednest"] == report.settings("fednest")
    assert printed["verdicts"]["mu, smallest curvature of the lower level"] == "strongly convex"


def test_it_warns_of_a_task_from_a_file(tmp_path, monkeypatch):
    write(tmp_path / "concave.py", CONCAVE_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path / "a.toml")
    code, out, err = invoke("check", file, "--task", "concave:task")
    assert (code, err) == (0, "")
    warning = "the lower level is not strongly convex in y (its smallest curvature is -2)"
    assert f"warning: {warning}: add a ridge" in out
    printed = json.loads(invoke("check", file, "--task", "concave:task", "--json").out)
    assert printed["measured"]["condition"] is None
    assert_refused(invoke("check", file, "--task", "concave:tusk"), "tusk")


def test_wrong_input_is_refused(tmp_path):
    file = write(tmp_path / "a.toml")
    assert_refused(invoke("check", "nowhere"), "nowhere")
    assert_refused(invoke("check", file, "--set", "task.condition=0.5"), "condition is 0.5")


def test_a_private_lower_level_is_refused(tmp_path):
    """Its losses could be evaluated at one y for all episodes, but a run solves another problem."""
    file = write(
        tmp_path / "a.toml", 'task = "few-shot"\nenvironment.batch_size = 5\nalgorithm = "rabo"'
    )
    refused = invoke("check", file)
    assert_refused(refused, "check needs lower_level='shared'; this problem's is 'private'")
