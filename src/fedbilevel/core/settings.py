"""Settings are declared once, in the annotations of a dataclass or function.

`lr: Positive = 0.1` says what is allowed. The constructor (`check`), the reader of TOML tables
(`build`) and the listing on the command line (`declared`) all read it there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from fedbilevel.core import checks

Check = Callable[[str, Any], Any]
REQUIRED = inspect.Parameter.empty  # the default of a setting that has none


class Rule:
    """What a setting may be: the mark that `typing.Annotated` carries.

    text: what is allowed in words, for listings.
    check(name, value): raises with one sentence unless the value is allowed, and returns it as its
    declared type: for a float a whole number becomes a float, for a tuple a list becomes a tuple.
    read(key, value): the same for a value from a TOML table, where an object is a table; by default
    it is `check`.
    """

    def __init__(self, text: str, check: Check, read: Check | None = None) -> None:
        self.text = text
        self.check = check
        self.read = read or check


def within(text: str, holds: Callable[[float], bool]) -> Rule:
    """Numbers for which `holds` is true; `text` completes "it must be ..."."""

    def check(name: str, value: Any) -> float:
        if not holds(checks.number(name, value)):
            raise ValueError(f"{name} is {value}; it must be {text}")
        return float(value)

    return Rule(f"number {text}", check)


def at_least(least: int) -> Rule:
    """Whole numbers from `least` on."""
    return Rule(f"whole number, at least {least}", functools.partial(checks.integer, least=least))


def _bounds(name: str, value: Any) -> tuple[float, float]:
    low, high = checks.pair(name, value)
    if not 0 < low <= high:
        raise ValueError(f"{name} is {(low, high)}; it must be (low, high) with 0 < low <= high")
    return float(low), float(high)


def epochs(value: Any) -> int | None:
    """N where the value is "N epochs", else None."""
    found = re.fullmatch(r"([1-9][0-9]*) epochs?", value) if isinstance(value, str) else None
    return int(found[1]) if found else None


def _steps_or_epochs(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if epochs(value) is None:
            allowed = "a whole number, 'N epochs', or None for the environment's"
            raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    elif value is not None:
        checks.integer(name, value, least=1)
    return value


Positive = Annotated[float, Rule("number above 0", checks.positive)]
NonNegative = Annotated[float, Rule("number, at least 0", checks.non_negative)]
Fraction = Annotated[float, Rule("number in (0, 1]", checks.fraction)]
Probability = Annotated[float, within("in [0, 1]", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, within("in [0, 1)", lambda value: 0 <= value < 1)]
Count = Annotated[int, at_least(1)]
Bounds = Annotated[tuple[float, float], Rule("pair (low, high) with 0 < low <= high", _bounds)]
StepsOrEpochs = Annotated[
    int | str | None,
    Rule("whole number, at least 1, or 'N epochs', or None for local_steps", _steps_or_epochs),
]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class FrozenDataclass:
    """Every subclass is a frozen dataclass, checked at construction, without a decorator that could be forgotten."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        for field in dataclasses.fields(cls):
            nearest = next(
                base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {})
            )
            if vars(nearest).get(field.name, dataclasses.MISSING) != field.default:
                # Dataclasses take defaults from the bases in another order than attributes.
                raise TypeError(
                    f"{cls.__name__} inherits two defaults of {field.name}; it must declare one itself"
                )

    def __post_init__(self) -> None:
        check(self)


