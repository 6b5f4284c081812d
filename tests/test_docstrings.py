"""Every public name has a docstring; the reference's have arguments, result and example."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import griffe
import pytest

import fedbilevel as fb

ROOT = Path(__file__).parents[1]


@functools.cache
def package() -> griffe.Module:
    loaded = griffe.load("fedbilevel", search_paths=[ROOT / "src"], docstring_parser="google")
    assert isinstance(loaded, griffe.Module)
    return loaded


def referenced() -> list[str]:
    """The names that docs/reference shows, and those with a page of their own."""
    found: list[str] = []
    for method in map(fb.algorithms.get, fb.algorithms.names()):
        if method.__module__.startswith("fedbilevel."):
            found.append(f"fedbilevel.algorithms.{method.__name__}")
    for task in map(fb.tasks.get, fb.tasks.names()):
        if task.__module__.startswith("fedbilevel."):
            found.append(f"{task.__module__}.{task.__name__}")
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        found += re.findall(r"^::: (\S+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return found


def resolve(name: str) -> griffe.Object:
    member = package()[name.removeprefix("fedbilevel.")]
    return member.final_target if isinstance(member, griffe.Alias) else member


def is_documented_kind(item: griffe.Object) -> bool:
    return item.is_class or item.is_function


def own_members(item: griffe.Object) -> list[griffe.Object]:
    """Public classes and functions that are defined in a module or class, not imported into it."""
    found = []
    for name, member in item.members.items():
        if not name.startswith("_") and not member.is_alias and is_documented_kind(member):
            found.append(member)
    return found


def inherits_docstring(member: griffe.Object) -> bool:
    """Whether a method overrides one that has a docstring."""
    owner = member.parent
    if not isinstance(owner, griffe.Class):
        return False
    for base in owner.mro():
        inherited = base.members.get(member.name)
        if inherited is not None and inherited.has_docstring:
            return True
    return False


def undocumented(item: griffe.Object) -> list[str]:
    missing = []
    for member in own_members(item):
        if not member.has_docstring and not inherits_docstring(member):
            missing.append(member.path)
        if member.is_class:
            missing += undocumented(member)
    return missing


def public_modules(module: griffe.Module) -> list[griffe.Module]:
    found = [module]
    for name, child in module.modules.items():
        if not name.startswith("_"):
            found += public_modules(child)
    return found


def test_every_public_class_function_and_method_has_a_docstring() -> None:
    missing = []
    for module in public_modules(package()):
        assert module.has_docstring, f"{module.path} has no docstring"
        missing += undocumented(module)
    assert not missing


def sections(item: griffe.Object) -> dict[str, griffe.DocstringSection]:
    assert item.docstring, f"{item.path} has no docstring"
    return {section.kind.value: section for section in item.docstring.parsed}


def undescribed_parameters(item: griffe.Class | griffe.Function) -> set[str]:
    skipped = {"self", "cls"}
    parameters = {p.name.lstrip("*") for p in item.parameters if p.name not in skipped}
    described: set[str] = set()
    for kind in ("parameters", "attributes"):
        section = sections(item).get(kind)
        if section is not None:
            described |= {entry.name.lstrip("*") for entry in section.value}
    return {name for name in parameters if not name.startswith("_")} - described


def api() -> list[str]:
    """The classes and functions of the reference; a module stands for its public ones."""
    found: list[str] = []
    for name in referenced():
        item = resolve(name)
        if not item.is_module:
            found.append(item.path)
            continue
        names = item.exports or [member.name for member in own_members(item)]
        members = [resolve(f"{item.path}.{name}") for name in names]
        found += [member.path for member in members if is_documented_kind(member)]
    return sorted(set(found))


@pytest.mark.parametrize("name", api())
def test_a_name_of_the_reference_has_arguments_result_and_example(name: str) -> None:
    item = resolve(name)
    assert isinstance(item, (griffe.Class, griffe.Function))
    protocol = isinstance(item, griffe.Class) and item.bases and "NamedTuple" in str(item.bases[0])
    if not protocol:
        assert undescribed_parameters(item) == set()
    if isinstance(item, griffe.Function) and str(item.returns) not in ("None", "Never"):
        assert "returns" in sections(item) or "yields" in sections(item)
    error = isinstance(item, griffe.Class) and name.endswith("Error")
    if not error:
        assert item.docstring
        assert "examples" in sections(item), "no section Examples"


def test_every_public_name_of_the_package_is_in_the_reference() -> None:
    import fedbilevel

    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in fedbilevel.__all__:
        assert f"fb.{name}" in pages or f"::: fedbilevel.{name}" in pages, name
