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
    >>> from typing import Annotated
    >>> from fedbilevel.core import settings
    >>> from fedbilevel.core.settings import Decay, Positive, at_least
    >>> @dataclass(frozen=True)
    ... class Momentum:
    ...     lr: Positive = 0.1
    ...     momentum: Decay = 0.9
    ...     warmup: Annotated[int, at_least(0)] = 0
    ...     nesterov: bool = False
    ...
    ...     def __post_init__(self) -> None:
    ...         settings.check(self)
    >>> Momentum(momentum=1.0)
    Traceback (most recent call last):
        ...
    ValueError: momentum is 1.0; it must be in [0, 1)
    >>> settings.build(Momentum, "optimizer", {"lr": 1, "nesterov": True})
    Momentum(lr=1.0, momentum=0.9, warmup=0, nesterov=True)
    >>> settings.build(Momentum, "optimizer", {"lr": 0})
    Traceback (most recent call last):
        ...
    ValueError: optimizer.lr is 0; it must be above 0
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, dataclass_transform

from fedbilevel.core import checks
from fedbilevel.core._rules import (
    REQUIRED,
    Check,
    Rule,
    Setting,
    build,
    build_variant,
    declared_settings,
    read_arguments,
    rule_for,
)

__all__ = [
    "REQUIRED",
    "Bounds",
    "Count",
    "Decay",
    "Factor",
    "Fraction",
    "FrozenDataclass",
    "NonNegative",
    "Positive",
    "Probability",
    "Rule",
    "Setting",
    "StepsOrEpochs",
    "at_least",
    "build",
    "build_variant",
    "check",
    "declared_settings",
    "parse_epochs",
    "read_arguments",
    "rule_for",
    "within",
]


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
