"""Addresses, processes and refusals of a deployment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedbilevel.deploy.flower import deployment
from fedbilevel.deploy.flower.deployment import (
    Deployment,
    DeploymentError,
    flower_command,
    is_running,
    split_address,
)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("::1", "[::1]:8000"),
        ("fl.example.org", "fl.example.org:8000"),
    ],
)
def test_where_a_superlink_is_reached_from_this_machine(host: str, address: str) -> None:
    assert Deployment(host, 8000).address == address
    assert split_address(address) == (address[:-5].strip("[]"), 8000)


def test_a_process_that_has_ended_is_not_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert is_running(os.getpid())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie
    assert not is_running(process.pid)
    process.wait()
    assert not is_running(process.pid)


def test_a_command_that_is_not_installed_is_named() -> None:
    with pytest.raises(DeploymentError, match="flower-nothing is not installed"):
        flower_command("flower-nothing")


def test_processes_are_refused_where_there_are_no_process_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Deployment() as local:
        monkeypatch.setattr(deployment.os, "name", "nt")
        with pytest.raises(DeploymentError, match="needs the process groups of POSIX"):
            local.start_process("superlink", ["true"])
        monkeypatch.undo()
