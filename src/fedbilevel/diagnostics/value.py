"""`fb.value`: what each client is worth to the trusted samples, with intervals.

At y*(x), with z the solution of [d2yy G] z = grad_y F, the value of client i is

    v_i = p_i <grad_y g_i, z> = - d Phi / d log p_i.

To first order it is how much the upper loss would rise if client i were left out. The values sum to
0, because sum_i p_i grad_y g_i = 0 at y*: they compare clients with each other.

The lower level is solved by Newton's method, with one exchange per step; two more exchanges give
the values and their standard errors. The server receives sums over clients: of gradients, Hessians
and losses, and of vectors in which client i fills in its own entry, its value. No gradient of a
single client leaves it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import Batch, ClientData, check_clients
from fedbilevel.core.oracle import Oracle
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import Tree, flatten, norm, unflatten
from fedbilevel.diagnostics.value_phases import (
    LowerSystem,
    TrustedGradients,
    UpperLoss,
    Worth,
    per_sample_gradients,
)
from fedbilevel.diagnostics.value_result import Value
from fedbilevel.federation import Federation, Replies
from fedbilevel.federation.phase import Phase
from fedbilevel.runs.simulation import simulated_federation

__all__ = ["Value", "value"]

LARGEST_Y = 2000  # numbers in y, for which clients send a dense Hessian
NEWTON_STEPS = 100
GROUP = "group_number"  # the entry that is added to validation data for groups given apart


def value(
    problem: Problem,
    clients: Sequence[ClientData] | None = None,
    *,
    x: Mapping[str, Tensor] | None = None,
    weights: str | Sequence[float] = "uniform",
    groups: str | Sequence[Tensor] | None = None,
    names: Sequence[str] | None = None,
    resamples: int = 400,
    level: float = 0.95,
    leave_one_out: bool = False,
    samples: bool = False,
    federation: Federation | None = None,
    seed: int = 0,
) -> Value:
    """What each client is worth to the trusted samples, by one hypergradient.

    The trusted samples are the validation data of all clients. Client i has the value

        v_i = p_i <grad_y g_i, z>   at y*(x), with [d2yy G] z = grad_y F:

    how much the upper loss would rise without the client, to first order. Intervals are those of
    the normal distribution with standard errors of the Bayesian bootstrap over the trusted samples,
    for all clients together (Bonferroni). Training data are taken as they are.

    Args:
        problem: A problem with a shared lower level, strongly convex in y, with at most 2,000
            numbers in y.
        clients: The data of each client; None with a federation, which has them.
        x: The upper variables; by default those at which the problem starts.
        weights: The weights p_i: "uniform", "samples" or one number per client.
        groups: Which trusted samples are of one person and resampled together: the entry of the
            validation data, which are then dicts of tensors, that numbers people; or, in a
            simulation, one tensor per client with a number per sample. By default the groups that
            `fb.clients` was given, else every sample is a person.
        names: The name of each client; by default that which `fb.clients` gave it, else "client 0",
            "client 1", ...
        resamples: How many resamples of the trusted samples are drawn.
        level: The probability that all intervals together cover.
        leave_one_out: Whether to solve the lower level once more without each client, as a check.
        samples: Whether to value every training sample too; in a simulation only.
        federation: Where to compute, for instance on Flower; its weights are then used. By default
            a simulation, client by client.
        seed: The seed of the resamples; that of a given federation is used instead.

    Returns:
        Values, intervals and what else was asked for.

    Raises:
        TypeError: `problem` is no problem.
        ValueError: The lower level is private, too large, not strongly convex or could not be
            solved, or an argument is not allowed.
        RuntimeError: Not all clients have replied.

    References:
        Koh and Liang, "Understanding black-box predictions via influence functions", 2017; Rubin,
        "The Bayesian bootstrap", 1981.

    Examples:
        Three clients report the mean of the trusted samples, and a fourth reports something else:

        >>> import torch
        >>> import fedbilevel as fb
        >>> def squares(x, y, batch):
        ...     return 0.5 * ((y["mean"] - batch[0]) ** 2).mean() + 0 * x["unused"]
        >>> problem = fb.Problem(
        ...     squares, squares, x={"unused": torch.zeros(())}, y={"mean": torch.zeros(())}
        ... )
        >>> trusted = torch.tensor([0.9, 1.0, 1.1])
        >>> reports = [0.9, 1.1, 1.0, 5.0]
        >>> clients = [fb.ClientData((torch.tensor([r]),), (trusted,)) for r in reports]
        >>> result = fb.value(problem, clients, leave_one_out=True)
        >>> result.harmful, [round(v, 2) for v in result.values]
        ([3], [0.28, 0.22, 0.25, -0.75])
        >>> [round(v, 2) for v in result.leave_one_out]
        [0.43, 0.34, 0.39, -0.5]
    """
    _check_arguments(problem, resamples, level)
    x_tree, y = problem.start
    if x is not None:
        x_tree = Tree(x)
    if names is None:
        names = getattr(clients, "names", None)
    if federation is None:
        if clients is None:
            raise ValueError("clients is missing; it must be given, or a federation")
        check_clients(clients)
        problem, clients, groups = _with_groups(problem, clients, groups)
        fed = simulated_federation(problem, clients, weights=weights, seed=seed, mode="loop")
    else:
        groups = _groups_of_federation(groups, samples)
        fed = federation
    n = len(fed)
    everyone = list(range(n))
    if names is not None and len(names) != n:
        raise ValueError(f"names has {len(names)} entries; there are {n} clients")
    before = fed.ledger.rounds

    y, H = _solve(fed, x_tree, y, everyone)
    phase = TrustedGradients(full=True, size=y.numel, resamples=resamples, groups=groups)
    trusted = _ask(fed, phase, everyone, x=x_tree, y=y)
    gradients = trusted.mean("gradients")
    upper_loss = float(trusted.mean("loss"))
    right = torch.cat([gradients["g"][None], gradients["resampled"]])
    z, z_resampled = _solve_system(H, right.T).T.split([1, resamples])
    each = [{"number": torch.tensor(client)} for client in everyone]
    solved = Tree(z=z[0], resampled=z_resampled)
    worth = _ask(fed, Worth(full=True, clients=n), everyone, each, x=x_tree, y=y, z=solved)
    rows = worth.mean("worth")["rows"]
    values, errors = rows.T.tolist()
    quantile = statistics.NormalDist().inv_cdf(1 - (1 - level) / (2 * n))

    left_out = None
    if leave_one_out:
        left_out = _leave_one_out(fed, x_tree, y, phase, upper_loss)
    per_sample = None
    if samples:
        assert clients is not None
        per_sample = _values_of_samples(problem, clients, fed.weights(), x_tree, y, z[0])
    return Value(
        names=tuple(names or (f"client {client}" for client in everyone)),
        values=tuple(values),
        errors=tuple(errors),
        low=tuple(v - quantile * e for v, e in zip(values, errors, strict=True)),
        high=tuple(v + quantile * e for v, e in zip(values, errors, strict=True)),
        level=level,
        upper_loss=upper_loss,
        y=y,
        leave_one_out=left_out,
        samples=per_sample,
        rounds=fed.ledger.rounds - before,
    )


def _check_arguments(problem: Problem, resamples: int, level: float) -> None:
    """Refuse a problem whose clients cannot be valued, and numbers that are not allowed."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem is {type(problem).__name__}; it must be a Problem, "
            "for clients from a table fb.linear_model(clients)"
        )
    if problem.lower_level != "shared":
        raise ValueError("fb.value needs lower_level='shared'; this problem's is 'private'")
    y = problem.start[1]
    if y.numel > LARGEST_Y:
        raise ValueError(
            f"y has {y.numel} numbers; fb.value needs at most {LARGEST_Y}, because clients send "
            "a Hessian (split_module keeps a backbone in x)"
        )
    checks.integer("resamples", resamples, least=2)
    if not 0 < checks.number("level", level) < 1:
        raise ValueError(f"level is {level}; it must be between 0 and 1")


