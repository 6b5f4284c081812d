"""Phases: as plain values on a wire, and refused where these do not fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fedbilevel.algorithms import Phase
from fedbilevel.algorithms.rabo import LocalHypergradientByDifferences
from fedbilevel.algorithms.shared import HessianProduct, LowerRound
from fedbilevel.algorithms.simfbo import Descend
from tests.support.probe import Probe


@pytest.mark.parametrize(
    "phase",
    [
        Probe(),
        Descend(lr_x=0.1, lr_y=1.0, lr_z=1e-3, damping=0.5, independent_batches=True, steps=3),
        LowerRound(lr_y=0.2, lower="sgd", steps="5 epochs", as_coded=True),
        HessianProduct(full=True),
        LocalHypergradientByDifferences(
            neumann_lr=0.5, terms=4, estimator="response", directions=2, width=1e-4
        ),
    ],
    ids=lambda phase: phase.name,
)
def test_a_phase_survives_the_wire(phase: Phase) -> None:
    loaded = Phase.from_dict(json.loads(json.dumps(phase.to_dict())))
    assert type(loaded) is type(phase)
    assert loaded == phase
    assert loaded.structure == phase.structure
    assert loaded.numbers == phase.numbers


DESCEND = Descend(lr_x=0.1, lr_y=0.1, lr_z=0.1).to_dict()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ("descend", "phase is 'descend'; it must be a name with its fields"),
        (None, "phase is None; it must be a name with its fields"),
        ({1: 2}, "phase is {1: 2}; it must be a name with its fields"),
        ({"lr_x": 0.1}, "phase is 'None', which is not registered here"),
        ({"phase": "os.system"}, "phase is 'os.system', which is not registered here"),
        ({"phase": "fedbilevel.algorithms.shared.Evaluation"}, "which is not registered here"),
        (
            {**DESCEND, "lr": 0.1},
            "Descend.lr' (did you mean 'lr_x' or 'lr_y' or 'lr_z'?); allowed are steps",
        ),
        ({**DESCEND, "draws": 9}, "Descend.draws'; allowed are steps, full, damping"),
        ({"phase": DESCEND["phase"], "lr_x": 0.1, "lr_z": 0.1}, "Descend.lr_y is missing"),
        ({**DESCEND, "lr_x": "0.1"}, "lr_x is '0.1'; it must be a number"),
        ({**DESCEND, "lr_x": None}, "lr_x is None; it must be a number"),
        ({**DESCEND, "lr_x": float("nan")}, "lr_x is nan; it must be finite"),
        ({**DESCEND, "independent_batches": "no"}, "is 'no'; it must be true or false"),
        ({**DESCEND, "full": 1}, "full is 1; it must be true or false"),
        ({**DESCEND, "steps": 0}, "steps is 0; it must be at least 1"),
        ({**DESCEND, "steps": 1.5}, "steps is 1.5; it must be a whole number"),
        (
            {**DESCEND, "steps": "5 rounds"},
            "steps is '5 rounds'; it must be a whole number, 'local'",
        ),
        (
            {**LowerRound(lr_y=0.1).to_dict(), "lower": "adam"},
            "is 'adam'; it must be one of 'svrg', 'sgd'",
        ),
    ],
)
def test_a_phase_that_does_not_fit_is_refused_in_one_sentence(plain: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as error:
        Phase.from_dict(plain)
    assert "\n" not in str(error.value)
