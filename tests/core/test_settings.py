"""Settings are declared once: constructors, TOML tables and listings read the same annotations."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedbilevel.core import schedules, settings
from fedbilevel.core.schedules import Cosine, Power, Step
from fedbilevel.core.settings import (
    Bounds,
    Count,
    Decay,
    Fraction,
    NonNegative,
    Positive,
    Probability,
    StepsOrEpochs,
    at_least,
    declared_settings,
)
from tests.support.refusals import refusal


class Checked:
    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True)
class Numbers(Checked):
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    fraction: Fraction = 1.0
    probability: Probability = 0.0
    decay: Decay = 0.0
    plain: float = 0.0
    step: Step = 0.1


@dataclass(frozen=True)
class Others(Checked):
    kind: ClassVar[str] = 3  # not a setting, so that nothing checks it

    count: Count = 1
    several: Annotated[int, at_least(2)] = 2
    whole: int = 0
    flag: bool = False
    word: str = ""
    choice: Literal["sum", "random"] = "sum"
    bounds: Bounds = (0.1, 1.0)
    lower_steps: StepsOrEpochs = None
    perhaps: Positive | None = None
    perhaps_step: Step | None = None
    perhaps_choice: Literal["reference"] | None = None
    share: Count | Fraction = 1.0
    parts: tuple[Annotated[int, at_least(0)], ...] = ()
    pair: tuple[float, str] = (0.0, "")
    ratios: list[Fraction] = dataclasses.field(default_factory=list)
    schedule: Power | None = None
    unchecked: Any = None


@dataclass(frozen=True, kw_only=True)
class Parent(Checked):
    name: ClassVar[str] = "parent"
    lr: Positive = 1.0
    steps: Count = 1


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    steps: Annotated[int, at_least(2)] = 2  # narrower than the parent's
    lr_decay: Decay = 0.5


ALLOWED = {
    "positive": lambda value: value > 0,
    "non_negative": lambda value: value >= 0,
    "fraction": lambda value: 0 < value <= 1,
    "probability": lambda value: 0 <= value <= 1,
    "decay": lambda value: 0 <= value < 1,
    "plain": lambda value: True,
    "step": lambda value: value > 0,
}
REFUSALS = {
    "positive": "it must be above 0",
    "non_negative": "it must not be negative",
    "fraction": "it must be in (0, 1]",
    "probability": "it must be in [0, 1]",
    "decay": "it must be in [0, 1)",
    "step": "it must be above 0",
}


# Constraints


edges = st.integers(-2, 2) | st.sampled_from([-0.0, 0.0, 1.0, 5e-324])


@hypothesis_settings(deadline=None, max_examples=300)
@given(st.sampled_from(list(ALLOWED)), st.floats() | st.floats(-0.1, 1.1) | edges)
def test_numbers_are_refused_by_constructors_and_tables_alike(name: str, value: float) -> None:
    if math.isfinite(value) and ALLOWED[name](value):
        assert getattr(Numbers(**{name: value}), name) == value
        read = getattr(settings.build(Numbers, "a.b", {name: value}), name)
        assert (read, type(read)) == (value, float)
        return
    allowed = REFUSALS[name] if math.isfinite(value) else "it must be finite"
    sentence = f"{name} is {value}; {allowed}"
    assert refusal(Numbers, **{name: value}) == sentence
    assert refusal(settings.build, Numbers, "a.b", {name: value}) == f"a.b.{sentence}"


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("value", ["1", None, True, [1.0], 1j])
def test_a_value_that_is_not_a_number_is_refused(name: str, value: Any) -> None:
    assert refusal(Numbers, **{name: value}) == f"{name} is {value!r}; it must be a number"


EPOCHS = "a whole number, 'N epochs', or None for the environment's"
WRONG: list[tuple[str, Any, str]] = [
    ("count", 0, "count is 0; it must be at least 1"),
    ("count", 1.0, "count is 1.0; it must be a whole number"),
    ("count", True, "count is True; it must be a whole number"),
    ("several", 1, "several is 1; it must be at least 2"),
    ("whole", 0.0, "whole is 0.0; it must be a whole number"),
    ("flag", 1, "flag is 1; it must be true or false"),
    ("flag", "true", "flag is 'true'; it must be true or false"),
    ("word", 1, "word is 1; it must be a string"),
    (
        "choice",
        "rando",
        "choice is 'rando' (did you mean 'random'?); it must be one of 'sum', 'random'",
    ),
    ("choice", 3, "choice is 3; it must be one of 'sum', 'random'"),
    ("bounds", (0.0, 1.0), "bounds is (0.0, 1.0); it must be (low, high) with 0 < low <= high"),
    ("bounds", (2, 1), "bounds is (2, 1); it must be (low, high) with 0 < low <= high"),
    ("bounds", (1.0,), "bounds is (1.0,); it must be a pair (low, high)"),
    ("bounds", 1.0, "bounds is 1.0; it must be a pair (low, high)"),
    ("bounds", ("a", 1.0), "bounds is 'a'; it must be a number"),
    ("lower_steps", "0 epochs", f"lower_steps is '0 epochs'; it must be {EPOCHS}"),
    ("lower_steps", "² epochs", f"lower_steps is '² epochs'; it must be {EPOCHS}"),
    ("lower_steps", 0, "lower_steps is 0; it must be at least 1"),
    ("perhaps", 0.0, "perhaps is 0.0; it must be above 0"),
    ("perhaps_step", -1, "perhaps_step is -1; it must be above 0"),
    ("perhaps_step", True, "perhaps_step is True; it must be a number"),
    (
        "perhaps_choice",
        "referense",
        "perhaps_choice is 'referense' (did you mean 'reference'?); it must be one of 'reference'",
    ),
    ("share", 0, "share is 0; it must be at least 1"),
    ("share", 1.5, "share is 1.5; it must be in (0, 1]"),
    ("share", None, "share is None; it must be a whole number"),
    ("parts", (1, -1), "parts is -1; it must be at least 0"),
    ("parts", 3, "parts is 3; it must be a tuple of whole numbers, at least 0"),
    ("pair", (1.0,), "pair is (1.0,); it must be a tuple (number, string)"),
    ("pair", (1.0, 2.0), "pair is 2.0; it must be a string"),
    ("ratios", [0.5, 2.0], "ratios is 2.0; it must be in (0, 1]"),
    ("schedule", 0.1, "schedule is 0.1; it must be a schedules.Power"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_constructors_and_tables_refuse_a_wrong_value(name: str, value: Any, sentence: str) -> None:
    assert refusal(Others, **{name: value}) == sentence
    if name != "schedule":
        assert refusal(settings.build, Others, "a.b", {name: value}) == f"a.b.{sentence}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("several", 2),
        ("whole", -3),
        ("flag", True),
        ("choice", "random"),
        ("bounds", [1, 1]),
        ("lower_steps", "1 epoch"),
        ("lower_steps", 7),
        ("perhaps", 2),
        ("perhaps_step", None),
        ("perhaps_step", Power(0.1)),
        ("perhaps_choice", "reference"),
        ("share", 3),
        ("share", 0.3),
        ("parts", (0, 5)),
        ("parts", [0, 5]),
        ("pair", (1, "a")),
        ("ratios", (0.5, 1.0)),
        ("schedule", Power(0.1)),
        ("unchecked", object()),
    ],
)
def test_a_constructor_leaves_an_allowed_value_as_it_is(name: str, value: Any) -> None:
    assert getattr(Others(**{name: value}), name) is value


def test_class_variables_are_not_settings() -> None:
    assert Others().kind == 3
    assert "kind" not in [setting.name for setting in declared_settings(Others)]


def test_a_subclass_inherits_settings_and_may_narrow_them() -> None:
    assert [setting.name for setting in declared_settings(Child)] == ["lr", "steps", "lr_decay"]
    assert Parent(steps=1).steps == 1
    assert refusal(Child, steps=1) == "steps is 1; it must be at least 2"
    assert refusal(Child, lr=0.0) == "lr is 0.0; it must be above 0"
    assert refusal(Child, lr_decay=1.0) == "lr_decay is 1.0; it must be in [0, 1)"
    assert refusal(dataclasses.replace, Child(), steps=0) == "steps is 0; it must be at least 2"


def test_a_step_is_a_number_or_any_schedule() -> None:
    for value in (0.1, 3, Power(0.1), Cosine(1.0, 0.1, 5), lambda t: 1 / (t + 1)):
        assert Numbers(step=value).step is value


# Tables


def test_values_of_a_table_become_the_declared_types() -> None:
    table = """
    bounds = [1, 2]
    perhaps = 3
    parts = [1, 2]
    pair = [1, "a"]
    ratios = [1]
    share = 1
    schedule = { start = 2 }
    perhaps_step = { schedule = "cosine", start = 1, end = 0.5, iterations = 3 }
    """
    read = settings.build(Others, "others", tomllib.loads(table))
    assert repr(read) == repr(
        Others(
            bounds=(1.0, 2.0),
            perhaps=3.0,
            parts=(1, 2),
            pair=(1.0, "a"),
            ratios=[1.0],
            share=1,
            schedule=Power(2.0),
            perhaps_step=Cosine(1.0, 0.5, 3),
        )
    )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"cuont": 1},
            "unknown key 'a.cuont' (did you mean 'count'?); allowed are count, several, ",
        ),
        ({"cuont": 0, "count": 0}, "(did you mean 'count'?)"),
        ({"kind": "x"}, "unknown key 'a.kind'"),
        ({"schedule": 3}, "a.schedule is 3; it must be a table"),
        ({"schedule": {}}, "a.schedule.start is missing"),
        ({"schedule": {"start": -1.0}}, "a.schedule.start is -1.0; it must be above 0"),
        (
            {"schedule": {"strt": 1}},
            "unknown key 'a.schedule.strt' (did you mean 'start'?); allowed are start, power",
        ),
        (
            {"perhaps_step": {}},
            "a.perhaps_step is {}; a table must have schedule = 'power' or 'cosine'",
        ),
        (
            {"perhaps_step": {"schedule": "power", "start": 1, "after": 0}},
            "a.perhaps_step.after is 0; it must be above 0",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_dotted_key(table: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(settings.build, Others, "a", table)


def test_a_rule_between_settings_names_the_table() -> None:
    @dataclass(frozen=True)
    class Range(Checked):
        low: Positive
        high: Positive

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.low > self.high:
                raise ValueError(f"low is {self.low} and high is {self.high}; low must be smaller")

    sentence = refusal(settings.build, Range, "table.range", {"low": 2, "high": 1})
    assert sentence == "[table.range] low is 2.0 and high is 1.0; low must be smaller"


def test_the_arguments_of_a_function_are_settings() -> None:
    def load(*, clients: Count, noise: NonNegative = 0, free: Any = 1, seed: int = 0, **rest: int):
        """A function as a task has one."""

    def read(table: dict[str, Any]) -> dict[str, Any]:
        return settings.read_arguments(known, "task", table, {"noise": "data.noise"})

    known = declared_settings(load, without=["seed"])
    assert [setting.name for setting in known] == ["clients", "noise", "free"]
    assert read({"clients": 3, "noise": 1}) == {"clients": 3, "noise": 1.0}
    assert refusal(read, {}) == "task.clients is missing"
    assert refusal(read, {"seed": 1}).startswith("unknown key 'task.seed'; allowed are clients,")
    assert refusal(read, {"clients": 1, "noise": -1}) == "data.noise is -1; it must not be negative"


# Listings


def test_declared_settings_have_texts_and_defaults() -> None:
    def texts(kind: Any) -> dict[str, str]:
        return {setting.name: setting.rule.text for setting in declared_settings(kind)}

    assert texts(Numbers) == {
        "positive": "number above 0",
        "non_negative": "number, at least 0",
        "fraction": "number in (0, 1]",
        "probability": "number in [0, 1]",
        "decay": "number in [0, 1)",
        "plain": "number",
        "step": "number above 0, or a schedule",
    }
    others = texts(Others)
    assert others["choice"] == "'sum' or 'random'"
    assert others["perhaps_choice"] == "'reference', or None"
    assert others["share"] == "whole number, at least 1, or number in (0, 1]"
    assert others["parts"] == "tuple of whole numbers, at least 0"
    assert others["schedule"] == "Power, or None"
    assert [setting.default for setting in declared_settings(Parent)] == [1.0, 1]
    assert declared_settings(schedules.Cosine)[0].default is settings.REQUIRED
