"""Settings are declared once: constructors, TOML tables and listings read the same annotations."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel import algorithms
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
    declared,
)
from fedbilevel.experiments import config as configs
from fedbilevel.federation import delays
from fedbilevel.federation.conduct import Conduct
from tests.support.tool import call


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
    kind: ClassVar[str] = 3  # no setting, so nothing checks it

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


def refusal(build: Any, *arguments: Any, **given: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        build(*arguments, **given)
    assert "\n" not in str(error.value)
    return str(error.value)


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
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
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
        "choice is 'rando'; it must be one of 'sum', 'random'; did you mean 'random'?",
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
        "perhaps_choice is 'referense'; it must be one of 'reference'; did you mean 'reference'?",
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
def test_refusals(name: str, value: Any, sentence: str) -> None:
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
def test_what_is_allowed_stays_as_it_is(name: str, value: Any) -> None:
    assert getattr(Others(**{name: value}), name) is value


def test_class_variables_are_no_settings() -> None:
    assert Others().kind == 3
    assert "kind" not in [setting.name for setting in declared(Others)]


def test_a_child_has_the_settings_of_its_parent_and_may_narrow_them() -> None:
    assert [setting.name for setting in declared(Child)] == ["lr", "steps", "lr_decay"]
    assert Parent(steps=1).steps == 1
    assert refusal(Child, steps=1) == "steps is 1; it must be at least 2"
    assert refusal(Child, lr=0.0) == "lr is 0.0; it must be above 0"
    assert refusal(Child, lr_decay=1.0) == "lr_decay is 1.0; it must be in [0, 1)"
    assert refusal(dataclasses.replace, Child(), steps=0) == "steps is 0; it must be at least 2"


def test_a_step_is_a_number_or_any_schedule() -> None:
    for value in (0.1, 3, Power(0.1), Cosine(1.0, 0.1, 5), lambda t: 1 / (t + 1)):
        assert Numbers(step=value).step is value


# Tables


def test_plain_data_become_what_is_declared() -> None:
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
        ({"cuont": 1}, "unknown key 'a.cuont'; allowed are count, several, "),
        ({"cuont": 0, "count": 0}, "; did you mean 'count'?"),
        ({"kind": "x"}, "unknown key 'a.kind'"),
        ({"schedule": 3}, "a.schedule is 3; it must be a table"),
        ({"schedule": {}}, "a.schedule.start is missing"),
        ({"schedule": {"start": -1.0}}, "a.schedule.start is -1.0; it must be above 0"),
        (
            {"schedule": {"strt": 1}},
            "unknown key 'a.schedule.strt'; allowed are start, power, after; did you mean 'start'?",
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
def test_wrong_tables_are_refused_by_their_dotted_key(table: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(settings.build, Others, "a", table)


def test_a_rule_between_settings_names_the_table() -> None:
    sentence = refusal(settings.build, delays.Faults, "faults", {"drop": 0.5, "corrupt": 0.5})
    assert sentence == "[faults] drop is 0.5 and corrupt is 0.5; some replies must get through"


def test_functions_declare_their_arguments() -> None:
    def load(*, clients: Count, noise: NonNegative = 0, free: Any = 1, seed: int = 0, **rest: int):
        """What a task's function may look like."""

    def read(table: dict[str, Any]) -> dict[str, Any]:
        return settings.arguments(known, "task", table, {"noise": "data.noise"})

    known = declared(load, without=["seed"])
    assert [setting.name for setting in known] == ["clients", "noise", "free"]
    assert read({"clients": 3, "noise": 1}) == {"clients": 3, "noise": 1.0}
    assert refusal(read, {}) == "task.clients is missing"
    assert refusal(read, {"seed": 1}).startswith("unknown key 'task.seed'; allowed are clients,")
    assert refusal(read, {"clients": 1, "noise": -1}) == "data.noise is -1; it must not be negative"


