"""Tasks: an error of a client's own code or data names the client, the phase and the round."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Message, Phase
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation import ClientError
from fedbilevel.federation.task import on_client
from tests.support.probe import Probe, ask_each, federation, loss


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_a_failing_client_is_named_with_phase_and_round(mode: str) -> None:
    def fails_on_client_1(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor], rng: Any) -> Tensor:
        if batch[0].shape[0] == 5:
            raise IndexError("target 12 is out of bounds")
        return loss(x, y, batch)

    fed = federation(sizes=[4, 5, 4], mode=mode)
    object.__setattr__(fed.problem, "lower", fails_on_client_1)
    sentence = "client 1, phase 'probe', round 1: IndexError: target 12 is out of bounds"
    with pytest.raises(ClientError, match=f"^{sentence}$"):
        ask_each(fed, [0, 1, 2])


def test_a_loss_that_cannot_be_stacked_is_refused_with_a_hint() -> None:
    def branching(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor], rng: Any) -> Tensor:
        if batch[0].sum() > 0:
            return loss(x, y, batch)
        return 2 * loss(x, y, batch)

    fed = federation()
    object.__setattr__(fed.problem, "lower", branching)
    with pytest.raises(
        ClientError, match=r"every client runs by itself but not in a stack.*mode='loop'"
    ):
        ask_each(fed, [0, 1, 2])


class Unreadable(Sequence[fb.ClientData]):
    """Four clients; the data of client 2 cannot be loaded."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: Any) -> Any:
        if i == 2:
            raise self.error
        data = torch.full((3, 1), float(i), dtype=torch.float64)
        return fb.ClientData(train=(data,), val=(data,))


def name_of_error(value: object) -> str:
    return type(value).__name__ if isinstance(value, Exception) else ""


LOADING_ERRORS = pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            json.JSONDecodeError("Expecting value", "{", 0),
            ValueError,
            "JSONDecodeError: Expecting value",
        ),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            ValueError,
            "UnicodeDecodeError: 'utf-8' codec",
        ),
        (ValueError("no rows"), ValueError, "no rows"),
        (TypeError("not a table"), TypeError, "not a table"),
        (FileNotFoundError(2, "gone"), ClientError, "FileNotFoundError: [Errno 2] gone"),
        (KeyError("images"), ClientError, "KeyError: 'images'"),
        (AssertionError(), ClientError, "AssertionError: no message"),
    ],
    ids=name_of_error,
)


@pytest.mark.parametrize("mode", ["stack", "loop"])
@pytest.mark.parametrize("steps", [1, "2 epochs"])
@LOADING_ERRORS
def test_an_error_of_a_clients_own_loader_names_the_client_and_the_cause(
    error: Exception, kind: type[Exception], message: str, steps: Any, mode: str
) -> None:
    fed = federation(clients=Unreadable(error), mode=mode)
    sentence = f"client 2, phase 'probe', round 1: {message}"
    with pytest.raises(kind, match=f"^{re.escape(sentence)}") as raised:
        ask_each(fed, range(4), Probe(steps=steps))
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@LOADING_ERRORS
def test_an_error_on_a_client_stays_a_value_or_type_error(
    error: Exception, kind: type[Exception], message: str
) -> None:
    sentence = f"client 7, round 3: {message}"
    with pytest.raises(kind, match=f"^{re.escape(sentence)}") as raised, on_client(7, "round 3"):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [ClientError("client 3, round 1: gone"), KeyboardInterrupt("now")]
)
def test_an_interrupt_or_an_error_that_names_its_client_is_unchanged(
    error: BaseException,
) -> None:
    with pytest.raises(type(error)) as raised, on_client(7, "round 3"):
        raise error
    assert raised.value is error


class ChangesItsMessage(Phase):
    """A phase that writes into what the server has sent."""

    name = "changes"
    reply: ClassVar = {"h": "x"}

    def start(self, message: Message) -> fb.Tree:
        return message.x

    def step(self, x: fb.Tree, oracle: Oracle, batch: fb.Batch) -> fb.Tree:
        x["x"].mul_(2)
        return x

    def finish(self, x: fb.Tree) -> dict[str, fb.Tree]:
        return {"h": x}


@pytest.mark.parametrize("mode", ["stack", "loop"])
def test_a_phase_that_changes_its_message_in_place_is_refused(mode: Any) -> None:
    task = fb.tasks.load("quadratic", clients=3)
    fed = fb.simulated_federation(task.problem, task.clients, mode=mode)
    with pytest.raises(
        RuntimeError, match=r"phase 'changes', round 1 changed its message in place"
    ):
        fed.ask(ChangesItsMessage(), [0, 1, 2], x=fb.Tree(task.problem.x))
