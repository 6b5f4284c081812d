"""The names of the package `fedbilevel`, and an import that changes nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedbilevel as fb
from tests.support.interpreter import run_python


def test_the_import_imports_no_torch_and_changes_neither_environment_nor_allocator() -> None:
    code = """
import ctypes, os, sys

libraries = []
ctypes.CDLL = lambda *arguments, **options: libraries.append(arguments)
before = dict(os.environ)
import fedbilevel

assert dict(os.environ) == before
assert libraries == []
assert "torch" not in sys.modules
assert "numpy" not in sys.modules
"""
    run_python(code)


def test_a_name_is_imported_when_it_is_first_used() -> None:
    code = """
import sys
import fedbilevel as fb

assert "Tree" not in vars(fb)
assert fb.Tree.__module__ == "fedbilevel.core.tree"
assert vars(fb)["Tree"] is fb.Tree
assert "fedbilevel.runs" not in sys.modules
"""
    run_python(code)


def test_a_module_and_a_function_may_have_the_same_name() -> None:
    code = """
import types
import fedbilevel.core.hypergradient as module
import fedbilevel as fb

assert isinstance(module, types.ModuleType)
assert fb.hypergradient is module.hypergradient
import fedbilevel.core.hypergradient as again
assert again is module
"""
    run_python(code)


def test_a_simulation_needs_no_pydantic() -> None:
    code = """
import sys
sys.modules["pydantic"] = None
import fedbilevel as fb

task = fb.tasks.load("quadratic", clients=2)
assert fb.solve(task.problem, task.clients, rounds=1).status == "completed"
"""
    run_python(code)


def test_dir_lists_the_public_names() -> None:
    assert dir(fb) == fb.__all__


@pytest.mark.parametrize("name", fb.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(fb, name)
    if isinstance(value, ModuleType):
        assert value is sys.modules[value.__name__]
    else:
        assert value.__name__ == name


@pytest.mark.parametrize("name", fb.__all__)
def test_a_public_name_is_the_object_of_its_home(name: str) -> None:
    value = getattr(fb, name)
    module_name, _, attribute = fb._HOMES[name].partition(":")
    home: object = sys.modules[f"fedbilevel.{module_name}"]
    if attribute:
        home = getattr(home, attribute)
    assert value is home


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match="module 'fedbilevel' has no attribute 'Problme'"
    ) as error:
        fb.Problme  # noqa: B018
    assert (error.value.name, error.value.obj) == ("Problme", fb)  # for Python's suggestion


def test_the_table_of_names_agrees_with_the_imports_for_type_checkers() -> None:
    tree = ast.parse(Path(fb.__file__).read_text("utf-8"))
    imported: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for line in statement.body:
                assert isinstance(line, ast.ImportFrom)
                for alias in line.names:
                    assert alias.asname == alias.name, "type checkers would not re-export it"
                    imported[alias.name] = f"{line.module}.{alias.name}"
    homes = {name: f"fedbilevel.{home.replace(':', '.')}" for name, home in fb._HOMES.items()}
    assert imported == homes