# Objects of the library


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (fb.Environment, "environment.participation", "3.5"),
        (fb.Environment, "environment.participation", "0"),
        (fb.Environment, "environment.min_replies", "0"),
        (fb.Environment, "environment.batch_size", "true"),
        (fb.Environment, "environment.local_steps", "2.5"),
        (fb.Environment, "environment.deadline", "-1.0"),
        (fb.Environment, "environment.capacity", "1.5"),
        (fb.Environment, "environment.capacity_y", "[0.5, 0.0]"),
        (delays.Faults, "environment.faults.leave", "1.5"),
        (Conduct, "conduct.deadline_s", "0"),
        (Conduct, "conduct.strikes", "0"),
        (Conduct, "conduct.norm_bound", "nan"),
        (algorithms.SimFBO, "algorithm.lr_x", "-0.1"),
        (algorithms.SimFBO, "algorithm.lr_x", "'fast'"),
    ],
)
def test_constructor_file_and_command_line_refuse_alike(kind: Any, key: str, value: str) -> None:
    def resolve(text: str, *chosen: str) -> configs.Config:
        table = tomllib.loads(f'task.name = "quadratic"\n{text}')
        return configs.resolve("a.toml", table, settings=chosen)

    meant = tomllib.loads(f"value = {value}")["value"]
    section, _, name = key.rpartition(".")
    sentence = f"a.toml: {section}.{refusal(kind, **{name: meant})}"
    assert refusal(resolve, f"{key} = {value}") == sentence
    assert refusal(resolve, "", f"{key}={value}") == sentence


@hypothesis_settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.integers(-1, 5),
        st.floats(-1, 3),
        st.lists(st.integers(0, 5), max_size=3),
        st.tuples(st.integers(0, 5), st.integers(0, 5)),
        st.none() | st.text(max_size=2),
    )
)
@example([2, 1])
@example((2, 1))
@example(())
def test_local_steps(value: Any) -> None:
    entries = list(value) if isinstance(value, (tuple, list)) else [value]
    allowed = all(type(entry) is int and entry >= 1 for entry in entries)
    if isinstance(value, tuple):
        allowed = allowed and len(value) == 2 and value[0] <= value[1]
    if not allowed:
        refusal(fb.Environment, local_steps=value)
        return
    assert fb.Environment(local_steps=value).local_steps == value
    form = {list: {"clients": value}, tuple: list(entries), int: value}[type(value)]
    assert settings.build(fb.Environment, "environment", {"local_steps": form}).local_steps == value


def test_every_default_of_an_algorithm_is_allowed() -> None:
    for name in algorithms.names():
        for setting in declared(algorithms.get(name)):
            setting.rule.check(setting.name, setting.default)


def test_a_resolved_schedule_is_written_with_its_defaults() -> None:
    lr_x = 'algorithm.lr_x = { schedule = "power", start = 1 }'
    table = tomllib.loads(f'task.name = "quadratic"\n{lr_x}')
    written = configs.resolve("a.toml", table).table["algorithm"]["lr_x"]
    assert written == {"schedule": "power", "start": 1.0, "power": 0.5, "after": 1.0}


# Listings


def test_texts_and_defaults() -> None:
    def texts(kind: Any) -> dict[str, str]:
        return {setting.name: setting.rule.text for setting in declared(kind)}

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
    assert [setting.default for setting in declared(Parent)] == [1.0, 1]
    assert declared(schedules.Cosine)[0].default is settings.REQUIRED


def test_algorithms_are_listed_with_their_settings() -> None:
    code, out, err = call("list", "algorithms", "--verbose")
    assert (code, err) == (0, "")
    sections = re.split(r"\n(?! )", out.rstrip("\n"))
    assert [section.split()[0] for section in sections] == algorithms.names()
    for name, section in zip(algorithms.names(), sections, strict=True):
        listed = [line.split()[0] for line in section.splitlines()[1:]]
        assert listed == [field.name for field in dataclasses.fields(algorithms.get(name))]
    simfbo = sections[algorithms.names().index("simfbo")]
    assert re.search(r"^    lr_x = 0\.05 +number above 0, or a schedule$", simfbo, re.MULTILINE)
    assert re.search(r"^    independent_batches = false +true or false$", simfbo, re.MULTILINE)
    fednest = sections[algorithms.names().index("fednest")]
    assert re.search(r"^    compat \(not set\) +'reference', or None$", fednest, re.MULTILINE)
    plain = call("list", "algorithms").out.splitlines()
    assert plain == [section.splitlines()[0] for section in sections]


def test_tasks_are_listed_with_their_settings() -> None:
    out = call("list", "tasks", "--verbose").out
    assert re.search(r"^quadratic\n    clients = 8 +whole number$", out, re.MULTILINE)
    assert "seed" not in out


def test_the_core_does_without_pydantic() -> None:
    code = "import sys; sys.modules['pydantic'] = None; import fedbilevel; fedbilevel.Environment()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
