"""Replies: weighted means over cohorts, and replies that are refused."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch

from fedbilevel.federation import QuorumError
from tests.support.probe import Probe, SummedProbe, ask_each, federation


@pytest.mark.parametrize("weights", ["uniform", "samples", [1.0, 2.0, 5.0]])
def test_means_are_unbiased_over_cohorts(weights: Any) -> None:
    """The average over all cohorts of a size is the weighted mean over all clients.

    The weights in a cohort C are p~_i = (n / |C|) p_i.
    """
    fed = federation(sizes=[2, 3, 7], weights=weights)
    p = torch.tensor([fed.weights()[i] for i in range(3)])
    everyone = ask_each(fed, [0, 1, 2]).mean("own")
    assert everyone == pytest.approx(float((p * torch.tensor([0.0, 10.0, 20.0])).sum()))
    cohorts = ([0, 1], [0, 2], [1, 2])
    over_cohorts = sum(ask_each(fed, cohort).mean("own") for cohort in cohorts) / 3
    assert over_cohorts == pytest.approx(everyone)
    tree = ask_each(fed, [0, 1, 2]).mean("mean")
    assert float(tree["x"]) == pytest.approx(float((p * torch.tensor([0.5, 101.0, 203.0])).sum()))


def test_of_summed_replies_only_the_mean_is_known() -> None:
    replies = ask_each(federation(), [0, 2], SummedProbe())
    assert replies.mean("own") == 10.0
    assert [(r.client, r.values) for r in replies] == [(0, {}), (2, {})]
    with pytest.raises(KeyError, match="replies with mean, evaluations, own, steps, not 'hx'"):
        replies.mean("hx")


def test_whole_number_replies_are_averaged_exactly() -> None:
    class Counting(Probe):
        reply: ClassVar = {"count": "scalar"}

        def finish(self, carry: Any) -> dict[str, Any]:
            return {"count": (carry[2] / 10).long()}

    fed = federation(sizes=[1, 2, 7], weights="samples")
    mean = ask_each(fed, [0, 1, 2], Counting()).mean("count")
    assert mean == pytest.approx(0.1 * 0 + 0.2 * 1 + 0.7 * 2)


class Poisoned(Probe):
    """A probe whose mean is NaN on client 1."""

    def finish(self, carry: Any) -> dict[str, Any]:
        reply = super().finish(carry)
        poisoned = reply["own"] == 10.0
        mean = reply["mean"].map(lambda t: torch.where(poisoned, torch.nan, t))
        return reply | {"mean": mean}


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_a_reply_that_is_not_finite_is_refused_by_name_and_the_rest_counts(
    mode: str, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, logger="fedbilevel")
    fed = federation(mode=mode)
    replies = ask_each(fed, [0, 1, 2], Poisoned())
    assert replies.refused == ["client 1: mean is not finite"]
    assert "phase 'probe', round 1: reply refused, client 1: mean is not finite" in caplog.text
    assert len(replies) == 2
    assert replies.mean("own") == 10.0
    assert fed.ledger.refused_replies == 1
    with pytest.raises(
        QuorumError, match="phase 'probe', round 2: 0 of 1 replies were accepted, at least 1 needed"
    ):
        ask_each(fed, [1], Poisoned())
