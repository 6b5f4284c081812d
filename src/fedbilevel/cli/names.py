"""The names that commands take, found without importing PyTorch: for lists and completion.

Typer calls the functions here to complete a word in a shell, and drops what does not begin with it.
"""

from __future__ import annotations

import ast
from importlib import resources

ALGORITHMS = "fedbilevel.algorithms."


def algorithms() -> dict[str, str]:
    """Return the first line of the docstring of each algorithm of the package, by its name.

    The source is read instead of the registry, because algorithms import PyTorch. Modules are
    visited in the order in which Python would import them, which is the order of registration.

    Returns:
        The first lines, in the order of `fedbilevel.algorithms.names()`.

    Examples:
        >>> algorithms()["la-asfbo"]
        'LA-ASFBO: ASFBO with variance-reduced (STORM) momentum.'
    """
    folder = resources.files("fedbilevel") / "algorithms"
    summaries: dict[str, str] = {}
    visited: set[str] = set()

    def visit(module: str) -> None:
        if module in visited:
            return
        visited.add(module)
        for statement in ast.parse((folder / f"{module}.py").read_text("utf-8")).body:
            if isinstance(statement, ast.ImportFrom):
                imported = statement.module or ""
                if imported.startswith(ALGORITHMS):
                    visit(imported.removeprefix(ALGORITHMS))
            elif isinstance(statement, ast.ClassDef):
                for name in _registered_names(statement):
                    summaries[name] = (ast.get_docstring(statement) or "").split("\n")[0]

    visit("__init__")
    return summaries


def _registered_names(statement: ast.ClassDef) -> list[str]:
    """Return the names in the decorators `@register("NAME")` of a class."""
    names = []
    for decorator in statement.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id="register"), args=[ast.Constant(value=str(name))]):
                names.append(name)
    return names


def algorithm_list(incomplete: str) -> list[str]:
    """Return comma-separated names of algorithms that begin with those that are there already."""
    first, comma, _ = incomplete.rpartition(",")
    return [f"{first}{comma}{name}" for name in algorithms()]


def tasks() -> list[str]:
    """Return the names of all ready-made tasks."""
    from fedbilevel import tasks

    return tasks.names()


def task_summaries() -> dict[str, str]:
    """Return the first line of the docstring of each ready-made task, by its name.

    Examples:
        >>> task_summaries()["table"]
        "A table of one's own: learn how much each site counts, and a penalty per column."
    """
    folder = resources.files("fedbilevel") / "tasks"
    summaries = {}
    for name in tasks():
        module = ast.parse((folder / f"{name.replace('-', '_')}.py").read_text("utf-8"))
        summaries[name] = (ast.get_docstring(module) or "").split("\n")[0]
    return summaries


def experiments() -> list[str]:
    """Return the names of the experiments of the package."""
    from fedbilevel.experiments import config as configs

    return configs.names()


def data() -> list[str]:
    """Return the names of all data sets."""
    from fedbilevel import data

    return data.names()
