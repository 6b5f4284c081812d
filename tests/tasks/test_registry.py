"""Ready-made tasks by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedbilevel as fb
from tests.support.tool import invoke, write


def test_unknown_tasks_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'quadratic'"):
        fb.tasks.load("quadratics")


def test_a_task_can_be_registered_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fb.tasks.registry, "_registered", {})

    @fb.tasks.register("mine")
    def mine(*, clients: int = 3) -> fb.tasks.Task:
        return fb.tasks.load("quadratic", clients=clients)

    assert fb.tasks.names()[-1] == "mine"
    assert len(fb.tasks.load("mine").clients) == 3
    file = write(tmp_path / "a.toml", 'task = { name = "mine", clients = 5 }\nrounds = 1')
    assert invoke("run", file, "--out", tmp_path / "run", "--quiet") == (0, "", "")
    with pytest.raises(ValueError, match="a task named 'mine' is registered already"):
        fb.tasks.register("mine")(mine)
