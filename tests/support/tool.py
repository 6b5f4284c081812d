"""Runs the command-line tool, in this process or in another, and reads the files it leaves."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedbilevel.cli import main

SCRIPT = Path(sys.executable).with_name("fedbilevel")

QUADRATIC = """
task = { name = "quadratic", clients = 4, samples = 3, noise = 0.3 }
rounds = 4
environment = { participation = 3, local_steps = [1, 2], batch_size = 2 }
runtime = { threads = 1 }
"""


class Outcome(NamedTuple):
    """How a call of the tool ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


# In this process: fast, so most tests do this.


def invoke(*arguments: object) -> Outcome:
    """Run the tool in this process; threads and signal handlers are put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    out = io.StringIO()
    err = io.StringIO()
    code: Any = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = exit_.code
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, out.getvalue(), err.getvalue())


def invoke_ok(*arguments: object) -> None:
    """Run the tool in this process with --quiet; it must succeed and print nothing."""
    outcome = invoke(*arguments, "--quiet")
    assert outcome == (0, "", ""), outcome


def assert_refused(outcome: Outcome, *mentions: str) -> None:
    """Assert that the tool ended with code 2 and one line that mentions all of these."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("\n")
    assert len(outcome.err.splitlines()) == 1, outcome.err
    for mention in mentions:
        assert mention in outcome.err, outcome.err


# In a process that a test can kill.


def start_process(
    *arguments: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    """Start the tool as users do, by its script."""
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "FEDBILEVEL_DEBUG": "", **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def run_process(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> Outcome:
    """Run the tool by its script, to the end."""
    with start_process(*arguments, cwd=cwd, env=env) as process:
        out, err = process.communicate(timeout=60)
    return Outcome(process.returncode, out or "", err or "")


# Processes of this context are forked from one that has imported PyTorch: they start at once.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        "fedbilevel.cli.comparison",
        "fedbilevel.runs.track",
        "fedbilevel.experiments.runner",
        "torch._dynamo",
    ]
)


def start_forked(*arguments: object, cwd: Path) -> BaseProcess:
    """Start the tool in a forked process, which starts faster than the script."""
    words = [str(argument) for argument in arguments]
    process = forkserver.Process(target=_main_in_folder, args=(words, cwd))
    process.start()
    return process


def _main_in_folder(arguments: list[str], cwd: Path) -> None:
    os.chdir(cwd)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = os.open(f"forked.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    main(arguments)


def run_forked(*arguments: object, cwd: Path) -> Outcome:
    """Run the tool in a forked process, to the end; the code is -1 if it takes too long."""
    process = start_forked(*arguments, cwd=cwd)
    process.join(60)
    code = -1
    if process.exitcode is not None:
        code = process.exitcode
    return Outcome(code, (cwd / "forked.out").read_text(), (cwd / "forked.err").read_text())


# Files.


def write(path: Path, text: str = QUADRATIC) -> Path:
    """Write a text file, by default a small experiment, and return its path."""
    path.write_text(text, encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by relative path."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without the one number that differs between equal runs."""
    evaluations = []
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        evaluation = json.loads(line)
        evaluation.pop("wall_s", None)
        evaluations.append(evaluation)
    return evaluations


def read_config(run: Path) -> dict[str, Any]:
    """Return a run's resolved experiment."""
    return tomllib.loads((run / "config.toml").read_text("utf-8"))


def read_summary(run: Path) -> dict[str, Any]:
    """Return a run's summary."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text("utf-8"))
    return summary
