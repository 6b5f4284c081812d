"""Tasks of the user's own, given as module:function."""

import itertools
import sys
from pathlib import Path

import pytest

from fedbilevel import algorithms
from tests.support.tool import (
    assert_refused,
    invoke,
    invoke_ok,
    read_config,
    read_metrics,
    read_summary,
    write,
)

MODULE = """
from fedbilevel import algorithms, tasks

def plain():
    return tasks.load("quadratic", clients=3)

def tuned(*, clients: int, noise: float = 0.0, unhinted=1, seed: int = 0):
    return tasks.load("quadratic", clients=clients, noise=noise, seed=seed)

def broken(seed: int = 0):
    return {}["nothing"]

def foreign():
    return tasks.load("quadratic").problem

def unmeasurable():
    task = tasks.load("quadratic", clients=2)
    return tasks.Task(task.problem, task.clients, lambda x, y: {}["nothing"])

@algorithms.register("mine")
class Mine(algorithms.SimFBO):
    pass

number = 3
"""
numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder; what it registers is forgotten after the test."""
    name = f"user_module_{next(numbers)}"
    write(tmp_path / f"{name}.py", MODULE)
    monkeypatch.chdir(tmp_path)
    registry = algorithms.registry._registry
    monkeypatch.setattr(algorithms.registry, "_registry", dict(registry))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_task_without_arguments(tmp_path: Path, module: str) -> None:
    write(tmp_path / "a.toml", f'task = "{module}:plain"')
    invoke_ok("run", "a.toml", "--rounds", 1, "--out", "run")
    assert read_config(tmp_path / "run")["task"] == {"name": f"{module}:plain"}


def test_a_task_with_arguments_and_the_seed_of_the_run(tmp_path: Path, module: str) -> None:
    task = f'{{ name = "{module}:tuned", clients = 3, noise = 0.5 }}'
    write(tmp_path / "a.toml", f"task = {task}\nseed = 4\nrounds = 1")
    invoke_ok("run", "a.toml", "--out", "run")
    assert read_config(tmp_path / "run")["task"] == {
        "name": f"{module}:tuned",
        "clients": 3,
        "noise": 0.5,
        "unhinted": 1,
    }
    invoke_ok("run", "run/config.toml", "--out", "again")
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "again")
    invoke_ok("run", "run/config.toml", "--seed", 5, "--out", "other")
    assert read_metrics(tmp_path / "run") != read_metrics(tmp_path / "other")
    assert read_summary(tmp_path / "run")["task"] == f"{module}:tuned"
    assert read_summary(tmp_path / "run")["data"] is None


def test_a_task_of_the_users_own_can_replace_that_of_an_experiment(
    tmp_path: Path, module: str
) -> None:
    write(tmp_path / "a.toml", f'task = "{module}:plain"')
    options = ["--task", f"{module}:tuned", "--set", "task.clients=2", "--rounds", 1]
    invoke_ok("run", "a.toml", *options, "--out", "run")
    assert read_summary(tmp_path / "run")["task"] == f"{module}:tuned"


def test_the_module_of_a_task_may_register_the_algorithm(tmp_path: Path, module: str) -> None:
    write(tmp_path / "a.toml", f'task = "{module}:plain"\nalgorithm = "mine"\nrounds = 1')
    invoke_ok("run", "a.toml", "--out", "run")
    assert read_summary(tmp_path / "run")["algorithm"] == "mine"


@pytest.mark.parametrize(
    ("task", "mentions"),
    [
        ("{module}:missing", ["{module}:missing", "cannot be imported"]),
        ("no_such_module:f", ["no_such_module", "cannot be imported"]),
        ("{module}:number", ["{module}:number", "not a function"]),
        ("{module}:tuned", ["task.clients is missing"]),
        ("{module}:broken", ["{module}:broken", "KeyError", "nothing"]),
        ("{module}:foreign", ["{module}:foreign", "Problem", "Task"]),
        ("{module}:unmeasurable", ["KeyError: 'nothing' (FEDBILEVEL_DEBUG=1 shows where)"]),
        ("syntax_error:f", ["syntax_error:f", "cannot be imported"]),
        (":", ["cannot be imported"]),
        ("..a:f", ["cannot be imported"]),
        ("os:system", ["standard library"]),
        ("subprocess:run", ["standard library"]),
    ],
)
def test_an_error_in_a_task_of_the_users_own_is_explained(
    tmp_path: Path, module: str, task: str, mentions: list[str]
) -> None:
    write(tmp_path / "syntax_error.py", "def f(:\n")
    write(tmp_path / "a.toml", f"task = '{task.format(module=module)}'")
    outcome = invoke("run", "a.toml", "--rounds", 1, "--out", "run")
    assert_refused(outcome, *(mention.format(module=module) for mention in mentions))
    assert not (tmp_path / "run").exists()


def test_functions_of_python_are_not_called(tmp_path: Path, module: str) -> None:
    write(tmp_path / "a.toml", "task = { name = 'os:system', command = 'touch touched' }")
    for command in ("check", "run"):
        assert_refused(invoke(command, "a.toml"), "'os:system'", "standard library")
    assert not (tmp_path / "touched").exists()


def test_neither_the_working_folder_nor_that_of_the_experiment_hides_a_module(
    tmp_path: Path, module: str
) -> None:
    beside = tmp_path / "experiments"
    beside.mkdir()
    before = list(sys.path)
    invoke_ok("run", write(beside / "b.toml", f"task = '{module}:plain'"), "--rounds", 1)
    assert sys.path == [*before, str(beside), str(tmp_path)]
