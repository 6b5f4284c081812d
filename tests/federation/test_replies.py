"""Replies: weighted means over cohorts, and replies that are refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedbilevel as fb
from fedbilevel.core.rng import normal, root
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.federation import QuorumError
from fedbilevel.federation.replies import Replies, Reply
from fedbilevel.federation.stacks import reply_at, sum_finite
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


# Replies that were summed where they were computed

AXES = {"w": ("u", "s"), "b": ("u",), "v": (None, "u")}
TOTAL = {"u": 4, "s": 3}
PROBLEM = fb.Problem(
    lambda x, y, batch: torch.zeros(()),
    lambda x, y, batch: torch.zeros(()),
    x=Tree(w=torch.zeros(4, 3).double(), b=torch.zeros(8).double()),
    y=Tree(v=torch.zeros(2, 4).double(), c=torch.zeros(()).double()),
)
SUMMED: Any = SimpleNamespace(
    name="look", reply={"dx": "x", "loss": "scalar", "dy": "y", "extra": {"e": (2,)}}, summed=True
)


class Group(NamedTuple):
    """Clients that hold the same submodel, or the whole model."""

    replies: list[Reply]
    submodel: Submodel | None
    stack: dict[str, Any]
    refused: list[bool]

    def total(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """For each coordinate the weighted sum, the weights and the number of those who hold it."""
        whole = Tree(getattr(PROBLEM, SUMMED.reply[name]))
        total, weight, count = torch.zeros(3, whole.numel).double()
        held = torch.arange(whole.numel)
        if self.submodel:
            held = self.submodel.positions(whole)
        for index, reply in enumerate(self.replies):
            if not self.refused[index]:
                total[held] += reply.weight * flatten(reply_at(self.stack, index)[name])
                weight[held] += reply.weight
                count[held] += 1
        return total, weight, count


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Replies of up to three groups of clients, of which some are not finite."""
    made: list[Group] = []
    for number in range(draw(st.integers(1, 3))):
        submodel = None
        if draw(st.booleans()):
            kept = {}
            for axis, units in TOTAL.items():
                chosen = draw(st.sets(st.integers(0, units - 1), min_size=1))
                kept[axis] = torch.tensor(sorted(chosen))
            submodel = Submodel(AXES, TOTAL, kept)
        refused = draw(st.lists(st.booleans(), min_size=1, max_size=3))
        replies = []
        for index in range(len(refused)):
            client = 10 * number + index
            weight = draw(st.floats(0.01, 5))
            replies.append(Reply(client, client, draw(st.integers(1, 5)), weight, 0, {}))
        stack: dict[str, Any] = {}
        for name, kind in SUMMED.reply.items():
            key = root(number, name)
            if kind == "scalar":
                stack[name] = normal(key, (len(refused),), torch.float64)
                continue
            shapes = kind
            if isinstance(kind, str):
                whole = Tree(getattr(PROBLEM, kind))
                shapes = {tensor: tuple(value.shape) for tensor, value in whole.items()}
                if submodel:
                    shapes = submodel.shapes(whole)
            stack[name] = Tree()
            for tensor, shape in shapes.items():
                values = normal(key, (len(refused), *shape), torch.float64)
                stack[name][tensor] = values
        bad = draw(st.sampled_from([stack["loss"], stack["dx"]["b"], stack["dy"]["c"]]))
        bad[torch.tensor(refused)] = torch.nan
        made.append(Group(replies, submodel, stack, refused))
    return made


def add_all(groups: list[Group], summed: bool) -> Replies:
    """Add replies, those of each group together: as a stack, or as sums."""
    replies = Replies("a test", SUMMED, PROBLEM)
    for group in groups:
        if not summed:
            replies.add_stack(group.replies, group.stack, group.submodel)
            continue
        weights = torch.tensor([reply.weight for reply in group.replies], dtype=torch.float64)
        steps = torch.tensor([reply.steps for reply in group.replies])
        replies.add_sums(group.replies, sum_finite(group.stack, weights, steps), group.submodel)
    return replies


