"""Ridge regression, whose Hessian and hypergradient are known, to measure rounding against."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import fedbilevel as fb
from fedbilevel.algorithms import Message, Phase
from fedbilevel.core.linear import descend
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree

INPUTS, OUTPUTS, SAMPLES, CLIENTS = 32, 8, 128, 3


class Errors(NamedTuple):
    """Relative errors, the largest over clients."""

    product: float
    hypergradient: float


def upper(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
    """1/2m ||A y - b||^2."""
    inputs, targets = batch
    return 0.5 * (inputs @ y["y"] - targets).square().sum() / len(inputs)


def lower(x: Tree, y: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
    """1/2m ||A y - b||^2 + 1/2 sum over j of x_j ||y_j||^2, y_j being the rows of y."""
    return upper(x, y, batch) + 0.5 * (x["x"].unsqueeze(1) * y["y"].square()).sum()


class Estimate(Phase):
    """Replies with a Hessian product and with the hypergradient of the client's own problem.

    The lower level and the linear system are solved by gradient descent.
    """

    name = "estimate"
    batch = "both"
    steps = 1
    reply: ClassVar = {"product": "y", "hypergradient": "x"}
    summed = False

    def start(self, m: Message) -> Any:
        return m.x, m.y, m.v

    def step(self, carry: Any, oracle: Oracle, batch: fb.Batch) -> Any:
        x, y, v = carry

        def product(v: Tree) -> Tree:
            return oracle.hessian_product(x, y, v, batch)

        of_v = product(v)
        for _ in range(60):
            y = y - 0.5 * oracle.lower_gradient_y(x, y, batch)
        z = descend(product, oracle.upper_gradient_y(x, y, batch), 0.0 * v, steps=60, lr=0.5)
        return of_v, oracle.hypergradient(x, y, z, batch)

    def finish(self, carry: Any) -> dict[str, Any]:
        return dict(zip(self.reply, carry, strict=True))


def rounding_errors(precision: Any, device: str = "cpu", mode: Any = "stack") -> Errors:
    """The errors of clients that compute in some precision, in float32 to begin with."""
    key = root(0, "ridge")
    x = Tree(x=torch.linspace(0.5, 1.0, INPUTS))
    y = Tree(y=torch.zeros(INPUTS, OUTPUTS))
    v = Tree(y=normal(fold_in(key, 1), (INPUTS, OUTPUTS)))

    def side(key: Tensor) -> tuple[Tensor, Tensor]:
        inputs = normal(fold_in(key, 0), (SAMPLES, INPUTS))
        return inputs, normal(fold_in(key, 1), (SAMPLES, OUTPUTS))

    clients = []
    for client in range(CLIENTS):
        of_client = fold_in(key, 2 + client)
        clients.append(fb.ClientData(side(fold_in(of_client, 0)), side(fold_in(of_client, 1))))
    problem = fb.Problem(upper=upper, lower=lower, x=x, y=y).to(device)
    fed = fb.simulated_federation(problem, clients, device=device, mode=mode, precision=precision)
    sent = {
        name: tree.map(lambda t: t.to(device)) for name, tree in {"x": x, "y": y, "v": v}.items()
    }
    errors = []
    for reply in fed.ask(Estimate(), range(CLIENTS), **sent):
        (A, b), (V, c) = (
            tuple(tensor.double() for tensor in data)
            for data in (clients[reply.client].train, clients[reply.client].val)
        )
        H = A.T @ A / SAMPLES + torch.diag(x["x"].double())
        solution = torch.linalg.solve(H, A.T @ b / SAMPLES)
        z = torch.linalg.solve(H, V.T @ (V @ solution - c) / SAMPLES)
        exact = {"product": H @ v["y"].double(), "hypergradient": -(solution * z).sum(1)}
        found = {"product": reply.values["product"]["y"]}
        found["hypergradient"] = reply.values["hypergradient"]["x"]
        errors.append(
            [float((found[n].cpu().double() - exact[n]).norm() / exact[n].norm()) for n in exact]
        )
    return Errors(*torch.tensor(errors).amax(0).tolist())
