"""Runs the command-line tool with a terminal on its standard error."""

import os
import pty
from pathlib import Path

from tests.support.tool import start_process


def run_on_terminal(*arguments: object, cwd: Path) -> tuple[str, str]:
    """Run the tool, and return what it writes to a pipe and what it shows on the terminal."""
    ours, theirs = pty.openpty()
    with start_process(*arguments, cwd=cwd, stderr=theirs, env={"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        out, _ = process.communicate(timeout=30)
    os.close(ours)
    assert process.returncode == 0
    return out, shown.decode()
