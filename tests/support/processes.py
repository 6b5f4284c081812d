"""Killing a run or a comparison, and comparing what it leaves behind with an undisturbed one."""

import time
from collections.abc import Callable
from pathlib import Path

import fedbilevel as fb
from tests.support.tool import read_metrics, read_summary
from tests.support.values import identical


def evaluations_written(*run_folders: Path) -> int:
    """Return the number of evaluations in the metrics of the runs, in total."""
    files = [folder / "metrics.jsonl" for folder in run_folders]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def wait_until(condition: Callable[[], object], seconds: float, message: str) -> None:
    """Wait until `condition()` is true; fail with the message after that many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.001)


def assert_same_run(run: Path, expected: Path) -> None:
    """Assert that two run folders hold the same run to the bit, up to its wall time."""
    assert read_metrics(run) == read_metrics(expected)
    loaded = fb.load_run(run)
    expected_run = fb.load_run(expected)
    assert identical(dict(loaded.x), dict(expected_run.x)), "x differs"
    assert identical(dict(loaded.y), dict(expected_run.y)), "y differs"
    if any(expected_run.client_start.values()):
        for client in range(expected_run.clients):
            ours = [dict(tree) for tree in loaded.personal(client)]
            theirs = [dict(tree) for tree in expected_run.personal(client)]
            assert identical(ours, theirs), f"what client {client} owns differs"
    assert {**read_summary(run), "wall_s": 0} == {**read_summary(expected), "wall_s": 0}
    assert (run / "config.toml").read_bytes() == (expected / "config.toml").read_bytes()


def member_processes(folder: Path) -> set[int]:
    """Return the ids of the processes that run a member of the comparison in this folder.

    A member is recognised by an argument of its command line: a path below the folder.
    """
    ids = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # the process has ended meanwhile
            continue
        if any(argument.startswith(bytes(folder) + b"/") for argument in arguments):
            ids.add(int(entry.name))
    return ids


def with_descendants(pid: int) -> list[int]:
    """A process, its children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(entry.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family