def _groups_of_federation(groups: str | Sequence[Tensor] | None, samples: bool) -> str | None:
    """The entry that numbers people; refused is what only a simulation can do."""
    if groups is not None and not isinstance(groups, str):
        raise ValueError(
            "groups are tensors; on a federation they must be an entry of the validation data"
        )
    if samples:
        raise ValueError(
            "samples is True, but values of samples stay with their clients; "
            "it is for a simulation, without federation"
        )
    return groups


def _ask(
    fed: Federation, phase: Phase, clients: Sequence[int], each: Any = None, **message: Any
) -> Replies:
    """Ask clients, all of whom must reply: values of clients without some would be others."""
    replies = fed.ask(phase, clients, each=each, **message)
    if len(replies) < len(clients):
        raise RuntimeError(
            f"{replies.label}: {len(replies)} of {len(clients)} clients replied; fb.value needs all"
        )
    return replies


def _solve(fed: Federation, x: Tree, y: Tree, clients: Sequence[int]) -> tuple[Tree, Tensor]:
    """y*(x) of these clients by Newton's method, and the Hessian there.

    A step that does not lower the loss is halved; every point that is tried costs one exchange.
    """
    phase = LowerSystem(full=True, size=y.numel)

    def evaluate(y: Tree) -> tuple[float, Tree, Tensor]:
        replies = _ask(fed, phase, clients, x=x, y=y)
        system = replies.mean("system")
        return float(replies.mean("loss")), unflatten(system["g"], y), system["H"]

    precision = torch.finfo(next(iter(y.values())).dtype).eps
    loss, g, H = evaluate(y)
    for _ in range(NEWTON_STEPS):
        step = unflatten(_solve_system(H, flatten(g)[:, None])[:, 0], y)
        size = float(norm(step))
        scale = 1 + float(norm(y))
        if size <= 1e3 * precision * scale:
            return y, H
        slack = 100 * precision * (1 + abs(loss))
        fraction = 1.0
        while True:
            trial = evaluate(y - fraction * step)
            if trial[0] <= loss + slack:
                break
            fraction /= 2
            if fraction < 1e-8:
                raise ValueError(
                    f"the lower level was not solved: a Newton step of length {size:.3g} does not "
                    "lower the loss (is it strongly convex in y?)"
                )
        y = y - fraction * step
        loss, g, H = trial
        if size * fraction <= precision**0.5 * scale and fraction == 1:
            # Newton's method converges quadratically: this step was the last that counts.
            return y, H
    raise ValueError(f"the lower level was not solved in {NEWTON_STEPS} Newton steps")


