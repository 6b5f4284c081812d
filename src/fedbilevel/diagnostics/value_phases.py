"""The phases of `fb.value`; a node runs them as it runs those of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.func import vmap

from fedbilevel.core.client_data import Batch, Data, named_tensors, repack
from fedbilevel.core.derivatives import grad
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.rng import fold_in, uniform
from fedbilevel.core.settings import Count
from fedbilevel.core.tree import Tree, flatten
from fedbilevel.federation.kinds import Kind
from fedbilevel.federation.phase import Message, Phase, Sides

RESAMPLING_STREAM = 1  # of a batch's key, from which losses may draw too


class LowerSystem(Phase):
    """g_i(x, y), its gradient and its Hessian in y, on all training data."""

    name = "lower-system"
    batch: ClassVar[Sides] = "train"
    fixed_x = True

    size: Count

    @property
    def reply(self) -> dict[str, Kind]:  # type: ignore[override]
        """The loss, and gradient and Hessian as a vector and a matrix."""
        return {"loss": "scalar", "system": {"g": (self.size,), "H": (self.size, self.size)}}

    def start(self, m: Message) -> Any:
        """Take the point."""
        return m.x, m.y

    def step(self, carry: Any, oracle: Oracle, batch: Batch) -> Any:
        """Evaluate all three at the point; the Hessian costs a product per number in y."""
        x, y = carry
        g = flatten(oracle.lower_gradient_y(x, y, batch))
        H = oracle.hessian_matrix(x, y, batch)
        return oracle.lower(x, y, batch), Tree(g=g, H=H)

    def finish(self, carry: Any) -> dict[str, Any]:
        """Reply with all three."""
        loss, system = carry
        return {"loss": loss, "system": system}


class TrustedGradients(Phase):
    """grad_y f_i on all trusted samples, and on resamples of them.

    A resample is one of the Bayesian bootstrap: every person has a weight drawn from an exponential
    distribution, and f_i is the weighted mean.
    """

    name = "trusted-gradients"
    batch: ClassVar[Sides] = "val"
    fixed_x = True

    size: Count
    resamples: Count
    groups: str | None = None

    @property
    def reply(self) -> dict[str, Kind]:  # type: ignore[override]
        """The loss, its gradient, and a gradient per resample."""
        rows = {"g": (self.size,), "resampled": (self.resamples, self.size)}
        return {"loss": "scalar", "gradients": rows}

    def start(self, m: Message) -> Any:
        """Take the point."""
        return m.x, m.y

    def step(self, carry: Any, oracle: Oracle, batch: Batch) -> Any:
        """Evaluate the gradient of every sample, and average with each resample's weights."""
        x, y = carry
        g = flatten(oracle.upper_gradient_y(x, y, batch))
        per_sample = per_sample_gradients(oracle.upper, "val", x, y, batch)
        people, person = _people(batch.val, self.groups)
        records = torch.ones_like(per_sample[:, :1])
        sums = torch.zeros(len(people), self.size + 1, dtype=g.dtype, device=g.device)
        sums = sums.index_add(0, person, torch.cat([per_sample, records], 1))
        assert isinstance(batch.rng, Tensor)
        keys = fold_in(fold_in(batch.rng, RESAMPLING_STREAM), people)
        weights = -torch.log1p(-uniform(keys, (self.resamples,), g.dtype)).T
        totals = weights @ sums
        resampled = totals[:, :-1] / totals[:, -1:]
        return oracle.upper(x, y, batch), Tree(g=g, resampled=resampled)

    def finish(self, carry: Any) -> dict[str, Any]:
        """Reply with all of them."""
        loss, gradients = carry
        return {"loss": loss, "gradients": gradients}


class Worth(Phase):
    """<grad_y g_i, z>, and its standard deviation over resamples, as row i of a table."""

    name = "worth"
    batch: ClassVar[Sides] = "train"
    fixed_x = True

    clients: Count

    @property
    def reply(self) -> dict[str, Kind]:  # type: ignore[override]
        """A row per client, all but this client's own zero."""
        return {"worth": {"rows": (self.clients, 2)}}

    def start(self, m: Message) -> Any:
        """Take the point, z, one z per resample, and which row is this client's."""
        return m.x, m.y, m.z["z"], m.z["resampled"], m.number

    def step(self, carry: Any, oracle: Oracle, batch: Batch) -> Any:
        """Evaluate the products."""
        x, y, z, resampled, number = carry
        g = flatten(oracle.lower_gradient_y(x, y, batch))
        own = torch.stack([z @ g, (resampled @ g).std()])
        is_own = torch.arange(self.clients, device=g.device) == number
        return is_own[:, None] * own

    def contradiction(self, m: Message, values: Mapping[str, Any]) -> str | None:
        """A client has a say in its own worth only."""
        rows = values["worth"]["rows"]
        is_own = torch.arange(self.clients, device=rows.device) == m.number
        if bool(rows[~is_own].any()):
            return "it holds the worth of other clients"
        return None

    def finish(self, rows: Tensor) -> dict[str, Any]:
        """Reply with the table."""
        return {"worth": Tree(rows=rows)}


class UpperLoss(Phase):
    """f_i(x, y) on all trusted samples."""

    name = "upper-loss"
    batch: ClassVar[Sides] = "val"
    fixed_x = True
    reply: ClassVar = {"loss": "scalar"}

    def start(self, m: Message) -> Any:
        """Take the point."""
        return m.x, m.y

    def step(self, carry: Any, oracle: Oracle, batch: Batch) -> Any:
        """Evaluate the loss."""
        x, y = carry
        return oracle.upper(x, y, batch)

    def finish(self, loss: Tensor) -> dict[str, Any]:
        """Reply with it."""
        return {"loss": loss}


def per_sample_gradients(
    loss: Callable[[Tree, Tree, Batch], Tensor], side: str, x: Tree, y: Tree, batch: Batch
) -> Tensor:
    """Return the gradient in y of a loss on each sample of one side of a batch.

    Args:
        loss: A loss of an oracle.
        side: "train" or "val".
        x: The upper variables.
        y: The lower variables.
        batch: The batch.

    Returns:
        A row per sample.
    """
    data: Data = getattr(batch, side)
    columns = [tensor for _, tensor in named_tensors(data)]

    def gradient(*sample: Tensor) -> Tensor:
        single = repack(data, [tensor.unsqueeze(0) for tensor in sample])
        one = batch._replace(**{side: single})  # type: ignore[arg-type]
        return flatten(grad(loss, argnums=1)(x, y, one))

    return vmap(gradient)(*columns)


def _people(data: Data, groups: str | None) -> tuple[Tensor, Tensor]:
    """The number of each person, and for each record the place of its person among them.

    In a stack of clients, which may have different numbers of people, every record stands for
    itself: records of a person have equal numbers, and so equal weights in every resample.
    """
    _, tensor = named_tensors(data)[0]
    records = torch.arange(len(tensor), device=tensor.device)
    if groups is None:
        return records, records
    assert isinstance(data, dict)
    numbers = data[groups]
    if functorch.is_functorch_wrapped_tensor(numbers):
        return numbers, records
    people, person = numbers.unique(return_inverse=True)
    return people, person
