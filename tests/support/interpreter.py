"""Runs code in a fresh Python interpreter, in which nothing is imported yet."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> str:
    """Run `code` in a new interpreter and return what it printed; it must end with exit code 0.

    The variables that configure threads and memory are set only if they are in `environment`.
    """
    inherited = {}
    for name, value in os.environ.items():
        if not name.startswith(("OMP_", "MALLOC_", "GLIBC_TUNABLES")):
            inherited[name] = value
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
