"""The names that the command line knows without importing what they stand for."""

from __future__ import annotations

import fedbilevel as fb
from fedbilevel.cli import names


def test_algorithms_are_those_of_the_registry_in_its_order() -> None:
    registered = {}
    for name in fb.algorithms.names():
        docstring = fb.algorithms.get(name).__doc__
        assert docstring is not None
        registered[name] = docstring.split("\n")[0]
    assert list(names.algorithms().items()) == list(registered.items())


def test_a_list_of_algorithms_is_continued() -> None:
    continued = names.algorithm_list("simfbo,la-asfbo,ra")
    assert continued == [f"simfbo,la-asfbo,{name}" for name in names.algorithms()]
    assert names.algorithm_list("ra") == list(names.algorithms())
