"""Fixtures of the tests that need no processes of Flower."""

from pathlib import Path

import pytest

from fedbilevel.deploy.flower import client
from tests.support.flower import poll_without_pauses


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process start without memory, and nobody pauses between polls."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(client, "_workers", {})
    poll_without_pauses(monkeypatch)
