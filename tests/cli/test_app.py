"""The tool as a whole: help, version, completion, and how wrong calls are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import fedbilevel as fb
from fedbilevel.cli.app import COMMANDS as COMMANDS_WITH_EXAMPLES
from tests.support.interpreter import run_python
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

COMMANDS = [
    "demo",
    "run",
    "compare",
    "tune",
    "check",
    "advise",
    "value",
    "report",
    "export",
    "list",
    "serve",
    "join",
    "keys",
    "state",
]


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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_keeps_the_text_of_every_argument_and_option(command: str) -> None:
    _, out, _ = invoke(command, "--help")
    shown = " ".join(out.split())
    assert "\\" not in shown
    has_arguments = command != "demo"
    assert out.count("Arguments:") + out.count("Positional arguments:") == has_arguments
    function, _ = COMMANDS_WITH_EXAMPLES[command]
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name != "return":
            (information,) = hint.__metadata__
            assert information.help, (command, name)
            assert " ".join(information.help.split()) in shown, (command, name)


WITHOUT_EXTRAS = """
import sys

for name in ("flwr", "cryptography", "httpx", "ray", "optuna", "mlflow", "wandb", "tensorboard"):
    sys.modules[name] = None
from fedbilevel.cli import main

for line in sys.stdin:
    try:
        main(line.split())
    except SystemExit as exit_:
        assert exit_.code == 2, line
"""


def test_a_missing_extra_names_its_pip_line_in_every_command(tmp_path: Path) -> None:
    calls = {
        "run digits --federation flower --clients 2": "flower",
        "run digits --federation ray": "ray",
        "serve digits --clients 2": "flower",
        "join 127.0.0.1:8000 --partition 0": "flower",
        "keys keys --clients 2": "flower",
        "tune digits": "tune",
        "run digits --mlflow": "track",
        "run digits --wandb": "track",
        "run digits --tensorboard": "track",
    }
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        input="\n".join(calls),
        text=True,
        capture_output=True,
        cwd=tmp_path,
    )
    errors = process.stderr.splitlines()
    assert len(errors) == len(calls), process.stderr
    for call, error in zip(calls, errors, strict=True):
        assert error.startswith("error: "), (call, error)
        assert error.endswith(f"pip install 'fedbilevel[{calls[call]}]'"), (call, error)
    assert list(tmp_path.iterdir()) == []


FRESH = """
import json
import os
import sys
from fedbilevel.cli import main

calls, imports = json.loads(sys.argv[1])
sys.argv = ["fedbilevel"]
for arguments, environment in calls:
    os.environ.update(environment)
    try:
        main(arguments)
    except SystemExit:
        pass
    found = sys.modules.keys() & imports
    if found:
        sys.exit(f"{arguments} with {environment} imports {found}")
print("all calls made", file=sys.stderr)
"""


def assert_not_imported(imports: list[str], calls: list[tuple[str, dict[str, str]]]) -> None:
    """Assert that none of the calls, in one fresh process, imports one of the modules."""
    split = [(arguments.split(), environment) for arguments, environment in calls]
    command = [sys.executable, "-c", FRESH, json.dumps([split, imports])]
    process = subprocess.run(command, text=True, capture_output=True)
    assert process.stderr.endswith("all calls made\n"), process.stderr


def test_the_help_is_shown_without_heavy_imports() -> None:
    heavy = ["torch", "numpy", "pydantic", "plotly", "matplotlib", "optuna", "flwr", "jinja2"]
    assert_not_imported(heavy, [("--help", {}), *[(f"{name} --help", {}) for name in COMMANDS]])


def test_lists_completion_and_refusals_do_without_pytorch() -> None:
    lists = ["list algorithms", "list tasks", "list experiments", "list data", "list task"]
    wrong_calls = ["walk", "run", "run digits --fast", "run digits --rounds x", "report"]
    wrong_names = [f"{name} nowhere" for name in ("run", "compare", "tune", "check", "serve")]
    wrong_values = [
        "run digits --rounds -1",
        "run digits --set ronds=1",
        "run digits --set ronds",
        "run digits --federation real",
        "run digits --stock",
        "compare digits --set runtime.mode=fast",
        "tune digits --set every=0",
        "check digits --seed -1",
        "serve digits --host 0.0.0.0",
        "join 10.0.0.1 --partition 0",
    ]
    words = [
        "fedbilevel ru",
        "fedbilevel run di",
        "fedbilevel run digits --al",
        "fedbilevel run digits --algorithm la",
        "fedbilevel run digits --task qu",
        "fedbilevel run digits --data mn",
    ]
    calls: list[tuple[str, dict[str, str]]] = []
    for call in lists + wrong_calls + wrong_names + wrong_values:
        calls.append((call, {}))
    for line in words:
        environment = {"_FEDBILEVEL_COMPLETE": "complete_bash", "COMP_WORDS": line}
        calls.append(("", {**environment, "COMP_CWORD": str(line.count(" "))}))
    assert_not_imported(["torch"], calls)


def test_completion_scripts_are_made(tmp_path: Path) -> None:
    code, out, err = run_process(cwd=tmp_path, env={"_FEDBILEVEL_COMPLETE": "source_bash"})
    assert (code, err) == (0, "")
    assert "_fedbilevel_completion" in out


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("fedbilevel comp", ["compare"]),
        ("fedbilevel list exp", ["experiments"]),
        ("fedbilevel run dig", ["digits"]),
        ("fedbilevel run ./dig", []),  # the shell then completes the name of a file
        ("fedbilevel run digits --algorithm la-", ["la-asfbo"]),
        ("fedbilevel compare digits --algorithms rabo,la", ["rabo,la-asfbo"]),
        ("fedbilevel check digits --task quad", ["quadratic"]),
        ("fedbilevel check digits --data mn", ["mnist"]),
    ],
)
def test_a_shell_completes_commands_and_names(
    line: str, completions: list[str], tmp_path: Path
) -> None:
    words = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "_FEDBILEVEL_COMPLETE": "complete_bash",
    }
    code, out, err = run_process(cwd=tmp_path, env=words)
    assert (code, out.split(), err) == (0, completions, "")


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
    assert_refused(invoke("check", "quadratic"), "'quadratic' is a task", "--task quadratic")
    assert_refused(invoke("run", "digts"), "'digts'", "did you mean 'digits'")
    assert_refused(invoke("compare", file, "--algorithms", "simfbo,adam", "--out", runs), "'adam'")
    assert_refused(invoke("compare", file, "--seeds", 0, "--out", runs), "--seeds")
    assert_refused(invoke("report", tmp_path / "missing"), "missing is not a folder")
    assert_refused(invoke("run", file, "--fast"), "--fast")
    misspelt = invoke("runn", "digits")
    assert_refused(misspelt, "No such command 'runn'. Did you mean 'run'?")
    assert misspelt.err.count("Did you mean") == 1
    assert_refused(invoke("run"), "Missing argument 'EXPERIMENT'. An experiment of the package")
    assert invoke("run", "-h") == invoke("run", "--help")
    assert list(tmp_path.iterdir()) == [file]


def test_under_torchrun_the_first_process_alone_explains_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert_refused(invoke("run", "nowhere"), "'nowhere'")
    monkeypatch.setenv("RANK", "1")
    assert invoke("run", "nowhere") == (2, "", "")


def test_a_process_that_ends_does_not_traverse_what_is_left() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
from fedbilevel.cli import main
main(["--version"])
"""
    assert run_python(code).split()[-1] == "True"
