"""How long a user waits for the first answer: help, a wrong option, an import, the first rounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Row, seconds

SCRIPT = str(Path(sys.executable).with_name("fedbilevel"))
PYTHON = [sys.executable, "-c"]
# The package imports each public name when it is first used. What counts is the time until the
# last import, so the processes end without tearing down.
END = "; import os; os._exit(0)"
TORCH = "import torch"
NAMES = (
    f"{TORCH}, fedbilevel as fb; "
    "[getattr(fb, name) for name in fb.__all__ if name != 'FederatedLogistic']"
)
SKLEARN = f"{TORCH}, sklearn.base, sklearn.utils.multiclass, sklearn.utils.validation"
ESTIMATOR = f"{NAMES}; fb.FederatedLogistic"

ROUND_10_S = 4.2  # to the tenth round of MNIST, on two idle cores


def call(command: list[str]) -> Callable[[], object]:
    """Return a function that runs a command to its end, and drops what it prints.

    The first call, which is not timed, leaves compiled modules for the others.
    """
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return lambda: subprocess.run(command, capture_output=True, env=environment)


def tenth_round() -> list[Row]:
    """Run the MNIST experiment for ten rounds, each time in a new process."""
    if not Path(os.environ.get("FEDBILEVEL_DATA", ""), "mnist").is_dir():
        print("left out: ten rounds of MNIST, because MNIST is not in $FEDBILEVEL_DATA")
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "run"))
        run = call([SCRIPT, "run", "mnist", "--rounds", "10", "--quiet", "--out", out])

        def run_anew() -> None:
            shutil.rmtree(out, ignore_errors=True)
            run()

        times = seconds({"mnist": run_anew}, repeats=5, warm_up=1)
    name = f"a new process to the tenth round of simfbo on MNIST / {ROUND_10_S} s"
    return [Row(name, times["mnist"] / ROUND_10_S, "at most 1", f"{times['mnist']:.2f} s")]


def rows() -> list[Row]:
    """Compare calls of the command line with a bare Python, and the package with PyTorch."""
    calls = {
        "python": call([*PYTHON, "pass"]),
        "help": call([SCRIPT, "--help"]),
        "wrong option": call([SCRIPT, "run", "digits", "--fast"]),
    }
    times = seconds(calls, repeats=15)
    imports = {
        name: call([*PYTHON, code + END])
        for name, code in {
            "torch": TORCH,
            "names": NAMES,
            "torch and scikit-learn": SKLEARN,
            "estimator": ESTIMATOR,
        }.items()
    }
    times |= seconds(imports, repeats=5, warm_up=1)
    return [
        Row(
            "fedbilevel --help / 0.5 s",
            times["help"] / 0.5,
            "at most 1",
            f"{times['help']:.2f} s, python {times['python']:.3f} s",
        ),
        Row(
            "fedbilevel run with a wrong option / 0.7 s",
            times["wrong option"] / 0.7,
            "at most 1",
            f"{times['wrong option']:.2f} s, python {times['python']:.3f} s",
        ),
        Row(
            "import torch, and every public name but FederatedLogistic / import torch alone",
            times["names"] / times["torch"],
            "at most 1.2",
            f"{times['names']:.2f} s, torch {times['torch']:.2f} s",
        ),
        Row(
            "import torch, and every public name / import torch and scikit-learn",
            times["estimator"] / times["torch and scikit-learn"],
            "at most 1.2",
            f"{times['estimator']:.2f} s, both {times['torch and scikit-learn']:.2f} s",
        ),
        *tenth_round(),
    ]
