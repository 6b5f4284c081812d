"""Rules: which values an annotation allows, and how tables are read by them.

`settings.py` is the public face of this module, and has the annotations.
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
    Literal,
    NamedTuple,
    TypeVar,
    Union,
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
            settings.py) accept every value.

    Returns:
        The last `Rule` in the metadata of an `Annotated` hint, else a rule made from the type.

    Examples:
        >>> from fedbilevel.core.settings import Count
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
        plural = re.sub("number|string", r"\g<0>s", rules[0].text, count=1)
        text = f"{kind.__name__} of {plural}"

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
        >>> from fedbilevel.core.settings import Count
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
        >>> from fedbilevel.core.settings import Count, NonNegative
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
        >>> from fedbilevel.core.settings import Count
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
