"""Wrong values are refused in one sentence: the name, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedbilevel.core import checks
from tests.support.refusals import refusal


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checks.number, -1.5),
        (checks.boolean, False),
        (checks.string, ""),
        (checks.integer, -7),
        (checks.positive, 5e-324),
        (checks.non_negative, 0.0),
        (checks.fraction, 1.0),
        (checks.pair, (1.0, 0.5)),
    ],
)
def test_an_allowed_value_is_returned(check: Callable[..., object], value: object) -> None:
    assert check("name", value) == value


@pytest.mark.parametrize(
    ("check", "value", "allowed"),
    [
        (checks.number, True, "a number"),
        (checks.number, "1", "a number"),
        (checks.number, float("nan"), "finite"),
        (checks.boolean, 1, "true or false"),
        (checks.string, 1, "a string"),
        (checks.integer, 1.0, "a whole number"),
        (checks.integer, True, "a whole number"),
        (checks.positive, 0, "above 0"),
        (checks.fraction, 0.0, "in (0, 1]"),
        (checks.pair, [1.0], "a pair (low, high)"),
    ],
)
def test_a_wrong_value_is_refused(
    check: Callable[..., object], value: object, allowed: str
) -> None:
    assert refusal(check, "name", value) == f"name is {value!r}; it must be {allowed}"


def test_a_negative_number_is_refused() -> None:
    assert refusal(checks.non_negative, "name", -1) == "name is -1; it must not be negative"


def test_integers_are_refused_outside_of_their_bounds() -> None:
    assert checks.integer("name", 5, least=1, most=5) == 5
    assert refusal(checks.integer, "name", 0, least=1) == "name is 0; it must be at least 1"
    assert refusal(checks.integer, "name", 6, least=1, most=5) == "name is 6; it must be 1 to 5"
    assert refusal(checks.integer, "name", 0, least=1, most=5) == "name is 0; it must be 1 to 5"


def test_a_misspelt_name_is_answered_with_the_closest_one() -> None:
    assert checks.one_of("mode", "loop", ["stack", "loop"]) == "loop"
    assert refusal(checks.one_of, "mode", "lop", ["stack", "loop"]) == (
        "mode is 'lop' (did you mean 'loop'?); it must be one of 'stack', 'loop'"
    )
    assert checks.suggestion("x", ["stack", "loop"]) == ""
    assert (
        checks.suggestion("lr", ["lr_x", "lr_y", "rounds"]) == " (did you mean 'lr_x' or 'lr_y'?)"
    )
    assert checks.suggestion("lop", []) == ""
    assert checks.suggestion("server_lr", ["server", "server_lr_x"]) == (
        " (did you mean 'server_lr_x'?)"
    )


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    message = "unknown key 'task.client' (did you mean 'clients'?); allowed are clients, noise"
    assert checks.unknown_key("task.client", ["clients", "noise"]) == message
    assert checks.unknown_key("task.client", []) == "unknown key 'task.client'; allowed are none"


def test_a_line_holds_no_character_that_a_terminal_obeys() -> None:
    hostile = "a\x1b[31m b\r\nc\x00\x85\u202e\udcff é"
    assert checks.one_line(hostile) == "a\\x1b[31m b c\\x00 \\u202e\\udcff é"
    assert checks.one_line(hostile).isprintable()
