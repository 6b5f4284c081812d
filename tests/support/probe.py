"""Phases that report what a client was sent and saw, and a small federation to run them in."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Message, Phase
from fedbilevel.core.oracle import Oracle
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.phase import Steps
from fedbilevel.runs import checkpoint


class Probe(Phase):
    """Replies with the mean of its data, the number of its steps, and `own` times `scale`."""

    name = "probe"
    batch = "train"
    reply: ClassVar = {"mean": "x", "evaluations": "scalar", "own": "scalar"}
    summed = False

    steps: Steps = "local"

    def start(self, m: Message) -> Any:
        seen = fb.Tree(x=torch.zeros(1, dtype=torch.float64))
        evaluations = torch.zeros((), dtype=torch.float64)
        return seen, evaluations, m.own * m.scale

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        seen, evaluations, own = carry
        y = fb.Tree(y=torch.zeros(1, dtype=torch.float64))
        oracle.lower_gradient_y(fb.Tree(x=seen["x"]), y, batch)
        return seen + fb.Tree(x=batch.train[0].mean(0)), evaluations + 1, own

    def finish(self, carry: Any) -> dict[str, Any]:
        return dict(zip(("mean", "evaluations", "own"), carry, strict=True))


class SummedProbe(Probe):
    """A probe whose replies are only summed."""

    name = "summed"
    summed = True


class Visits(Phase):
    """Adds `own` to what the client remembers, and replies with the sum."""

    name = "visits"
    batch = "train"
    remembers = True
    reply: ClassVar = {"visits": "scalar"}
    summed = False

    def start(self, m: Message) -> Any:
        return m.memory.get("visits", torch.zeros((), dtype=torch.float64)) + m.own

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        return carry

    def finish(self, carry: Any) -> dict[str, Any]:
        return {"visits": carry, "memory": {"visits": carry}}


PROBE = Probe()
VISITS = Visits()


def loss(x: fb.Tree, y: fb.Tree, batch: tuple[Tensor]) -> Tensor:
    """Half the mean squared distance of y to the data, plus the squared norm of x."""
    return 0.5 * ((y["y"] - batch[0]) ** 2).mean() + (x["x"] ** 2).sum()


def federation(sizes: Sequence[int] = (4, 4, 4), clients: Any = None, **options: Any) -> Federation:
    """A simulated federation in which client i holds the numbers 100 i, 100 i + 1, ...

    Args:
        sizes: how many numbers each client holds.
        clients: data to use instead.
        **options: of `fb.simulated_federation`; `environment` is a dict of fields.
    """
    problem = fb.Problem(
        upper=loss,
        lower=loss,
        x={"x": torch.ones(1, dtype=torch.float64)},
        y={"y": torch.ones(1, dtype=torch.float64)},
    )
    if clients is None:
        clients = []
        for i, size in enumerate(sizes):
            numbers = torch.arange(size, dtype=torch.float64).unsqueeze(1) + 100 * i
            clients.append(fb.ClientData(train=(numbers,), val=(numbers,)))
    environment = fb.Environment(**options.pop("environment", {}))
    return fb.simulated_federation(problem, clients, environment, **options)


def ask_each(fed: Federation, clients: Sequence[int], phase: Phase = PROBE) -> Replies:
    """Ask clients with `own` = the client's number and `scale` = 10."""
    return fed.ask(phase, clients, each=[{"own": float(c)} for c in clients], scale=10.0)


def ask(fed: Federation, clients: Sequence[int], own: float, phase: Phase = PROBE) -> Replies:
    """Ask clients; each replies with `own`, or adds it to its memory."""
    return fed.ask(phase, clients, **_message(clients, own, phase))


def post(fed: Federation, clients: Sequence[int], own: float, phase: Phase = PROBE) -> None:
    """Post tasks; each client replies with `own`, or adds it to its memory."""
    fed.post(phase, clients, **_message(clients, own, phase))


def _message(clients: Sequence[int], own: float, phase: Phase) -> dict[str, Any]:
    """A probe replies with a product, of which one factor is sent to everyone, one to each."""
    if isinstance(phase, Probe):
        return {"each": [{"own": 1.0}] * len(clients), "scale": own}
    return {"each": [{"own": own}] * len(clients)}


def snapshot_from_file(fed: Federation) -> Any:
    """The snapshot of a federation, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        checkpoint.save(path, fed.snapshot())
        return checkpoint.load(path)
