"""Kinds: a client's reply must have the names, shapes and dtype that its phase declares."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.support.probe import Probe, SummedProbe, ask_each, federation


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"mean": "x"}, r"replied with \['evaluations', 'mean', 'own'\]; it declares \['mean'\]"),
        (
            {"mean": "scalar", "evaluations": "scalar", "own": "scalar"},
            "'mean' of another shape than 'scalar'",
        ),
        (
            {"mean": "y", "evaluations": "scalar", "own": "scalar"},
            "'mean' of another shape than 'y'",
        ),
    ],
)
def test_replies_must_be_what_the_phase_declares(
    reply: dict[str, str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Probe, "reply", reply)
    fed = federation()
    # Also where replies are summed before anybody checks them, as on a GPU.
    for fed.transport.executor.on_gpu in (False, True):
        for phase in (Probe(), SummedProbe()):
            with pytest.raises(TypeError, match=message):
                ask_each(fed, [0, 1], phase)


class Coarse(Probe):
    """A probe that replies in single precision."""

    def finish(self, carry: Any) -> dict[str, Any]:
        reply = super().finish(carry)
        return reply | {"mean": reply["mean"].map(Tensor.float)}


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_replies_must_have_the_dtype_of_the_problem(mode: str) -> None:
    with pytest.raises(
        TypeError, match=r"replied with 'mean' of another dtype than torch\.float64"
    ):
        ask_each(federation(mode=mode), [0, 1], Coarse())
