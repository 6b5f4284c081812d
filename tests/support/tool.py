"""Running the command-line tool, in this process or as a real one, and looking at what it leaves behind."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
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
    code: int
    out: str
    err: str


def call(*arguments: object) -> Outcome:
    """The tool in this process: quick, so it is what most tests use."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, out, err = torch.get_num_threads(), io.StringIO(), io.StringIO()
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


def start(*arguments: object, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    """The tool as users start it, in a process of its own."""
    environment = {**os.environ, "COLUMNS": "200", "FEDBILEVEL_DEBUG": "", **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)], cwd=cwd, env=environment, text=True, **pipes
    )


def real(*arguments: object, cwd: Path, **options: Any) -> Outcome:
    """The same, to its end."""
    with start(*arguments, cwd=cwd, **options) as process:
        out, err = process.communicate(timeout=60)
    return Outcome(process.returncode, out or "", err or "")


warm = multiprocessing.get_context("forkserver")
warm.set_forkserver_preload(
    [
        "fedbilevel.cli.compare",
        "fedbilevel.cli.track",
        "fedbilevel.experiments.runner",
        "torch._dynamo",
    ]
)


def fork(*arguments: object, cwd: Path) -> "multiprocessing.process.BaseProcess":
    """The tool in a process forked from one that has imported torch: a real one too, and there at once."""
    process = warm.Process(target=_forked, args=([str(argument) for argument in arguments], cwd))
    process.start()
    return process


def _forked(arguments: list[str], cwd: Path) -> None:
    os.chdir(cwd)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"forked.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream.fileno())
    main(arguments)


def forked(*arguments: object, cwd: Path) -> Outcome:
    """The same, to its end."""
    process = fork(*arguments, cwd=cwd)
    process.join(60)
    out, err = ((cwd / f"forked.{name}") for name in ("out", "err"))
    return Outcome(
        process.exitcode if process.exitcode is not None else -1, out.read_text(), err.read_text()
    )


def write(path: Path, text: str = QUADRATIC) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def done(*arguments: object) -> None:
    """A call that must end well."""
    outcome = call(*arguments, "--quiet")
    assert outcome == (0, "", ""), outcome


def is_refusal(outcome: Outcome, *mentions: str) -> None:
    """Exit code 2 and one line that says why."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("\n")
    assert len(outcome.err.splitlines()) == 1, outcome.err
    for mention in mentions:
        assert mention in outcome.err, outcome.err


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the one number that differs between equal runs."""
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def config(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text("utf-8"))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return found
