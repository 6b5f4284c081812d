"""Ready-made tasks by name."""

from __future__ import annotations

import pytest

import fedbilevel as fb


def test_unknown_tasks_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'quadratic'"):
        fb.tasks.load("quadratics")
