"""Settings are declared once, in the annotations of a dataclass or function.

The annotation of a field states which values it may take. Constructors (`check`), the reader of
TOML tables (`build`) and the listings of the command line (`declared_settings`) all read it from
there, so that a wrong value gets the same message everywhere. These constraints are defined here:

    Positive          number above 0
    NonNegative       number, at least 0
    Fraction          number in (0, 1]
    Probability       number in [0, 1]
    Decay             number in [0, 1)
    Count             whole number, at least 1
    Bounds            pair (low, high) with 0 < low <= high
    StepsOrEpochs     whole number, at least 1, or "N epochs", or None

Two functions make further constraints: `Annotated[int, at_least(2)]` and
`Annotated[float, within("above 1", lambda value: value > 1)]`. Plain annotations are checked too:
`bool`, `int`, `float` (finite), `str`, `Literal`, unions, tuples, lists, and other classes by
`isinstance`. Any other annotation, such as `Callable`, accepts every value.

Examples:
    >>> from dataclasses import dataclass
    >>> from typing import Annotated, Literal
    >>> from fedbilevel.core import settings
    >>> from fedbilevel.core.settings import Decay, Positive, at_least
    >>> @dataclass(frozen=True)
    ... class Momentum:
    ...     lr: Positive = 0.1
    ...     momentum: Decay = 0.9
    ...     warmup: Annotated[int, at_least(0)] = 0
    ...     kind: Literal["polyak", "nesterov"] = "polyak"
    ...
    ...     def __post_init__(self) -> None:
    ...         settings.check(self)
    >>> Momentum(momentum=1.0)
    Traceback (most recent call last):
        ...
    ValueError: momentum is 1.0; it must be in [0, 1)
    >>> settings.build(Momentum, "optimizer", {"lr": 1, "kind": "nesterov"})
    Momentum(lr=1.0, momentum=0.9, warmup=0, kind='nesterov')
    >>> settings.build(Momentum, "optimizer", {"lr": 0})
    Traceback (most recent call last):
        ...
    ValueError: optimizer.lr is 0; it must be above 0
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
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from fedbilevel.core import checks

T = TypeVar("T")
Check = Callable[[str, object], object]
REQUIRED = inspect.Parameter.empty  # the default of a setting that has no default


class Rule:
    """The values that a setting may take; goes into `typing.Annotated` as metadata.

    Args:
        text: The allowed values in words, for listings.
        check: Called as `check(name, value)`. Raises with a one-sentence message if the value is
            not allowed. Returns the value as its declared type: an int becomes a float where a
            float is declared, a list becomes a tuple where a tuple is declared.
        read: The same for a value from a TOML table, called with its dotted key instead of its
            name. Objects are tables there. Defaults to `check`.

    Examples:
        >>> def check_port(name: str, value: object) -> int:
        ...     return checks.integer(name, value, least=1, most=65535)
        >>> Port = Annotated[int, Rule("port, 1 to 65535", check_port)]
        >>> rule_for(Port | None).text
        'port, 1 to 65535, or None'
    """

    def __init__(self, text: str, check: Check, read: Check | None = None) -> None:
        self.text = text
        self.check = check
        self.read = read or check


def within(text: str, holds: Callable[[float], bool]) -> Rule:
    """Make a rule for numbers.

    Args:
        text: The condition in words; completes "it must be ...".
        holds: Whether a number meets the condition.

    Returns:
        A rule for `Annotated[float, ...]`.

    Examples:
        >>> within("above 1", lambda value: value > 1).check("factor", 0.5)
        Traceback (most recent call last):
            ...
        ValueError: factor is 0.5; it must be above 1
    """

    def check(name: str, value: object) -> float:
        number = checks.number(name, value)
        if not holds(number):
            raise ValueError(f"{name} is {value}; it must be {text}")
        return float(number)

    return Rule(f"number {text}", check)


def at_least(least: int) -> Rule:
    """Make a rule for whole numbers.

    Args:
        least: The smallest number that is allowed.

    Returns:
        A rule for `Annotated[int, ...]`.

    Examples:
        >>> at_least(2).check("ways", 1)
        Traceback (most recent call last):
            ...
        ValueError: ways is 1; it must be at least 2
    """
    return Rule(f"whole number, at least {least}", functools.partial(checks.integer, least=least))


def parse_epochs(value: object) -> int | None:
    """Parse a number of epochs, such as "5 epochs" or "1 epoch".

    Args:
        value: Any value.

    Returns:
        The number, at least 1; None if the value is not such a string.

    Examples:
        >>> parse_epochs("5 epochs"), parse_epochs("1 epoch"), parse_epochs(5)
        (5, 1, None)
    """
    if not isinstance(value, str):
        return None
    match = re.fullmatch(r"([1-9][0-9]*) epochs?", value)
    if match is None:
        return None
    return int(match[1])


def _check_bounds(name: str, value: object) -> tuple[float, float]:
    low, high = checks.pair(name, value)
    if not 0 < low <= high:
        raise ValueError(f"{name} is {(low, high)}; it must be (low, high) with 0 < low <= high")
    return float(low), float(high)


def _check_steps_or_epochs(name: str, value: object) -> object:
    if isinstance(value, str):
        if parse_epochs(value) is None:
            allowed = "a whole number, 'N epochs', or None for the environment's"
            raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    elif value is not None:
        checks.integer(name, value, least=1)
    return value


Positive = Annotated[float, Rule("number above 0", checks.positive)]
"""A number above 0."""

NonNegative = Annotated[float, Rule("number, at least 0", checks.non_negative)]
"""A number, at least 0."""

Fraction = Annotated[float, Rule("number in (0, 1]", checks.fraction)]
"""A number above 0 and at most 1, such as a share of the clients."""

Factor = Annotated[float, within("at least 1", lambda value: value >= 1)]
"""A number, at least 1, that multiplies something."""

Probability = Annotated[float, within("in [0, 1]", lambda value: 0 <= value <= 1)]
"""A number from 0 to 1."""

Decay = Annotated[float, within("in [0, 1)", lambda value: 0 <= value < 1)]
"""A number from 0 to below 1, such as the factor of a moving average."""

Count = Annotated[int, at_least(1)]
"""A whole number, at least 1."""

Bounds = Annotated[
    tuple[float, float], Rule("pair (low, high) with 0 < low <= high", _check_bounds)
]
"""A pair (low, high) with 0 < low <= high."""

StepsOrEpochs = Annotated[
    int | str | None,
    Rule(
        "whole number, at least 1, or 'N epochs', or None for local_steps", _check_steps_or_epochs
    ),
]
"""A number of steps, "N epochs" for N passes over the data, or None for the environment's steps."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class FrozenDataclass:
    """Base class whose subclasses are frozen, keyword-only dataclasses, checked at construction.

    A subclass needs no decorator, so that none can be forgotten.

    Raises:
        TypeError: A subclass inherits different defaults for one field and declares none itself;
            dataclasses and attribute lookup would disagree about which of them holds.

    Examples:
        >>> class Clip(FrozenDataclass):
        ...     norm: Positive = 1.0
        >>> Clip(norm=2.0)
        Clip(norm=2.0)
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        for field in dataclasses.fields(cls):
            nearest = next(
                base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {})
            )
            # Dataclasses take defaults from the bases in another order than attribute lookup does.
            if vars(nearest).get(field.name, dataclasses.MISSING) != field.default:
                raise TypeError(
                    f"{cls.__name__} inherits two defaults of {field.name}; "
                    "it must declare one itself"
                )

    def __post_init__(self) -> None:
        check(self)


def _check_literal(name: str, value: object, allowed: Sequence[str]) -> object:
    checks.one_of(name, value, allowed)
    return value


def _check_finite(name: str, value: object) -> float:
    return float(checks.number(name, value))


def _accept(name: str, value: object) -> object:
    return value


_NONE = Rule("None", _accept)
_ANYTHING = Rule("anything", _accept)
_PLAIN_TYPES: dict[object, Rule] = {
    Any: _ANYTHING,
    bool: Rule("true or false", checks.boolean),
    int: Rule("whole number", checks.integer),
    float: Rule("number", _check_finite),
    str: Rule("string", checks.string),
}


def rule_for(hint: object) -> Rule:
    """Return the rule of a type hint.

    Args:
        hint: The annotation of a setting. Kinds of hints that settings do not use (see the top of
            this module) accept every value.

    Returns:
        The last `Rule` in the metadata of an `Annotated` hint, else a rule made from the type.

    Examples:
        >>> rule_for(Count | None).text
        'whole number, at least 1, or None'
    """
    kind: Any = get_origin(hint) or hint
    if kind is Annotated:
        annotated, *metadata = get_args(hint)
        rules = [entry for entry in metadata if isinstance(entry, Rule)]
        if rules:
            return rules[-1]
        return rule_for(annotated)
    if kind is Literal:
        allowed = get_args(hint)
        check = functools.partial(_check_literal, allowed=allowed)
        return Rule(" or ".join(map(repr, allowed)), check)
    if kind in (Union, UnionType):
        return _union_rule(get_args(hint))
    if kind in (tuple, list):
        return _sequence_rule(kind, get_args(hint) or (Any, ...))
    if kind in _PLAIN_TYPES:
        return _PLAIN_TYPES[kind]
    if isinstance(hint, type):
        return _instance_rule(hint)
    return _ANYTHING


def _union_rule(hints: Sequence[object]) -> Rule:
    """The first member whose type the value has checks it; if there is none, the first member."""
    members = [(_types(hint), rule_for(hint)) for hint in hints if hint is not NoneType]
    texts = [member.text for _, member in members]
    optional = NoneType in hints
    if optional:
        texts.append(_NONE.text)

    def member_for(value: object) -> Rule:
        if value is None and optional:
            return _NONE
        for types, member in members:
            if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
                return member
        return members[0][1]

    def check(name: str, value: object) -> object:
        return member_for(value).check(name, value)

    def read(key: str, value: object) -> object:
        return member_for(value).read(key, value)

    return Rule(", or ".join(texts), check, read)


def _types(hint: object) -> tuple[type, ...]:
    """The types of the values that a member of a union is meant for."""
    kind: Any = get_origin(hint) or hint
    if kind is Annotated:
        return _types(get_args(hint)[0])
    if kind is Literal:
        return tuple(map(type, get_args(hint)))
    if kind is float:
        return (float, int)
    if kind in (tuple, list):
        return (tuple, list)
    if kind is Any or not isinstance(kind, type):
        return (object,)
    return (kind,)


def _sequence_rule(kind: type, hints: Sequence[object]) -> Rule:
    """The rule of tuple[A, B], tuple[A, ...] or list[A]; a tuple and a list are both accepted."""
    fixed_length = kind is tuple and Ellipsis not in hints
    rules = [rule_for(hint) for hint in hints if hint is not Ellipsis]
    if fixed_length:
        text = f"tuple ({', '.join(rule.text for rule in rules)})"
    else:
        text = f"{kind.__name__} of {rules[0].text.replace('number', 'numbers', 1)}"

    def entries(name: str, value: object) -> list[tuple[Rule, object]]:
        if not isinstance(value, (tuple, list)) or (fixed_length and len(value) != len(rules)):
            raise TypeError(f"{name} is {value!r}; it must be a {text}")
        if fixed_length:
            return list(zip(rules, value, strict=True))
        return [(rules[0], entry) for entry in value]

    def check(name: str, value: object) -> object:
        return kind(rule.check(name, entry) for rule, entry in entries(name, value))

    def read(key: str, value: object) -> object:
        return kind(rule.read(key, entry) for rule, entry in entries(key, value))

    return Rule(text, check, read)


def _instance_rule(kind: type) -> Rule:
    """The rule of a class; in a TOML table, a dataclass is a table of its fields."""
    module = kind.__module__.rpartition(".")[2]

    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {value!r}; it must be a {module}.{kind.__name__}")
        return value

    def read(key: str, value: object) -> object:
        if not dataclasses.is_dataclass(kind):
            return check(key, value)
        return build(kind, key, value)

    return Rule(kind.__name__, check, read)


class Setting(NamedTuple):
    """One setting of a dataclass or function.

    Attributes:
        name: The name of the field or argument.
        rule: The values that it may take.
        default: Its default, or `REQUIRED`.

    Examples:
        >>> Setting("clients", rule_for(Count), default=8).rule.text
        'whole number, at least 1'
    """

    name: str
    rule: Rule
    default: object


def declared_settings(
    declaration: Callable[..., object], without: Collection[str] = ()
) -> list[Setting]:
    """List the settings of a dataclass, or the keyword arguments of a function.

    Args:
        declaration: A dataclass, or a function whose arguments are settings. `*args` and `**kwargs`
            are left out.
        without: Names to leave out.

    Returns:
        The settings in the order of their declaration.

    Examples:
        >>> def load(clients: Count, noise: NonNegative = 0.1, seed: int = 0) -> None: ...
        >>> for setting in declared_settings(load, without=["seed"]):
        ...     print(setting.name, "-", setting.rule.text)
        clients - whole number, at least 1
        noise - number, at least 0
    """
    hints = get_type_hints(declaration, include_extras=True)
    settings = []
    for name, parameter in inspect.signature(declaration).parameters.items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and name not in without:
            settings.append(Setting(name, rule_for(hints.get(name, Any)), parameter.default))
    return settings


@functools.cache
def _field_checks(kind: type) -> list[tuple[str, Check]]:
    return [(setting.name, setting.rule.check) for setting in declared_settings(kind)]


def check(instance: object) -> None:
    """Check every field of a dataclass against its annotation; call it in `__post_init__`.

    Args:
        instance: An object of a dataclass. Its fields stay as they are: an int in a field that is
            declared as a float is accepted and not converted.

    Raises:
        TypeError: A field has a value of the wrong type.
        ValueError: A field has a value that is not allowed.

    Examples:
        >>> @dataclasses.dataclass
        ... class Clip:
        ...     norm: Positive
        >>> check(Clip(norm=2.0))
        >>> check(Clip(norm=-2.0))
        Traceback (most recent call last):
            ...
        ValueError: norm is -2.0; it must be above 0
    """
    for name, check_field in _field_checks(type(instance)):  # type: ignore[arg-type]
        check_field(name, getattr(instance, name))


def build(declaration: Callable[..., T], key: str, table: object) -> T:
    """Build the object that a TOML table describes.

    Args:
        declaration: The dataclass of the object.
        key: The dotted key of the table, for messages.
        table: The table, a dict of settings by name. Values are converted to the declared types.

    Returns:
        `declaration` called with the values of the table.

    Raises:
        TypeError: `table` is not a dict, or a value has the wrong type.
        ValueError: A key is unknown or missing, or a value is not allowed.

    Examples:
        >>> from fedbilevel.core.schedules import Power
        >>> build(Power, "lr_x", {"start": 1})
        Power(start=1.0, power=0.5, after=1.0)
    """
    if not isinstance(table, dict):
        raise TypeError(f"{key} is {table!r}; it must be a table")
    values = read_arguments(declared_settings(declaration), key, table)
    try:
        return declaration(**values)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"[{key}] {error}") from error


def read_arguments(
    known: Sequence[Setting],
    key: str,
    table: Mapping[str, object],
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Check and convert the values of a table.

    Args:
        known: The settings that the table may have.
        key: The dotted key of the table, for messages.
        table: The values by name.
        elsewhere: The dotted keys of those values that do not stand under `key` in the file.

    Returns:
        The values of the table, converted to the declared types.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A key is unknown or missing, or a value is not allowed.

    Examples:
        >>> settings = [Setting("clients", rule_for(Count), REQUIRED)]
        >>> read_arguments(settings, "task", {"client": 3})
        Traceback (most recent call last):
            ...
        ValueError: unknown key 'task.client' (did you mean 'clients'?); allowed are clients
    """
    rules = {setting.name: setting.rule for setting in known}
    keys = {name: f"{key}.{name}" for name in (*rules, *table)} | dict(elsewhere or {})
    for name in table:
        if name not in rules:
            raise ValueError(checks.unknown_key(keys[name], rules))
    for setting in known:
        if setting.default is REQUIRED and setting.name not in table:
            raise ValueError(f"{keys[setting.name]} is missing")
    return {name: rules[name].read(keys[name], value) for name, value in table.items()}


def build_variant(tag: str, variants: Mapping[str, Callable[..., T]], key: str, table: object) -> T:
    """Build an object from a table that names its class, such as {schedule = "cosine", start = 1}.

    Args:
        tag: The entry of the table that names the class.
        variants: The classes by name.
        key: The dotted key of the table, for messages.
        table: The tag and the settings of the class.

    Returns:
        An object of the class that the table names.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: The tag is missing or names no class, or the settings are wrong.

    Examples:
        >>> from fedbilevel.core.schedules import Power
        >>> table = {"schedule": "power", "start": 1}
        >>> build_variant("schedule", {"power": Power}, "lr_x", table)
        Power(start=1.0, power=0.5, after=1.0)
    """
    if not isinstance(table, dict) or str(table.get(tag)) not in variants:
        allowed = " or ".join(map(repr, variants))
        raise ValueError(f"{key} is {table}; a table must have {tag} = {allowed}")
    settings = {name: value for name, value in table.items() if name != tag}
    return build(variants[table[tag]], key, settings)
