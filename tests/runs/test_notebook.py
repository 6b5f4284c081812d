"""In a real kernel of a notebook: a bar, Ctrl-C that returns what is there, and pictures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

SET_UP = """
import fedbilevel as fb
task = fb.tasks.load("quadratic", clients=4)
def solve(rounds, **options):
    return fb.solve(task.problem, task.clients, "simfbo", rounds=rounds, **options)
"""

pytestmark = pytest.mark.filterwarnings("ignore")


class Notebook:
    """A kernel, and what its cells show."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str, interrupt_at: str = "") -> list[dict[str, Any]]:
        """Run a cell to its end; interrupt it when a message with this text arrives."""
        request = self.client.execute(code)
        shown: list[dict[str, Any]] = []
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "status":
                if content["execution_state"] == "idle":
                    return shown
                continue
            shown.append({"type": message["msg_type"], **content})
            if interrupt_at and interrupt_at in str(content):
                interrupt_at = ""
                self.manager.interrupt_kernel()
        raise TimeoutError(code)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    environment = {**os.environ, "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment, cwd=str(folder))
    try:
        opened = Notebook(manager, client)
        assert [m for m in opened.run(SET_UP) if m["type"] == "error"] == []
        yield opened
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def of_type(shown: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message for message in shown if message["type"] == kind]


def test_a_bar_moves_and_the_result_is_a_picture_and_a_table(notebook: Notebook) -> None:
    shown = notebook.run("solve(30, every=10)")
    assert of_type(shown, "error") == []
    (first,) = of_type(shown, "display_data")
    assert '<progress value="0" max="30">' in first["data"]["text/html"]
    last = of_type(shown, "update_display_data")[-1]["data"]["text/html"]
    assert '<progress value="30" max="30">' in last
    assert "loss " in last
    (result,) = of_type(shown, "execute_result")
    assert "data:image/png" in result["data"]["text/html"]
    assert result["data"]["text/plain"].startswith("Result(status=completed")


def test_the_bar_can_be_switched_off(notebook: Notebook) -> None:
    shown = notebook.run("result = solve(3, progress=False)")
    assert of_type(shown, "display_data") == []


def test_an_interrupt_returns_what_is_there_and_ends_a_loop(notebook: Notebook) -> None:
    cell = (
        "results = []\nfor seed in range(3):\n    results.append(solve(10**9, seed=seed, every=20))"
    )
    shown = notebook.run(cell, interrupt_at="loss ")
    (error,) = of_type(shown, "error")
    assert error["ename"] == "KeyboardInterrupt"
    assert "an earlier solve of this cell was interrupted" in error["evalue"]
    shown = notebook.run("print(len(results), results[0].status, results[0].reason)")
    text = "".join(message["text"] for message in of_type(shown, "stream"))
    assert text.startswith("1 interrupted interrupted")
    shown = notebook.run("results[0].x['x'].isfinite().all().item(), solve(2).status")
    (result,) = of_type(shown, "execute_result")  # another cell runs again
    assert result["data"]["text/plain"] == "(True, 'completed')"


def test_a_script_has_no_bar_unless_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import fedbilevel as fb

    task = fb.tasks.load("quadratic", clients=4)
    fb.solve(task.problem, task.clients, "simfbo", rounds=2)
    assert capfd.readouterr() == ("", "")
    fb.solve(task.problem, task.clients, "simfbo", rounds=2, progress=True)
    assert "simfbo  round 2/2  loss " in capfd.readouterr().err
