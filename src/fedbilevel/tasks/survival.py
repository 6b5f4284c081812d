"""Survival across institutions: learn one penalty per feature of a Cox model.

lower: - log partial likelihood on training patients + 1/2 sum_j exp(log_penalty_j) y_j^2,
upper: - log partial likelihood on validation patients,

each per patient. A patient with features a has the hazard h_0(t) exp(a^T y). The partial likelihood
is a product over deaths d of

    exp(a_d^T y) / sum over patients j under observation at the time of d of exp(a_j^T y),

with Breslow's form for ties. It is stratified by institution: h_0 differs between institutions, and
patients are compared with patients of their own institution.

What leaves an institution. No time does, because no sum runs over patients of two institutions;
without strata, all of them would have to learn every time of death to form the sums. Gradients do,
and they are sums over deaths: that of an institution with a single death is the difference between
the features of that patient and the mean of those who were observed longer. A survival curve would
need Breslow's estimate of h_0, which jumps at the times of death and so tells them; the task does
without it, and is judged by the order in which patients die.

The data are those of the North Central Cancer Treatment Group: 227 patients, 18 institutions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, normal, root
from fedbilevel.core.tree import Tree
from fedbilevel.data.people import impute_and_standardise, read_lung, split_people
from fedbilevel.tasks.task import Task

PENALTY_BOUNDS = (1e-3, 10.0)
START_PENALTY = 0.1


@dataclass(frozen=True, kw_only=True)
class Survival(Task):
    """A task of survival across institutions.

    Attributes:
        names: The name of each client.
        features: The name of each feature.
    """

    names: tuple[str, ...]
    features: tuple[str, ...]


def survival(
    *, irrelevant: int = 0, validation: float = 0.4, test: float = 0.2, seed: int = 0
) -> Survival:
    """Build the task of learning penalties per feature of a Cox model.

    Solve it with `weights="samples"`: every patient then counts the same.

    Args:
        irrelevant: How many features are added that mean nothing: normal random numbers.
        validation: The fraction of the patients of each institution whom the upper level uses.
        test: The fraction of the patients of each institution who are for the test.
        seed: The seed of the split and of the irrelevant features.

    Returns:
        The task. Its metrics, on the test patients of all institutions together: `test_loss` (minus
        the log partial likelihood, per patient) and `test_concordance`, the fraction of comparable
        pairs of patients of whom the one with the larger hazard died first (Harrell's C).

    Raises:
        ValueError: An option is out of range, or lifelines, which ships the data, is not installed.

    References:
        Cox, "Regression models and life-tables", 1972; Loprinzi et al., "Prospective evaluation of
        prognostic variables from patient-completed questionnaires", 1994, for the data; Harrell et
        al., "Evaluating the yield of medical tests", 1982.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("survival")  # doctest: +SKIP
        >>> len(task.clients), task.features[:3]  # doctest: +SKIP
        (18, ('age', 'sex', 'ph.ecog'))
    """
    checks.integer("irrelevant", irrelevant, least=0)
    for name, fraction in (("validation", validation), ("test", test)):
        if not 0 < checks.number(name, fraction) < 1:
            raise ValueError(f"{name} is {fraction}; it must be above 0 and below 1")
    if validation + test > 0.8:
        raise ValueError(
            f"validation is {validation} and test {test}; together they must be at most 0.8"
        )
    people = read_lung()
    key = root(seed, "survival")
    train, val, on_test = split_people(people, validation, test, key)
    noise = normal(fold_in(key, 1), (len(people.site), irrelevant), torch.float64)
    features = np.concatenate([people.features, noise.numpy()], axis=1)
    names = (*people.names, *(f"noise {number + 1}" for number in range(irrelevant)))
    columns = {
        "features": torch.from_numpy(impute_and_standardise(features, train)),
        "time": torch.from_numpy(people.outcome["time"]),
        "died": torch.from_numpy(people.outcome["died"]),
    }

    def side(chosen: np.ndarray) -> dict[str, Tensor]:
        return {name: column[torch.from_numpy(chosen)] for name, column in columns.items()}

    sites = [people.site == site for site in range(people.site.max() + 1)]
    clients = [ClientData(train=side(train & here), val=side(val & here)) for here in sites]

    def upper(x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        risk = batch["features"] @ y["coefficients"]
        return -log_partial_likelihood(risk, batch["time"], batch["died"]) / len(risk)

    def lower(x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.5 * x["log_penalty"].exp() @ y["coefficients"] ** 2

    def project_x(x: Tree) -> Tree:
        low, high = map(math.log, PENALTY_BOUNDS)
        return Tree(log_penalty=x["log_penalty"].clamp(low, high))

    tested = side(on_test)

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        y = y.map(Tensor.cpu)
        risk = tested["features"] @ y["coefficients"]
        return {
            "test_loss": float(upper(x, y, tested)),
            "test_concordance": concordance(risk, tested["time"], tested["died"]),
        }

    penalties = torch.full((len(names),), math.log(START_PENALTY), dtype=torch.float64)
    problem = Problem(
        upper=upper,
        lower=lower,
        x={"log_penalty": penalties},
        y={"coefficients": torch.zeros(len(names), dtype=torch.float64)},
        project_x=project_x,
    )
    return Survival(
        problem,
        clients,
        evaluate,
        names=tuple(f"institution {site + 1}" for site in range(len(sites))),
        features=names,
    )


def log_partial_likelihood(risk: Tensor, time: Tensor, died: Tensor) -> Tensor:
    """Cox's log partial likelihood, with Breslow's form for ties.

    Args:
        risk: The logarithm of the hazard of each patient, up to a common constant.
        time: How long each patient was observed.
        died: 1 where the observation ended with death, else 0.

    Returns:
        Its value, a sum over deaths.

    Examples:
        The first to die is one of two with equal hazards; the other is then alone:

        >>> import torch
        >>> died = torch.tensor([1.0, 1.0])
        >>> log_partial_likelihood(torch.zeros(2), torch.tensor([5.0, 7.0]), died).exp()
        tensor(0.5000)
    """
    observed = time >= time[:, None]  # row d: who is under observation at the time of d
    log_sums = risk.where(observed, -torch.inf).logsumexp(1)
    return (died * (risk - log_sums)).sum()


def concordance(risk: Tensor, time: Tensor, died: Tensor) -> float:
    """Harrell's C: how often, of two patients, the one with the larger hazard died first.

    Pairs are comparable if one of them died while the other was still under observation; equal
    hazards count half.

    Args:
        risk: The logarithm of the hazard of each patient.
        time: How long each patient was observed.
        died: 1 where the observation ended with death, else 0.

    Returns:
        A fraction; 0.5 is chance.

    Raises:
        ValueError: No two patients are comparable.

    Examples:
        >>> import torch
        >>> concordance(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1, 2, 3]), torch.ones(3))
        1.0
    """
    comparable = (died > 0)[:, None] & (time[:, None] < time)
    pairs = int(comparable.sum())
    if pairs == 0:
        raise ValueError("no two patients are comparable: nobody died before another one")
    agree = (risk[:, None] > risk).double() + 0.5 * (risk[:, None] == risk).double()
    return float(agree[comparable].sum()) / pairs