@pytest.mark.parametrize("summed", [False, True], ids=["stacks", "sums"])
@given(groups=groups())
@settings(max_examples=150, deadline=None)
def test_means_and_coverage_are_those_over_the_finite_replies(
    summed: bool, groups: list[Group]
) -> None:
    replies = add_all(groups, summed)
    accepted = []
    for group in groups:
        for index, reply in enumerate(group.replies):
            if not group.refused[index]:
                accepted.append((reply, reply_at(group.stack, index)))
    refused = sum(sum(group.refused) for group in groups)
    assert len(replies) == len(accepted)
    assert len(replies.refused) == refused
    assert [reply.client for reply in replies] == [reply.client for reply, _ in accepted]
    if not accepted:
        for mean in (replies.mean, replies.coverage_mean):
            with pytest.raises(QuorumError, match="a test: no reply was accepted"):
                mean("dx")
        return
    mean_steps = sum(reply.weight * reply.steps for reply, _ in accepted) / len(accepted)
    assert replies.mean("steps") == pytest.approx(mean_steps)
    mean_loss = sum(reply.weight * float(values["loss"]) for reply, values in accepted)
    assert replies.mean("loss") == pytest.approx(mean_loss / len(accepted))
    extra = sum(reply.weight * values["extra"]["e"] for reply, values in accepted)
    torch.testing.assert_close(replies.mean("extra")["e"], extra / len(accepted))

    with_submodels = any(group.submodel and (summed or not all(group.refused)) for group in groups)
    coverage = replies.coverage()
    assert len(coverage) == (4 if with_submodels else 0)
    for name, kind in (("dx", "x"), ("dy", "y")):
        total, weight, count = sum(torch.stack(group.total(name)) for group in groups)
        mean = replies.coverage_mean(name)
        assert {n: t.shape for n, t in mean.items()} == {
            n: t.shape for n, t in getattr(PROBLEM, kind).items()
        }
        expected = torch.where(count > 0, total / weight, 0.0)
        torch.testing.assert_close(flatten(mean), expected, rtol=1e-12, atol=1e-12)
        if with_submodels:
            assert coverage[f"min_coverage_{kind}"] == count[count > 0].min()
            assert coverage[f"covered_{kind}"] == pytest.approx(float((count > 0).double().mean()))
            with pytest.raises(RuntimeError, match=f"'{name}' comes from submodels"):
                replies.mean(name)
        else:
            torch.testing.assert_close(flatten(replies.mean(name)), total / len(accepted))


def test_a_coordinate_that_nobody_holds_has_a_mean_of_zero_and_no_coverage() -> None:
    part = Submodel(AXES, TOTAL, {"u": torch.tensor([2]), "s": torch.tensor([0, 1])})
    stack = {
        "dx": Tree(w=torch.full((1, 1, 2), 3.0).double(), b=torch.full((1, 2), 3.0).double()),
        "loss": torch.ones(1).double(),
        "dy": Tree(v=torch.full((1, 2, 1), 3.0).double(), c=torch.full((1,), 3.0).double()),
        "extra": Tree(e=torch.ones(1, 2).double()),
    }
    for summed in (False, True):
        replies = add_all([Group([Reply(0, 0, 1, 0.5, 0, {})], part, stack, [False])], summed)
        mean = replies.coverage_mean("dx")
        assert mean["w"].tolist() == [[0, 0, 0], [0, 0, 0], [3, 3, 0], [0, 0, 0]]
        assert mean["b"].tolist() == [0, 0, 0, 0, 3, 3, 0, 0]
        assert replies.coverage() == {
            "min_coverage_x": 1.0,
            "covered_x": 4 / 20,
            "min_coverage_y": 1.0,
            "covered_y": 3 / 9,
        }
