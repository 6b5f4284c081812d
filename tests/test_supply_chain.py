"""Dependencies: their licences are permissive, and the lock pins them with hashes."""

import json
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import supply_chain


def test_licences_of_all_dependencies_are_permissive() -> None:
    assert len(supply_chain.dependencies()) > 30
    assert supply_chain.licence_problems() == []


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Apache-2.0", True),
        ("BSD License", True),
        ("MPL-2.0 or GPL-2.0", True),
        ("GNU General Public License v3", False),
        ("LGPL-2.1-only", False),
        ("AGPL-3.0 and MIT", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_which_licences_are_allowed(text: str, allowed: bool) -> None:
    assert supply_chain.is_allowed(text) == allowed


def test_the_lock_and_the_list_of_components_hold_what_the_package_declares() -> None:
    pins = supply_chain.locked()
    assert "torch" not in pins
    for _, hashes in pins.values():
        assert hashes
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
    project = tomllib.loads((supply_chain.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = {
        each["name"]: each for each in json.loads(supply_chain.SBOM.read_text())["components"]
    }
    for text in [*project["dependencies"], *extras["test"], *extras["docs"], *extras["data"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in supply_chain.NOT_LOCKED:
            continue
        version, hashes = pins[name]
        assert requirement.specifier.contains(version), text
        assert listed[name]["version"] == version
        assert [each["content"] for each in listed[name]["hashes"]] == hashes
