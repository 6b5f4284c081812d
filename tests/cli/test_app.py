"""The tool as a whole: help, version, completion, and how wrong calls are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel as fb
from tests.support.tool import (
    QUADRATIC,
    assert_refused,
    contents,
    invoke,
    invoke_ok,
    run_forked,
    run_process,
    write,
)

COMMANDS = ["run", "compare", "tune", "check", "report", "export", "list", "serve", "join", "keys"]


def test_version() -> None:
    assert invoke("--version") == (0, f"fedbilevel {fb.__version__}\n", "")


def test_without_a_command_the_help_is_shown() -> None:
    code, out, err = invoke()
    assert (code, err) == (0, "")
    assert invoke("--help") == (code, out, err)
    assert "Example: fedbilevel compare" in out
    listed = out.split("Commands:")[1].split("Example:")[0]
    assert [line.split()[0] for line in listed.strip().splitlines()] == COMMANDS
    assert "..." not in listed  # every summary fits on its line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example(command: str) -> None:
    code, out, err = invoke(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: fedbilevel {command}" in " ".join(out.split())


def test_the_help_is_shown_without_heavy_imports() -> None:
    code = """
import sys
from fedbilevel.cli import main
try:
    main(["--help"])
except SystemExit:
    heavy = {"torch", "numpy", "pydantic", "plotly", "matplotlib", "optuna", "flwr", "jinja2"}
    sys.exit(sorted(heavy & sys.modules.keys()) or None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_completion_scripts_are_made_and_complete(tmp_path: Path) -> None:
    code, out, err = run_process(cwd=tmp_path, env={"_FEDBILEVEL_COMPLETE": "source_bash"})
    assert (code, err) == (0, "")
    assert "_fedbilevel_completion" in out
    words = {
        "COMP_WORDS": "fedbilevel comp",
        "COMP_CWORD": "1",
        "_FEDBILEVEL_COMPLETE": "complete_bash",
    }
    assert run_process(cwd=tmp_path, env=words).out.split() == ["compare"]


def test_wrong_calls_as_processes(tmp_path: Path) -> None:
    write(tmp_path / "a.toml")
    invoke_ok("run", tmp_path / "a.toml", "--rounds", 1, "--out", tmp_path / "finished")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "junk.toml").write_bytes(bytes(range(256)))
    write(tmp_path / "nan.toml", "algorithm.lr_x = nan" + QUADRATIC)
    write(tmp_path / "key.toml", "ronds = 3" + QUADRATIC)
    cases: list[tuple[list[str], list[str]]] = [
        (["run", "missing.toml"], ["missing.toml", "No such file"]),
        (["run", "folder.toml"], ["folder.toml is a folder"]),
        (["run", "junk.toml"], ["junk.toml", "UTF-8"]),
        (["run", "nan.toml"], ["nan.toml", "lr_x is nan", "finite"]),
        (["run", "key.toml"], ["key.toml", "'ronds'", "did you mean 'rounds'"]),
        (["run", "a.toml", "--rounds", "x"], ["--rounds", "integer"]),
        (["run", "a.toml", "--rounds", "-1"], ["rounds is -1"]),
        (["run", "a.toml", "--seed", "1" + 30 * "0"], ["seed", "64 bits"]),
        (["run", "a.toml", "--algorithm", "simfb"], ["'simfb'", "did you mean 'simfbo'"]),
        (
            ["run", "a.toml", "--out", "a.toml/run"],
            ["a.toml/run cannot be written: Not a directory"],
        ),
        (["run", "a.toml", "--out", "/proc/run"], ["/proc/run cannot be written"]),
        (["run", "a.toml", "--out", "finished"], ["finished", "--resume"]),
        (["walk"], ["'walk'"]),
    ]
    assert_refused(run_process("run", cwd=tmp_path), "Missing argument")
    before = contents(tmp_path)
    for arguments, mentions in cases:
        assert_refused(run_forked(*arguments, cwd=tmp_path), *mentions)
    after = contents(tmp_path)
    del after["forked.out"]
    del after["forked.err"]
    assert after == before
    assert not (tmp_path / "runs").exists()


def test_wrong_calls_within_this_process(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml")
    runs = tmp_path / "runs"
    assert_refused(invoke("run", "digts"), "'digts'", "did you mean 'digits'")
    assert_refused(invoke("compare", file, "--algorithms", "simfbo,adam", "--out", runs), "'adam'")
    assert_refused(invoke("compare", file, "--seeds", 0, "--out", runs), "--seeds")
    assert_refused(invoke("report", tmp_path / "missing"), "missing is not a folder")
    assert_refused(invoke("run", file, "--fast"), "--fast")
    assert list(tmp_path.iterdir()) == [file]
