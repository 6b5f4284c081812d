"""What nodes keep of federations is private, and a command lists and removes it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.flower import QUADRATIC, FakeGrid, advance, real_federation, resolve_config
from tests.support.tool import assert_refused, invoke


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "fedbilevel"


def listed(*arguments: str) -> str:
    outcome = invoke(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def test_what_clients_remember_is_private_and_is_listed_and_removed(root: Path) -> None:
    table = {**QUADRATIC, "algorithm": {"name": "afbo", "memory": "client"}}
    fed, run = real_federation(FakeGrid(4), resolve_config(table))
    advance(1, run)
    job = fed.transport.job
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / job).stat().st_mode & 0o777 == 0o700
    out = listed("state")
    assert out.startswith(f"{job}  4 files, ")
    assert str(root / job) in out
    assert_refused(invoke("state", "nothing", "--remove"), "run is 'nothing'")
    assert_refused(invoke("state", "--remove"), "needs the names of runs")
    assert listed("state", job, "--remove").startswith(f"{job}  removed, 4 files, ")
    assert not (root / job).exists()
    assert listed("state") == ""


def test_what_was_not_used_for_long_is_removed(root: Path) -> None:
    for name, days in (("aa11", 40), ("bb22", 2)):
        folder = root / name
        folder.mkdir(parents=True)
        file = folder / "client-0.safetensors"
        file.write_bytes(b"memory")
        for path in (file, folder):
            os.utime(path, times=(time.time() - days * 86400,) * 2)
    assert listed("state", "--older-than", "30").startswith("aa11  1 files, 6 bytes, used 40 days")
    assert "aa11" in listed("state", "--remove", "--older-than", "30")
    assert [folder.name for folder in root.iterdir()] == ["bb22"]


def test_without_any_federation_nothing_is_listed(root: Path) -> None:
    assert listed("state") == ""
