"""Replies that a GPU has summed are checked late, and count as if they had been checked at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedbilevel as fb
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core.submodels import Submodel
from fedbilevel.core.tree import Tree
from fedbilevel.federation import QuorumError
from fedbilevel.federation.replies import Replies, Reply
from fedbilevel.federation.stacks import sum_finite
from tests.support.gpu import check_same_run, defer_checks, run_with_bad_replies

VALUES = {
    0: [1.0, 1.0],
    1: [torch.nan, 0.0],
    2: [3.0, 3.0],
    3: [torch.inf, 0.0],
    4: [5.0],  # the first half of y
}


@pytest.fixture(autouse=True)
def _deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    defer_checks(monkeypatch)


def no_loss(x: Tree, y: Tree, batch: Any) -> torch.Tensor:
    return torch.zeros(())


def pending_replies(*groups: list[int]) -> Replies:
    """Replies of clients in `VALUES` that were summed in groups."""
    problem = fb.Problem(no_loss, no_loss, {"x": torch.zeros(1)}, {"y": torch.zeros(2)})
    phase: Any = SimpleNamespace(name="look", reply={"h": "y"}, summed=True)
    half = Submodel({"y": ("v",)}, {"v": 2}, {"v": torch.tensor([0])})
    replies = Replies("a test", phase, problem)
    for group in groups:
        stack = {"h": Tree(y=torch.tensor([VALUES[i] for i in group]))}
        weights = torch.ones(len(group), dtype=torch.float64)
        sums = sum_finite(stack, weights, torch.tensor(group))
        received = [Reply(i, i, i, 1.0, 0, {}) for i in group]
        replies.add_sums(received, sums, half if group == [4] else None)
    assert replies.has_pending
    return replies


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (len, 3),
        (lambda r: [reply.client for reply in r], [0, 2, 4]),
        (lambda r: r.mean("steps"), 2.0),
        (lambda r: r.coverage_mean("h")["y"].tolist(), [3.0, 2.0]),
        (lambda r: r.coverage()["min_coverage_y"], 2.0),
    ],
    ids=["len", "iter", "mean", "coverage_mean", "coverage"],
)
def test_pending_replies_are_checked_before_they_are_read(
    read: Callable[[Replies], Any], expected: Any
) -> None:
    for replies in (
        pending_replies([4], [0, 1], [2, 3]),  # the submodel comes first, or in between
        pending_replies([0, 1], [4], [2, 3]),
    ):
        assert replies.refused == []
        assert read(replies) == expected


def test_an_exchange_ends_before_its_replies_are_checked() -> None:
    run = run_with_bad_replies("simfbo", 0.999, like_a_gpu=True)
    x, y = run.fed.problem.start
    replies = run.fed.ask(SimFBO().descend(), range(5), x=x, y=y, z=y)
    assert replies.has_pending
    assert run.fed.ledger.refused_replies == 0
    with pytest.raises(QuorumError, match="0 of 5 replies were accepted"):
        run.fed.check_pending()
    assert run.fed.ledger.refused_replies == 5


@pytest.mark.parametrize(
    "name", ["simfbo", "shrofbo", "asfbo", "fednest", "aggitd", "unifbo", "fedavg"]
)
def test_pending_replies_count_as_if_checked_at_once(name: str) -> None:
    at_once = run_with_bad_replies(name, 0.04, like_a_gpu=False)
    later = run_with_bad_replies(name, 0.04, like_a_gpu=True)
    assert list(at_once)
    assert list(later)
    check_same_run(at_once, later)
    assert at_once.fed.ledger.refused_replies == later.fed.ledger.refused_replies > 5
    expected = [metrics["upper_loss"] for metrics in at_once.history]
    assert [metrics["upper_loss"] for metrics in later.history] == pytest.approx(expected)


def test_a_missed_quorum_ends_the_run_one_round_later() -> None:
    at_once = run_with_bad_replies("simfbo", 0.999, like_a_gpu=False)
    later = run_with_bad_replies("simfbo", 0.999, like_a_gpu=True)
    assert list(at_once)
    assert list(later)
    assert later.status == at_once.status == "diverged"
    assert later.reason == at_once.reason
    assert "round 1: 0 of 4 replies were accepted" in later.reason
    assert at_once.fed.ledger.rounds == 1
    assert later.fed.ledger.rounds == 2


def test_a_missed_quorum_ends_the_run_at_once_if_the_round_is_evaluated() -> None:
    run = run_with_bad_replies("simfbo", 0.999, like_a_gpu=True, every=1)
    assert list(run)
    assert "round 1: 0 of 4 replies were accepted" in run.reason
    assert run.fed.ledger.rounds == 1


def test_a_missed_quorum_is_in_the_checkpoint() -> None:
    saved = run_with_bad_replies("simfbo", 0.999, like_a_gpu=True)
    saved.advance()
    resumed = run_with_bad_replies("simfbo", 0.999, like_a_gpu=True)
    resumed.fed.restore(saved.fed.snapshot())
    with pytest.raises(QuorumError, match="round 1: 0 of 4"):
        resumed.advance()


def test_a_rollback_neither_loses_nor_doubles_refused_replies() -> None:
    run = run_with_bad_replies("simfbo", 0.5, like_a_gpu=True)
    run.advance()
    mark = run.fed.mark()
    state = run.state
    for _ in range(2):
        run.fed.rollback(mark)
        run.state = state
        run.advance()
    run.fed.check_pending()
    straight = run_with_bad_replies("simfbo", 0.5, like_a_gpu=False)
    for _ in range(2):
        straight.advance()
    check_same_run(straight, run)
    assert run.fed.ledger.refused_replies == straight.fed.ledger.refused_replies > 0


def test_pending_replies_are_counted_before_an_uncharged_exchange() -> None:
    run = run_with_bad_replies("simfbo", 0.5, like_a_gpu=True)
    run.advance()
    before = run.fed.ledger.refused_replies
    with run.fed.uncharged("a test asks for it"):
        run.fed.check_pending()
    assert run.fed.ledger.refused_replies > before