def _solve_system(H: Tensor, right: Tensor) -> Tensor:
    """H^-1 right, computed in float64.

    Raises:
        ValueError: H is not positive definite.
    """
    factor, failed = torch.linalg.cholesky_ex(H.double())
    if failed:
        raise ValueError(
            "the Hessian of the lower level is not positive definite (is it strongly convex in y?)"
        )
    return torch.cholesky_solve(right.double(), factor).to(right)


def _leave_one_out(
    fed: Federation, x: Tree, y: Tree, phase: TrustedGradients, upper_loss: float
) -> tuple[float, ...]:
    """How much the upper loss rises when the lower level is solved without each client."""
    everyone = range(len(fed))
    rises = []
    for left_out in everyone:
        others = [client for client in everyone if client != left_out]
        without, _ = _solve(fed, x, y, others)
        loss = _ask(fed, UpperLoss(full=True), list(everyone), x=x, y=without).mean("loss")
        rises.append(float(loss) - upper_loss)
    return tuple(rises)


def _check_groups(groups: str, client: ClientData) -> None:
    if not isinstance(client.val, dict) or groups not in client.val:
        raise ValueError(
            f"groups is {groups!r}; it must be an entry of the validation data, "
            "which must be dicts of tensors"
        )
    if client.val[groups].ndim != 1 or client.val[groups].is_floating_point():
        raise ValueError(f"val[{groups!r}] must hold one integer per sample")


def _with_groups(
    problem: Problem, clients: Sequence[ClientData], groups: str | Sequence[Tensor] | None
) -> tuple[Problem, Sequence[ClientData], str | None]:
    """The problem with groups in the validation data, unseen by the upper loss, and their entry."""
    if groups is None:
        groups = getattr(clients, "groups", None)
    if groups is None:
        return problem, clients, None
    if isinstance(groups, str):
        _check_groups(groups, clients[0])
        return problem, clients, groups
    if problem.embed is not None:
        raise ValueError(
            "groups are tensors, and the problem has an embed; "
            "put them into the validation data, as dicts of tensors, and name the entry"
        )
    inner = problem.upper
    is_tuple = isinstance(clients[0].val, tuple)

    def upper(x: Tree, y: Tree, data: dict[str, Tensor], rng: Tensor) -> Tensor:
        rest = {name: tensor for name, tensor in data.items() if name != GROUP}
        loss: Tensor = inner(x, y, tuple(rest.values()) if is_tuple else rest, rng)
        return loss

    grouped = []
    for client, numbers in zip(clients, groups, strict=True):
        val = client.val
        if isinstance(val, tuple):
            val = {str(index): tensor for index, tensor in enumerate(val)}
        grouped.append(ClientData(client.train, {**val, GROUP: numbers}))
    return replace(problem, upper=upper), grouped, GROUP


def _values_of_samples(
    problem: Problem,
    clients: Sequence[ClientData],
    weights: Sequence[float],
    x: Tree,
    y: Tree,
    z: Tensor,
) -> tuple[Tensor, ...]:
    """p_i / n_i <grad_y g_i(sample), z> for each training sample of each client."""
    oracle = Oracle(problem)
    key = torch.zeros((), dtype=torch.int64)
    values = []
    for p, client in zip(weights, clients, strict=True):
        batch = Batch(train=client.train, rng=key)
        per_sample = per_sample_gradients(oracle.lower, "train", x, y, batch)
        values.append(p / client.size("train") * (per_sample @ z))
    return tuple(values)
