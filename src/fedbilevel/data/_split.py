"""Which rows of a client are for training, for validation and for the test."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def split_rows(
    part: NDArray[np.int64],
    own: NDArray[Any],
    validation: float,
    trusted: NDArray[np.bool_] | None,
    test: float,
    rng: np.random.Generator,
    name: str,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Split the rows of one client by group into training, validation and test rows.

    Args:
        part: The rows of the client.
        own: The group of each of them.
        validation: The fraction of groups for validation, where none is trusted.
        trusted: Which rows are trusted; None draws those for validation.
        test: The fraction of groups for the test, of the trusted ones if there are.
        rng: Draws them.
        name: The name of the client, for messages.

    Returns:
        The rows for training, for validation and for the test.

    Raises:
        ValueError: There are too few rows.
    """
    _, groups = np.unique(own, return_inverse=True)
    if trusted is None:
        role = _drawn_roles(name, groups, validation, test, rng)
    else:
        role = _trusted_roles(name, groups, trusted, test, rng)
    roles = role[groups]
    return part[roles == 0], part[roles == 1], part[roles == 2]


def _drawn_roles(
    name: str, groups: NDArray[np.int64], validation: float, test: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the role of each group: 0 for training, 1 for validation, 2 for the test."""
    units = groups.max() + 1
    tested = max(1, round(test * units)) if test else 0
    needed = 2 + min(tested, 1)
    if units < needed:
        what = "rows" if units == len(groups) else "groups of rows"
        raise ValueError(f"client {name!r} has {units} {what}; it needs at least {needed}")
    order = rng.permutation(units)
    tested = min(tested, units - needed + 1)
    validated = min(max(1, round(validation * units)), units - tested - 1)
    role = np.zeros(units, dtype=np.int64)
    role[order[:tested]] = 2
    role[order[tested : tested + validated]] = 1
    return role


def _trusted_roles(
    name: str,
    groups: NDArray[np.int64],
    trusted: NDArray[np.bool_],
    test: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Give trusted groups to validation, but for those that are drawn for the test."""
    role = np.zeros(groups.max() + 1, dtype=np.int64)
    role[groups[trusted]] = 1
    if not np.array_equal(role[groups] == 1, trusted):
        raise ValueError(
            f"client {name!r} has a group with trusted samples and others; "
            "validation must be the same for all rows of a group"
        )
    known = np.flatnonzero(role)
    what = "samples" if len(role) == len(groups) else "groups of samples"
    needed = 2 if test else 1
    if len(known) < needed:
        raise ValueError(
            f"client {name!r} has {len(known)} trusted {what}; it needs at least {needed}"
        )
    if len(known) == len(role):
        raise ValueError(
            f"client {name!r} has no {what} but trusted ones; it needs at least 1 to train on"
        )
    tested = min(max(1, round(test * len(known))), len(known) - 1) if test else 0
    role[rng.permutation(known)[:tested]] = 2
    return role
