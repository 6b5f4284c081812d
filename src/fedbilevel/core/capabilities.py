"""What the losses of a problem can be asked for: second derivatives, and stacks of clients.

Both are found out on a few samples of one client, once, before the first round. Networks differ:
fused attention has no second derivative, and recurrent layers cannot be stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedbilevel.core.client_data import Batch, ClientData, Data, named_tensors, repack
from fedbilevel.core.derivatives import vmap
from fedbilevel.core.oracle import Directions, Oracle
from fedbilevel.core.precision import DERIVATIVES
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree

SAMPLES = 2  # of each side, unless they make an episode


class Capabilities(NamedTuple):
    """What the losses of a problem can be asked for; `find_capabilities` returns it.

    Attributes:
        problem: The problem, with the `derivatives` that were found to work in place of "auto".
        no_first: Why the lower loss has no derivative in y, which every method needs; empty if it
            has one.
        no_second: Why there are no second derivatives; empty if there are.
        no_stacks: Why clients cannot be computed together under `torch.vmap`; empty if they can.
        no_stacked_values: Why losses cannot be evaluated together, without derivatives.
    """

    problem: Problem
    no_first: str
    no_second: str
    no_stacks: str
    no_stacked_values: str


def find_capabilities(
    problem: Problem, client: ClientData, device: str = "cpu", episode: int | None = None
) -> Capabilities:
    """Find out what the losses of a problem can be asked for.

    Args:
        problem: The problem.
        client: The data of one client.
        device: Where to evaluate; x and y must be there already.
        episode: The samples of an episode, where the lower level is private; None means all.

    Returns:
        What was found.

    Examples:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> import fedbilevel as fb
        >>> def loss(x, y, batch):
        ...     tokens = batch[0] @ y["w"]
        ...     return F.scaled_dot_product_attention(tokens, tokens, tokens).sum() * x["x"].sum()
        >>> problem = fb.Problem(loss, loss, x={"x": torch.ones(1)}, y={"w": torch.ones(4, 4)})
        >>> data = (torch.ones(3, 2, 5, 4),)
        >>> find_capabilities(problem, fb.ClientData(data, data)).problem.derivatives
        'unfused'
    """
    batch = _few_samples(problem, client, device, episode)
    allowed = DERIVATIVES[1:] if problem.derivatives == "auto" else (problem.derivatives,)
    x = Tree(problem.x)
    y = Tree(problem.y)
    no_second = ""
    for derivatives in allowed:
        candidate = replace(problem, derivatives=derivatives)
        try:
            _directions(candidate, x, y, batch)
        except Exception as error:
            no_second = no_second or _first_line(error)
        else:
            return Capabilities(candidate, "", "", *_obstacles_to_stacks(candidate, x, y, batch))
    no_first = ""
    try:
        Oracle(problem).lower_gradient_y(x, y, batch)
    except Exception as error:
        no_first = _first_line(error)
    return Capabilities(replace(problem, derivatives=allowed[0]), no_first, no_second, "", "")


def _directions(problem: Problem, x: Tree, y: Tree, batch: Batch) -> Directions:
    """All first and second derivatives that methods take."""
    return Oracle(problem).directions(x, y, y.map(torch.ones_like), batch)


def _obstacles_to_stacks(problem: Problem, x: Tree, y: Tree, batch: Batch) -> tuple[str, str]:
    """Why what works for one client does not work for a stack; empty if it does.

    Losses may have derivatives in stacks but no values: PyTorch takes other ways for the two.
    """
    oracle = Oracle(problem)

    def values(batch: Batch) -> tuple[Tensor, Tensor]:
        return oracle.upper(x, y, batch), oracle.lower(x, y, batch)

    def directions(x: Tree, y: Tree, batch: Batch) -> Directions:
        return _directions(problem, x, y, batch)

    def at_start(batch: Batch) -> Directions:
        return directions(x, y, batch)

    no_values = _obstacle_to_stack(values, batch)
    # In the first step all clients share x and y, which takes other rules.
    no_directions = _obstacle_to_stack(at_start, batch) or _obstacle_to_stack(
        directions, x, y, batch
    )
    if problem.embed is not None:  # a backbone may run alone
        no_directions = no_directions or no_values
    return no_directions, no_values


def _obstacle_to_stack(fn: Callable[..., Any], *args: Any) -> str:
    stacks = pytree.tree_map(lambda tensor: torch.stack([tensor, tensor]), args)
    try:
        vmap(fn)(*stacks)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _few_samples(problem: Problem, client: ClientData, device: str, episode: int | None) -> Batch:
    """A batch of a client: few samples, unless the losses need more."""
    client = problem.validated(client)
    key = torch.zeros((), dtype=torch.int64, device=device)

    def first(count: int | None) -> Batch:
        def side(data: Data) -> Data:
            tensors = [tensor[:count].to(device) for _, tensor in named_tensors(data)]
            return repack(data, tensors)

        return Batch(side(client.train), side(client.val), key)

    if problem.lower_level == "private":
        return first(episode)
    few = first(SAMPLES)
    oracle = Oracle(problem)
    x = Tree(problem.x)
    y = Tree(problem.y)
    try:
        oracle.lower(x, y, few)
        oracle.upper(x, y, few)
    except Exception:  # a loss may ask for batches of one size
        return first(None)
    return few
