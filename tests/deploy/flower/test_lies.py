"""A short form of the table in docs/lies.md: no lie does more than the bounds allow."""

from __future__ import annotations

import pytest

from benchmarks.lies import ABOUT_TICKETS, LIES, MARK, METHODS, PAGE, REFERENCES, compute_table

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


def test_a_client_that_keeps_its_reply_cannot_lie_about_its_number() -> None:
    name = "afbo, memory on clients"
    lies = {lie: LIES[lie] for lie in (*REFERENCES, *ABOUT_TICKETS)}
    table = compute_table({name: METHODS[name]}, lies, rounds=6)
    most = max(table[lie][name].effect for lie in REFERENCES)
    assert most > 1
    for lie in ABOUT_TICKETS:
        assert table[lie][name].verdict == "caught", lie
        assert table[lie][name].status == "completed", lie
        assert table[lie][name].effect <= most, lie


def rows_of_the_page() -> dict[str, list[str]]:
    """The cells of each row of the table, without its lines."""
    _, _, table = PAGE.read_text("utf-8").partition(MARK)
    header, _, *rows = table.split("\n\n")[0].splitlines()
    return {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in (header, *rows)
    }


def test_the_page_has_every_lie_and_every_method() -> None:
    header, *lies = rows_of_the_page().items()
    assert header[1] == list(METHODS)
    assert [name for name, _ in lies] == list(LIES)


def test_on_the_page_no_lie_ends_a_server_or_does_more_than_the_bounds_allow() -> None:
    rows = rows_of_the_page()
    effects = {}
    for lie in LIES:
        cells = [cell.partition(", ") for cell in rows[lie]]
        effects[lie] = [float(effect) if effect else 0.0 for _, _, effect in cells]
    most = [max(each) for each in zip(*(effects[lie] for lie in REFERENCES), strict=True)]
    for lie in effects:
        assert all(map(float.__le__, effects[lie], most)), lie
