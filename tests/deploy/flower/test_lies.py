"""A short form of the table in docs/lies.md: no lie does more than the bounds allow."""

from __future__ import annotations

import pytest

from benchmarks.lies import LIES, MARK, METHODS, PAGE, REFERENCES, compute_table

pytestmark = pytest.mark.usefixtures("in_process")


CAUGHT = (
    "replies 1e12 times as long",
    "replies of NaN",
    "its first reply again, as it was",
    "claims -5 samples",
)
BOUNDED = ("claims 2^40 samples", "claims costs of 2^59", "claims losses of 1e300")


def test_a_lie_is_caught_or_bounded_and_ends_no_server() -> None:
    name = "simfbo"
    lies = {lie: LIES[lie] for lie in (*REFERENCES, *CAUGHT, *BOUNDED)}
    table = compute_table({name: METHODS[name]}, lies, rounds=4)
    for lie in CAUGHT:
        assert table[lie][name].verdict == "caught", lie
    for lie in BOUNDED:
        assert table[lie][name].verdict == "bounded", lie
    most = max(table[lie][name].effect for lie in REFERENCES)
    for lie in (*CAUGHT, *BOUNDED):
        assert table[lie][name].status == "completed", lie
        assert table[lie][name].effect <= most, lie
    assert table["claims losses of 1e300"][name].effect == 0.0
    assert table["claims costs of 2^59"][name].effect == 0.0


def test_the_page_has_every_lie_and_every_method() -> None:
    _, _, table = PAGE.read_text("utf-8").partition(MARK)
    header, _, *rows = table.split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in header.split("|")[2:-1]] == list(METHODS)
    assert [row.split("|")[1].strip() for row in rows] == list(LIES)
