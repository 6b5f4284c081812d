"""The package: no import cycles, private modules stay private, importable on any platform."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import grimp
import pytest

SOURCE = Path(__file__).parents[1] / "src"
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("fedbilevel", cache_dir=None)


def test_no_module_imports_itself_in_a_roundabout_way(graph: grimp.ImportGraph) -> None:
    """A topological order of all modules exists: no strongly connected component has two."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    order = list(graphlib.TopologicalSorter(imports).static_order())
    assert len(order) > 100


def test_a_module_with_an_underscore_is_imported_only_within_its_folder(
    graph: grimp.ImportGraph,
) -> None:
    private = [name for name in graph.modules if name.rpartition(".")[2].startswith("_")]
    assert private
    for module in private:
        folder = module.rpartition(".")[0]
        for importer in graph.find_modules_that_directly_import(module):
            assert importer.startswith(folder), f"{importer} imports {module}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_needs_posix_to_be_imported(path: Path) -> None:
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.Import):
            imported = {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            imported = {str(statement.module)}
        else:
            continue
        assert not imported & POSIX_ONLY


def test_no_test_imports_another() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                assert ".test_" not in f".{module}", f"{path} imports {module}"
