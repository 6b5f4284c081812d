"""Single messages on Flower's grid."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.support.flower import (
    QUADRATIC,
    FakeGrid,
    only_for,
    real_federation,
    resolve_config,
)

pytestmark = pytest.mark.usefixtures("in_process")


def test_a_reply_that_flower_cannot_read_is_refused() -> None:
    """Flower takes the first object that a node has sent for a message, whatever it is."""
    grid = FakeGrid(4)
    grid.behaviours[102] = only_for(
        "train", lambda message, handle: cast(Any, handle(message).content)
    )
    fed, run = real_federation(grid, resolve_config(QUADRATIC))
    run.advance()
    assert fed.transport.refusals == {2: 1}