def _literal(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    checks.one_of(name, value, allowed)
    return value


def _finite(name: str, value: Any) -> float:
    return float(checks.number(name, value))


def _anything(name: str, value: Any) -> Any:
    return value


NOTHING = Rule("None", _anything)
ANYTHING = Rule("anything", _anything)
PLAIN: dict[Any, Rule] = {
    Any: ANYTHING,
    bool: Rule("true or false", checks.boolean),
    int: Rule("whole number", checks.whole),
    float: Rule("number", _finite),
    str: Rule("string", checks.string),
}


def rule(hint: Any) -> Rule:
    """What a type hint allows. Hints of other kinds than those of settings allow anything."""
    kind = get_origin(hint) or hint
    if kind is Annotated:
        own = [mark for mark in hint.__metadata__ if isinstance(mark, Rule)]
        return own[-1] if own else rule(hint.__origin__)
    if kind is Literal:
        allowed = get_args(hint)
        return Rule(" or ".join(map(repr, allowed)), functools.partial(_literal, allowed=allowed))
    if kind in (Union, UnionType):
        return _union(get_args(hint))
    if kind in (tuple, list):
        return _sequence(kind, get_args(hint) or (Any, ...))
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(hint, type):
        return _instance(hint)
    return ANYTHING


def _union(hints: Sequence[Any]) -> Rule:
    """A value is checked by the first hint whose type it has; else the first hint refuses it."""
    members = [(_types(hint), rule(hint)) for hint in hints if hint is not NoneType]
    optional = NoneType in hints
    texts = [own.text for _, own in members]

    def chosen(value: Any) -> Rule:
        if value is None and optional:
            return NOTHING
        for types, own in members:
            if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
                return own
        return members[0][1]

    return Rule(
        ", or ".join([*texts, NOTHING.text] if optional else texts),
        lambda name, value: chosen(value).check(name, value),
        lambda key, value: chosen(value).read(key, value),
    )


def _types(hint: Any) -> tuple[type, ...]:
    kind = get_origin(hint) or hint
    if kind is Annotated:
        return _types(hint.__origin__)
    if kind is Literal:
        return tuple(map(type, get_args(hint)))
    if kind is float:
        return (float, int)
    if kind in (tuple, list):
        return (tuple, list)
    if kind is Any or not isinstance(kind, type):
        return (object,)
    return (kind,)


def _sequence(kind: type, hints: Sequence[Any]) -> Rule:
    """tuple[A, B], tuple[A, ...] or list[A]; lists may stand for tuples, and tuples for lists."""
    fixed = kind is tuple and Ellipsis not in hints
    rules = [rule(hint) for hint in hints if hint is not Ellipsis]
    if fixed:
        text = f"tuple ({', '.join(own.text for own in rules)})"
    else:
        text = f"{kind.__name__} of {rules[0].text.replace('number', 'numbers', 1)}"

    def entries(name: str, value: Any) -> list[tuple[Rule, Any]]:
        if not isinstance(value, (tuple, list)) or (fixed and len(value) != len(rules)):
            raise TypeError(f"{name} is {value!r}; it must be a {text}")
        return list(zip(rules if fixed else rules * len(value), value, strict=True))

    return Rule(
        text,
        lambda name, value: kind(own.check(name, entry) for own, entry in entries(name, value)),
        lambda key, value: kind(own.read(key, entry) for own, entry in entries(key, value)),
    )


def _instance(kind: type) -> Rule:
    module = kind.__module__.rpartition(".")[2]

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}; it must be a {module}.{kind.__name__}")
        return value

    read = functools.partial(build, kind) if dataclasses.is_dataclass(kind) else check
    return Rule(kind.__name__, check, read)


class Setting(NamedTuple):
    name: str
    rule: Rule
    default: Any


def declared(of: Callable[..., Any], without: Collection[str] = ()) -> list[Setting]:
    """The settings of a dataclass, or the keyword arguments of a function."""
    hints = get_type_hints(of, include_extras=True)
    found = []
    for name, parameter in inspect.signature(of).parameters.items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and name not in without:
            found.append(Setting(name, rule(hints.get(name, Any)), parameter.default))
    return found


@functools.cache
def _checks(kind: type) -> list[tuple[str, Check]]:
    return [(setting.name, setting.rule.check) for setting in declared(kind)]


def check(instance: object) -> None:
    """Check every field of a dataclass against its annotation; for `__post_init__`."""
    for name, allowed in _checks(type(instance)):  # type: ignore[arg-type]
        allowed(name, getattr(instance, name))


def build(of: type, key: str, table: Any) -> Any:
    """The object that a table describes; `key` is where the table stands, and sentences name it."""
    if not isinstance(table, dict):
        raise TypeError(f"{key} is {table!r}; it must be a table")
    given = arguments(declared(of), key, table)
    try:
        return of(**given)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"[{key}] {error}") from error


def arguments(
    known: Sequence[Setting],
    key: str,
    table: Mapping[str, Any],
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values that a table gives, checked; `elsewhere` has the keys of those not under `key`."""
    rules = {setting.name: setting.rule for setting in known}
    keys = {name: f"{key}.{name}" for name in (*rules, *table)} | dict(elsewhere or {})
    for name in table:
        if name not in rules:
            raise ValueError(checks.unknown(keys[name], rules))
    for setting in known:
        if setting.default is REQUIRED and setting.name not in table:
            raise ValueError(f"{keys[setting.name]} is missing")
    return {name: rules[name].read(keys[name], value) for name, value in table.items()}


def read_kind(choice: str, kinds: Mapping[str, type], key: str, table: Any) -> Any:
    """The object that a table describes which says in `choice` which of several kinds it is."""
    if not isinstance(table, dict) or str(table.get(choice)) not in kinds:
        allowed = " or ".join(map(repr, kinds))
        raise ValueError(f"{key} is {table}; a table must have {choice} = {allowed}")
    return build(kinds[table[choice]], key, {k: v for k, v in table.items() if k != choice})
