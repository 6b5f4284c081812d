"""What this package depends on: a lock with hashes, a list of components (SBOM), and licences.

`python tools/supply_chain.py lock` pins what is installed here, in `requirements.lock`. `sbom`
writes `sbom.cdx.json` (CycloneDX). `check` fails if a dependency is not in the lock, is installed
in another version, or has a licence that is not allowed. PyTorch is not in the lock: which of its
builds suits a machine is the machine's matter (`constraints.txt` has the version of our checks).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
SBOM = ROOT / "sbom.cdx.json"
PACKAGE = "fedbilevel"
EXTRA = "test"  # everything: data, track, tune, flower, docs and what the tests need
NOT_LOCKED = {PACKAGE, "torch"}
HEADER = """\
# Every dependency of fedbilevel[test] but torch, with hashes, for CPython 3.11 on Linux x86-64.
# Written by `python tools/supply_chain.py lock`; `make verify-lock` checks it.
"""
# Permissive licences, and those that ask for changes of their own files only (MPL), as they are
# written in the packages' metadata.
ALLOWED = re.compile(
    r"apache|mit\b|bsd|isc\b|psf|python software foundation|mpl|mozilla|unlicense|zlib|hpnd|0bsd"
    r"|cc0|mit-cmu|public domain|expat|blueoak",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"\b[al]?gpl|gnu (affero|general|lesser)", re.IGNORECASE)


def dependencies() -> dict[str, metadata.Distribution]:
    """Return what is installed of all that the package needs, directly or not, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(PACKAGE, frozenset({EXTRA}))]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        distribution = metadata.distribution(name)
        found[name] = distribution
        for text in distribution.requires or []:
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            marker = requirement.marker
            if marker is None or any(marker.evaluate(each) for each in environments):
                needed = canonicalize_name(requirement.name)
                waiting.append((needed, frozenset(requirement.extras)))
    return dict(sorted(found.items()))


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return the version and the hashes of each package in the lock."""
    pins = {}
    text = LOCK.read_text("utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split()
            name, version = pin.split("==")
            pins[name] = version, [each.removeprefix("--hash=sha256:") for each in hashes]
    return pins


def write_lock() -> None:
    """Pin the installed versions, with the hashes of the files that pip would install."""
    pins = []
    for name, distribution in dependencies().items():
        if name not in NOT_LOCKED:
            pins.append(f"{name}=={distribution.version}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
        command += ["--ignore-installed", "--only-binary=:all:", "--report", str(report), *pins]
        subprocess.run(command, check=True)
        chosen = json.loads(report.read_text("utf-8"))["install"]
    lines = []
    for each in chosen:
        name = canonicalize_name(each["metadata"]["name"])
        digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={each['metadata']['version']} \\\n    --hash=sha256:{digest}\n")
    LOCK.write_text(HEADER + "".join(sorted(lines)), "utf-8")


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a package, as its metadata gives it."""
    about = distribution.metadata
    classifiers = about.get_all("Classifier") or []
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License")]
    first_line = (about.get("License") or "").strip().partition("\n")[0]
    return about.get("License-Expression") or " or ".join(named) or first_line


def lock_problems() -> list[str]:
    """Return how the lock differs from what is installed, a sentence each."""
    found = []
    pins = locked()
    for name, distribution in dependencies().items():
        version, hashes = pins.get(name, ("", []))
        if name in NOT_LOCKED:
            continue
        if not hashes:
            found.append(f"{name} is not in {LOCK.name} with a hash")
        elif version != distribution.version:
            found.append(f"{name} is locked as {version}; {distribution.version} is installed")
    return found


def licence_problems() -> list[str]:
    """Return which dependencies have a licence that is not allowed, a sentence each."""
    found = []
    for name, distribution in dependencies().items():
        text = licence(distribution)
        if not is_allowed(text):
            found.append(f"{name} has the licence {text!r}, which is not among those allowed")
    return found


def is_allowed(text: str) -> bool:
    """Whether a licence is permissive, or offers one that is.

    Examples:
        >>> is_allowed("MIT"), is_allowed("GPL-3.0-only"), is_allowed("GPL-2.0 or MIT")
        (True, False, True)
    """
    choices = re.split(r"\s+or\s+", text, flags=re.IGNORECASE)
    return any(ALLOWED.search(each) and not FORBIDDEN.search(each) for each in choices)


def sbom() -> dict[str, Any]:
    """Return all components as a CycloneDX document."""
    pins = locked()
    components = []
    for name, distribution in dependencies().items():
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": distribution.version,
            "purl": f"pkg:pypi/{name}@{distribution.version}",
            "licenses": [{"license": {"name": licence(distribution)}}],
        }
        _, hashes = pins.get(name, ("", []))
        if hashes:
            component["hashes"] = [{"alg": "SHA-256", "content": each} for each in hashes]
        components.append(component)
    (package,) = [each for each in components if each["name"] == PACKAGE]
    components.remove(package)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**package, "type": "application"}},
        "components": components,
    }


def main() -> None:
    """Run the command that the first argument names."""
    command = sys.argv[1]
    if command == "lock":
        write_lock()
    elif command == "sbom":
        SBOM.write_text(json.dumps(sbom(), indent=1) + "\n", "utf-8")
    elif command == "check":
        found = lock_problems() + licence_problems()
        print("\n".join(found) or "every dependency is locked, and its licence allowed")
        sys.exit(bool(found))
    else:
        sys.exit(f"command is {command!r}; it must be lock, sbom or check")


if __name__ == "__main__":
    main()
