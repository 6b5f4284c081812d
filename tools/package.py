"""Build wheel and sdist, and try them where the repository is not: `make package`.

A new environment outside the repository gets the wheel. There the command line runs, and tests of
the sdist run against the installed package.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_WHEEL = (
    "fedbilevel/py.typed",
    "fedbilevel/experiments/library/digits.toml",
    "fedbilevel/report/page.html",
    "fedbilevel/report/page.css",
    "fedbilevel/report/page.js",
)
IN_SDIST = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Containerfile",
    "LICENSE",
    "Makefile",
    "SECURITY.md",
    "constraints.txt",
    "docs/results/curves/simfbo-fig2.csv.xz",
    "mkdocs.yml",
    "requirements.lock",
    "tests/conftest.py",
    "tools/package.py",
)
TESTS = (
    "tests/core",
    "tests/algorithms/test_simfbo.py",
    "tests/cli/test_report.py",
    "tests/experiments/test_config.py",
    "tests/runs/test_checkpoint.py",
)


def problems_of_wheel(wheel: Path) -> list[str]:
    """Return what is missing from a wheel or wrong in its metadata, a sentence each."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        message = email.message_from_bytes(archive.read(metadata))
    problems = [f"the wheel lacks {name}" for name in IN_WHEEL if name not in names]
    strangers = {name.split("/")[0] for name in names if ".dist-info" not in name}
    if strangers != {"fedbilevel"}:
        problems.append(f"the wheel installs {', '.join(sorted(strangers))}")
    description = str(message.get_payload())
    for link in re.findall(r"\]\((?!https?://|#)([^)]*)\)", description):
        problems.append(f"the description links to {link}, which is no address")
    if message["Version"] not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        problems.append(f"CHANGELOG.md does not mention version {message['Version']}")
    return problems


def problems_of_sdist(sdist: Path) -> list[str]:
    """Return what is missing from an sdist, a sentence each."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return [f"the sdist lacks {name}" for name in IN_SDIST if name not in names]


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return both."""
    for old in folder.glob("fedbilevel-*"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def try_out(wheel: Path, sdist: Path, interpreter: str, folder: Path) -> None:
    """Install the wheel in a new environment below a folder, run it, and run tests of the sdist."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "FEDBILEVEL", "VIRTUAL_ENV"))
    }

    def run(*command: str | Path, cwd: Path = folder) -> str:
        print("+", *command, flush=True)
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{done.stderr}\nfailed: {' '.join(map(str, command))}")
        return done.stdout

    run(interpreter, "-m", "venv", folder / "env")
    scripts = folder / "env" / "bin"
    pip = [scripts / "python", "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    run(*pip, *constraints, "torch")
    run(*pip, *constraints, f"{wheel}[sites]", "pytest>=8.3,<9.2", "hypothesis", "pytest-xdist")
    run(scripts / "python", "-m", "pip", "check")
    where = run(scripts / "python", "-c", "import fedbilevel; print(fedbilevel.__file__)")
    if not Path(where.strip()).is_relative_to(folder):
        sys.exit(f"the package is imported from {where}, not from the new environment")
    version = run(scripts / "fedbilevel", "--version")
    if version.split()[1] not in wheel.name:
        sys.exit(f"{wheel.name} says that it is {version}")
    print(run(scripts / "fedbilevel", "demo", "--out", "demo"))
    run(scripts / "fedbilevel", "run", "digits", "--rounds", "5", "--out", "first", "--quiet")
    run(scripts / "fedbilevel", "report", "first")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    tests = run(
        *(scripts / "python", "-m", "pytest", "-p", "no:cacheprovider", "--durations=0"),
        *("--numprocesses", "2", *TESTS),
        cwd=source,
    )
    print(tests.splitlines()[-1])


def main() -> None:
    """Build, check the contents, and try them out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "package" / "dist")
    parser.add_argument("--python", default=sys.executable, help="interpreter to try them with")
    options = parser.parse_args()
    wheel, sdist = build(options.out)
    found = problems_of_wheel(wheel) + problems_of_sdist(sdist)
    if found:
        sys.exit("\n".join(found))
    with tempfile.TemporaryDirectory() as folder:
        try_out(wheel, sdist, options.python, Path(folder))
    print(f"{wheel}\n{sdist}")


if __name__ == "__main__":
    main()
