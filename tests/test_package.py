"""The public names of the package: where they come from, and that they are imported on demand."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedbilevel as fb


def names_for_type_checkers() -> dict[str, str]:
    """Return what fedbilevel/__init__.py imports for type checkers: each name with its home."""
    homes = {}
    for node in ast.walk(ast.parse(Path(fb.__file__).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedbilevel"):
            for alias in node.names:
                homes[alias.name] = f"{node.module}.{alias.name}"
    return homes


def test_names_at_run_time_are_those_for_type_checkers() -> None:
    homes = names_for_type_checkers()
    assert sorted(homes) == sorted(fb.__all__)
    for name, home in homes.items():
        value = getattr(fb, name)
        module, _, attribute = home.rpartition(".")
        assert value is getattr(sys.modules[module], attribute), name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'fedbilevel' has no attribute 'sovle'"):
        fb.sovle  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, fedbilevel; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
