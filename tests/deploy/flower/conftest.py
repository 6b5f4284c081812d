"""Fixtures of the tests that need no processes of Flower."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.flower import clients_in_this_process


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[None]:
    """Clients of this process start without memory, and nobody pauses between polls."""
    with clients_in_this_process(tmp_path):
        yield
