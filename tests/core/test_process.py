"""Threads, the allocator and the garbage collector of this process."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

import fedbilevel as fb
from fedbilevel.core import process
from fedbilevel.runs.run import Run
from tests.support.interpreter import run_python

# configure_process


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", None])
def test_freed_memory_is_kept_unless_the_user_configures_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    library = SimpleNamespace(mallopt=lambda *parameters: calls.append(parameters))
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    if variable is not None:
        environment[variable] = "1"
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(process.os, "environ", environment)
    process.configure_process()
    parameters = {parameter for parameter, _ in calls}
    expected = {process.M_MMAP_THRESHOLD, process.M_TRIM_THRESHOLD, process.M_TOP_PAD}
    assert parameters == (expected if variable is None else set())


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_other_c_libraries_are_left_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(process.ctypes, "CDLL", fail)
    monkeypatch.setattr(process.os, "environ", {"OMP_WAIT_POLICY": "PASSIVE"})
    process.configure_process()


def test_waiting_threads_sleep() -> None:
    code = """
import os, sys
import fedbilevel
fedbilevel.configure_process()
print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""
    assert run_python(code) == "PASSIVE False\n"


def test_a_wait_policy_of_the_user_is_left_alone() -> None:
    code = """
import os
import fedbilevel
fedbilevel.configure_process()
print(os.environ["OMP_WAIT_POLICY"])
"""
    assert run_python(code, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"


@pytest.mark.parametrize(("of_the_user", "expected"), [(700, 10_000), (50_000, 50_000), (0, 0)])
def test_garbage_is_collected_less_often(of_the_user: int, expected: int) -> None:
    code = f"""
import gc
from fedbilevel import configure_process
gc.set_threshold({of_the_user})
configure_process()
print(gc.get_threshold()[0])
"""
    assert int(run_python(code)) == expected


def test_a_warning_says_that_torch_is_already_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.warns(RuntimeWarning, match=r"^torch is already imported.*OMP_WAIT_POLICY"):
        process.configure_process()
    assert "OMP_WAIT_POLICY" not in process.os.environ


# relaxed_garbage_collection


def test_a_run_excludes_existing_objects_from_garbage_collection() -> None:
    assert gc.get_freeze_count() == 0
    thresholds = gc.get_threshold()
    task = fb.tasks.load("quadratic", clients=2)
    fed = fb.simulated_federation(task.problem, task.clients)
    run = iter(Run(fb.algorithms.SimFBO(), fed, {"rounds": 3}))
    next(run)
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    with process.relaxed_garbage_collection():
        assert gc.get_freeze_count() >= frozen
    assert gc.get_freeze_count() >= frozen, "an inner block does not end the outer one"
    assert gc.get_threshold()[0] == process.YOUNG_OBJECTS
    run.close()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, thresholds)


def test_a_disabled_garbage_collector_stays_disabled() -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with process.relaxed_garbage_collection():
            assert gc.get_threshold()[0] == 0
            assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*thresholds)
