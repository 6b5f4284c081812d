"""Runs the command-line tool, in this process or in another, and reads the files it leaves."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
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
    assert outcome.err[:-1].isprintable(), (
        f"it holds characters that control a terminal: {outcome.err!r}"
    )
    if "FEDBILEVEL_DEBUG" not in " ".join(mentions):  # which errors in code of the user's have
        assert "FEDBILEVEL_DEBUG" not in outcome.err, f"it is an internal error: {outcome.err}"
    for mention in mentions:
        assert mention in outcome.err, outcome.err


class InProcessMember:
    """Stands for `subprocess.Popen`: runs the member in this process, which is faster.

    A test may set `before`, which is called with the member's name. If it raises a MemoryError, the
    member is killed.
    """

    before: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, command: list[str], stderr: Any, **_: object) -> None:
        config = Path(command[4])
        try:
            type(self).before("/".join(config.parts[-3:-1]))
            self.returncode, _, errors = invoke(*command[3:])
        except MemoryError:
            self.returncode = 1
            errors = "the member was killed"
        stderr.write(errors.encode())

    def poll(self) -> int:
        return self.returncode

    def communicate(self) -> None: ...

    def send_signal(self, number: int) -> None: ...


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
        out, err = process.communicate(timeout=300)
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


def start_forked(
    *arguments: object, cwd: Path, prepare: Callable[[], object] | None = None
) -> BaseProcess:
    """Start the tool in a forked process, which starts faster than the script.

    `prepare` is called in the process before the tool is.
    """
    words = [str(argument) for argument in arguments]
    process = forkserver.Process(target=_main_in_folder, args=(words, cwd, prepare))
    process.start()
    return process


def _main_in_folder(arguments: list[str], cwd: Path, prepare: Callable[[], object] | None) -> None:
    os.chdir(cwd)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = os.open(f"forked.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    if prepare is not None:
        prepare()
    main(arguments)


def run_forked(
    *arguments: object, cwd: Path, prepare: Callable[[], object] | None = None
) -> Outcome:
    """Run the tool in a forked process, to the end; it is killed if it takes too long."""
    process = start_forked(*arguments, cwd=cwd, prepare=prepare)
    process.join(300)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{arguments} took more than 300 s")
    return forked_outcome(process, cwd)


def forked_outcome(process: BaseProcess, cwd: Path) -> Outcome:
    """Return how a forked process has ended; a negative code is the signal that ended it."""
    assert process.exitcode is not None
    texts = [_read_if_exists(cwd / f"forked.{name}") for name in ("out", "err")]
    return Outcome(process.exitcode, *texts)


def _read_if_exists(path: Path) -> str:
    if not path.exists():  # the process was killed before it made the file
        return ""
    return path.read_text("utf-8", "replace")


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
