"""The message with which a wrong value is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """Return the message of the ValueError or TypeError that a call raises; it has one line."""
    with pytest.raises((ValueError, TypeError)) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    return message
