"""Hostile command lines: each is refused in one line that names the place, or is valid."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import tomli_w
import typer

from fedbilevel.cli import comparison, federation
from fedbilevel.cli.app import app
from fedbilevel.core import checks
from soak import junk
from soak.experiments import METHODS, draw_experiment
from soak.files import is_costly
from soak.trials import Trial
from tests.support.tool import (
    QUADRATIC,
    InProcessMember,
    Outcome,
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    run_process,
    write,
)

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
for _long in ("demo", "value"):  # these train for minutes
    COMMANDS.pop(_long, None)
CHEAP = ("report", "export", "check", "list", "keys", "state")  # they are drawn twice as often
LINES_PER_TRIAL = 20
FEDERATED = {"serve", "join", "flower", "ray"}
LEFT_OUT = ("mlflow", "wandb", "help")  # these take seconds, need an account, and are not hostile
FOLDERS = ["run", "runs", "new", "new/er", ".", "", "a.toml", "a.toml/x", "é" * 200, "x\x1b[31m"]
# Values that one may give, by the name of the option or argument. No path leads out of the folder
# of the trial: what a command line is told to overwrite, it may overwrite.
PATHS = {
    "out": FOLDERS,
    "folder": FOLDERS,
    "folders": FOLDERS,
    "figure": ["a.pdf", "a.png", "a.txt", "new/a.pdf", "run"],
    "data_dir": [".", "run", "missing"],
    "keys": ["keys", "missing"],
    "ca": ["a.toml", "missing"],
    "key": ["a.toml", "missing"],
}
PLAUSIBLE = {
    "experiment": [*["a.toml"] * 5, "bad.toml", "missing.toml", "run", "x"],
    "algorithm": [*METHODS, "simfb"],
    "algorithms": ["simfbo", "simfbo,fedavg", "fedavg,", "simfbo,simfbo", "nope"],
    "task": ["quadratic", "nope", "os:getcwd", "a:b"],
    "data": ["digits", "nope"],
    "rounds": ["0", "1", "2", "-1"],
    "seed": ["0", "1", "-1", str(2**63)],
    "device": ["cpu", "auto", "cuda", "meta", "mps"],
    "federation": ["simulated", "flower", "ray", "real"],
    "what": ["algorithms", "tasks", "experiments", "data", "all"],
    "address": ["127.0.0.1:8000", "10.0.0.1:8000", "host", "host:0", "[::1]:9"],
    "client_data": ["math:sqrt", "nope:load"],
}


def commands(trial: Trial) -> Counter[str]:
    """Give hostile command lines to the tool in this process, one after the other."""
    outcomes: Counter[str] = Counter()
    with _workspace(trial.folder), _in_this_process():
        for _ in range(LINES_PER_TRIAL):
            words = command_line(trial.draw)
            before = contents(trial.folder)
            outcomes[_judge(words, invoke(*words), before, trial.folder)] += 1
    return outcomes


def processes(trial: Trial) -> Counter[str]:
    """Give one hostile command line to the tool in a process of its own."""
    words = ["serve"]
    while FEDERATED & {*words}:
        words = command_line(trial.draw)
    with _workspace(trial.folder):
        before = contents(trial.folder)
        outcome = run_process(*words, cwd=trial.folder)
        return Counter([_judge(words, outcome, before, trial.folder)])


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[None]:
    """Work in a folder with an experiment, its run and its comparison."""
    shutil.copytree(_examples(), folder, dirs_exist_ok=True)
    path = [*sys.path]  # the tool adds the folder, where it looks for a user's modules
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:] = path


@functools.cache
def _examples() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="soak-examples-"))
    write(folder / "a.toml", QUADRATIC.replace("rounds = 4", "rounds = 1"))
    write(folder / "bad.toml", "task = 3")
    with _in_this_process():
        invoke_ok("run", folder / "a.toml", "--out", folder / "run")
        invoke_ok("compare", folder / "a.toml", "--seeds", 1, "--out", folder / "runs")
    return folder


@contextlib.contextmanager
def _in_this_process() -> Iterator[None]:
    """Run members of comparisons in this process, and start no federation."""

    def start(*_: object, **__: object) -> NoReturn:
        raise typer.Exit(0)

    with (
        mock.patch.object(subprocess, "Popen", InProcessMember),
        mock.patch.object(comparison, "POLL_S", 0),
        mock.patch.multiple(federation, serve=start, join=start, simulate_on_ray=start),
    ):
        yield


def command_line(draw: random.Random) -> list[str]:
    """Draw a command with arguments and options; about half of the lines make sense."""
    name = draw.choice([*COMMANDS, *CHEAP, "run", "run", "rnu"])
    words = [name]
    for parameter in COMMANDS.get(name, COMMANDS["run"]).params:
        if parameter.name in LEFT_OUT:
            continue
        if parameter.param_type_name == "argument":
            if draw.random() < 0.95:
                words.append(_draw_value(draw, parameter))
        elif draw.random() < {"out": 0.7, "quiet": 0.5}.get(parameter.name, 0.15):
            words.append(draw.choice(parameter.opts))
            if not parameter.is_flag:
                words.append(_draw_value(draw, parameter))
    while draw.random() < 0.2:
        position = draw.randint(1, len(words))
        change = draw.choice(["junk", "option", "drop"])
        if change == "junk":
            words.insert(position, _word(draw).replace("/", "_"))
        elif change == "option":
            words.insert(position, draw.choice(["--", "-", "--nope", "--rounds", "-q=1"]))
        elif position < len(words):
            del words[position]
    return words


def _draw_value(draw: random.Random, parameter: Any) -> str:
    name = parameter.name
    if name in PATHS:
        return draw.choice(PATHS[name])
    if name in PLAUSIBLE and draw.random() < 0.7:
        return draw.choice(PLAUSIBLE[name])
    if name == "set_":
        table = draw_experiment(draw, "simfbo", most_rounds=1)
        path = draw.choice(junk.key_paths(table))
        value = junk.value(draw)
        if is_costly(path[-1], value):
            value = -1
        return f"{'.'.join(path)}={_as_toml(value)}"
    if "INT" in str(parameter.type).upper():
        number = draw.choice([draw.randint(-1, 3), junk.number(draw)])
        if 3 < number < 2**63 and name not in ("seed", "port", "days"):
            number = -1  # it may be meant, and would take long
        return str(number)
    return _word(draw)


def _word(draw: random.Random) -> str:
    """A word that a command line can hold."""
    return junk.text(draw).replace("\0", "")


def _as_toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).partition("=")[2].strip()


def _judge(words: list[str], outcome: Outcome, before: dict[str, bytes], folder: Path) -> str:
    """Return what kind of good outcome this is; a bad one fails."""
    shown = f"{words}: {outcome}"
    assert outcome.code in (0, 2, 3), shown
    assert "Traceback" not in outcome.err, shown
    if outcome.code == 3:
        return "diverged"
    if outcome.code == 0:
        if "--json" in words and outcome.out:
            json.loads(outcome.out)
        return "valid"
    after = contents(folder)
    if words[0] in ("compare", "tune") and after.keys() != before.keys():
        return "members failed"
    assert after == before, f"something was written: {shown}"
    *_, last = outcome.err.splitlines(keepends=True) or [""]
    try:
        assert_refused(outcome._replace(err=last))
    except AssertionError as error:
        raise AssertionError(f"{error}: {shown}") from error
    assert _names_one_of(words, last), f"nothing of the command line is named: {shown}"
    return "refused"


def _names_one_of(words: list[str], line: str) -> bool:
    """Whether an error names a word of the command line, or a part of it, as it is or escaped."""
    if "Missing" in line:
        return True
    for word in words:
        for part in (word, *re.split("[=.:/]", word)):
            shapes = [part, repr(part)[1:-1], checks.one_line(part)]
            if part.startswith("-"):  # several short options in one word
                shapes += [part[:2], repr(part[:2])[1:-1]]
            if any(shape and shape in line for shape in shapes):
                return True
    # An empty path is the working folder, and of blanks one is left.
    return "-q=1" in words or not all(word.split() for word in words)
