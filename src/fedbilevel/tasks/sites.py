"""Sites of unequal quality: learn how much each site counts, from a few trusted samples.

lower: log loss of a logistic regression on the training records of the sites, weighted by site,
    + exp(log_ridge)/2 ||y||^2,
upper: log loss on the trusted samples, the unspoiled records of a few people of each site, and a
    penalty on weights far from equal (`shrinkage`).

The upper variables are one weight per site (`fb.weighted`) and the ridge coefficient. The data are
those of the RAND Health Insurance Experiment, at six real sites; the answers of some sites are
spoiled on request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbilevel.core import checks
from fedbilevel.core.client_data import ClientData
from fedbilevel.core.hypergradient import solve_lower
from fedbilevel.core.problem import Problem
from fedbilevel.core.rng import fold_in, root, rows, uniform
from fedbilevel.core.tree import Tree, dot
from fedbilevel.core.weighting import WEIGHTS, weighted
from fedbilevel.data.people import impute_and_standardise, read_rand, split_people
from fedbilevel.tasks.task import Task

SITES = 6
TEST = 0.2  # of the people of each site
RIDGE_BOUNDS = (1e-6, 1.0)
START_RIDGE = 1e-3
SHRINKAGE = 0.4  # chosen on other seeds than those of docs/results


@dataclass(frozen=True, kw_only=True)
class Sites(Task):
    """A task of sites that knows which of them are bad.

    Attributes:
        bad: The clients whose records were spoiled, in ascending order.
        names: The name of each client.
        groups: The entry of the validation data that numbers people, for `fb.value`.
        plain: The same problem without weights of clients.
        baselines: For each baseline the clients whose training data it is fitted to, for `plain`:
            "FedAvg, all sites" (spoiled records and trusted samples), "trusted samples alone" and
            "FedAvg, clean" (no record is spoiled, and trusted samples).
        test: The records of the test people.
    """

    bad: tuple[int, ...]
    names: tuple[str, ...]
    groups: str = "person"
    plain: Problem
    baselines: dict[str, list[ClientData]]
    test: dict[str, Tensor]

    def refit(self, x: Tree) -> Tree:
        """Fit y to the records of the sites, weighted as in x, and to the trusted samples.

        Trusted samples that have told the weights are training data like others, as validation data
        are once a model is selected. Each of their records counts like one of an average site.

        Args:
            x: The upper variables of `problem`, with weights of the sites.

        Returns:
            y.
        """
        trusted = self.baselines["trusted samples alone"]
        fitted = [*self.clients, *trusted]
        sizes = [client.size("train") for client in fitted]
        scales = [*(len(trusted) * x[WEIGHTS]).tolist(), *[1.0] * len(trusted)]
        weights = [scale * size for scale, size in zip(scales, sizes, strict=True)]
        ridge = Tree(log_ridge=x["log_ridge"])
        return solve_lower(self.plain, fitted, ridge, weights=weights)


def sites(
    *,
    bad: int = 2,
    noise: float = 0.4,
    shift: float = 0.0,
    keep: float = 1.0,
    trusted: float = 0.06,
    shrinkage: float | None = None,
    seed: int = 0,
) -> Sites:
    """Build the task of weighting sites: did a person see a physician in a year?

    Every person is at one site, and all records of a person are on one side: a fifth of the people
    of each site are for the test, a fraction `trusted` for the upper level, all others for the
    lower level. Bad sites are drawn; only their training records are spoiled.

    Args:
        bad: How many of the six sites are bad.
        noise: The probability that the answer of a training record of a bad site is flipped.
        shift: How many standard deviations are added to every feature of a bad site.
        keep: The fraction of the training people that a bad site keeps.
        trusted: The fraction of the people of each site whose records are the trusted samples:
            0.02 are about 400 samples, 0.06 about 1,200, 0.15 about 3,000.
        shrinkage: How strongly weights are kept near 1/6; see `fb.weighted`. None: 0.4 over the
            root of the number of trusted samples, because the noise of the upper loss falls so.
        seed: The seed of the split, of the bad sites and of the flips.

    Returns:
        The task. Its metrics, on the test people: `test_loss` (log loss), `test_accuracy`, and
        `weight_of_bad`, the sum of the weights of the bad sites.

    Raises:
        ValueError: An option is out of range, or statsmodels, which ships the data, is not
            installed.

    References:
        Newhouse et al., "Some interim results from a controlled trial of cost sharing in health
        insurance", 1981; Cameron and Trivedi, "Microeconometrics", 2005.

    Examples:
        >>> import fedbilevel as fb
        >>> task = fb.tasks.load("sites", bad=2, noise=0.4)
        >>> len(task.clients), task.bad
        (6, (1, 4))
    """
    checks.integer("bad", bad, least=0, most=SITES)
    if not 0 <= checks.number("noise", noise) <= 1:
        raise ValueError(f"noise is {noise}; it must be in [0, 1]")
    checks.number("shift", shift)
    for name, fraction in (("keep", keep), ("trusted", trusted)):
        if not 0 < checks.number(name, fraction) <= 1:
            raise ValueError(f"{name} is {fraction}; it must be above 0 and at most 1")
    if trusted > 0.7:
        raise ValueError(f"trusted is {trusted}; it must be at most 0.7, to leave training people")
    people = read_rand()
    key = root(seed, "sites")
    train, val, test = split_people(people, trusted, TEST, key)
    features = torch.from_numpy(impute_and_standardise(people.features, train))
    labels = torch.from_numpy(people.outcome["visited"])
    person = torch.from_numpy(people.person)

    bad_sites = sorted(rows(fold_in(key, 1), SITES, bad).tolist())
    is_bad = torch.from_numpy(np.isin(people.site, bad_sites))
    flipped = is_bad & (uniform(fold_in(key, 2), labels.shape) < noise)
    reported = torch.where(flipped, 1 - labels, labels)
    moved = features + shift * is_bad[:, None]
    # All records of a person are kept, or none.
    fate = uniform(fold_in(fold_in(key, 3), person), ())
    kept = torch.from_numpy(train) & ~(is_bad & (fate >= keep))

    clients = []
    baselines: dict[str, list[ClientData]] = {name: [] for name in BASELINES}
    for site in range(SITES):
        here = torch.from_numpy(people.site == site)
        spoiled = _side(moved, reported, kept & here)
        clean = _side(features, labels, torch.from_numpy(train) & here)
        checked = _side(features, labels, torch.from_numpy(val) & here)
        trusted_samples = {**checked, "person": person[torch.from_numpy(val) & here]}
        clients.append(ClientData(train=spoiled, val=trusted_samples))
        for name, parts in zip(
            BASELINES, ((spoiled, checked), (checked,), (clean, checked)), strict=True
        ):
            joined = {key: torch.cat([part[key] for part in parts]) for key in checked}
            baselines[name].append(ClientData(train=joined, val=trusted_samples))

    def upper(x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        logits = batch["features"] @ y["weight"] + y["bias"]
        return F.binary_cross_entropy_with_logits(logits, batch["label"])

    def lower(x: Tree, y: Tree, batch: dict[str, Tensor]) -> Tensor:
        return upper(x, y, batch) + 0.5 * x["log_ridge"].exp() * dot(y, y)

    def project_x(x: Tree) -> Tree:
        low, high = map(math.log, RIDGE_BOUNDS)
        return Tree(log_ridge=x["log_ridge"].clamp(low, high))

    on_test = _side(features, labels, torch.from_numpy(test))

    def evaluate(x: Tree, y: Tree) -> dict[str, float]:
        y = y.map(Tensor.cpu)
        logits = on_test["features"] @ y["weight"] + y["bias"]
        right = (logits > 0) == (on_test["label"] > 0)
        metrics = {
            "test_loss": float(upper(x, y, on_test)),
            "test_accuracy": int(right.sum()) / len(right),
        }
        if WEIGHTS in x and bad_sites:
            metrics["weight_of_bad"] = float(x[WEIGHTS][bad_sites].sum())
        return metrics

    start = torch.tensor(math.log(START_RIDGE), dtype=torch.float64)
    weight = torch.zeros(features.shape[1], dtype=torch.float64)
    bias = torch.zeros((), dtype=torch.float64)
    plain = Problem(
        upper=upper,
        lower=lower,
        x={"log_ridge": start},
        y={"weight": weight, "bias": bias},
        project_x=project_x,
    )
    if shrinkage is None:
        shrinkage = SHRINKAGE / math.sqrt(int(val.sum()))
    problem, numbered = weighted(plain, clients, shrinkage=shrinkage)
    return Sites(
        problem,
        numbered,
        evaluate,
        bad=tuple(bad_sites),
        names=tuple(f"site {site + 1}" for site in range(SITES)),
        plain=plain,
        baselines=baselines,
        test=on_test,
    )


BASELINES = ("FedAvg, all sites", "trusted samples alone", "FedAvg, clean")


def _side(features: Tensor, labels: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """One side of the data of a client: the chosen records."""
    return {"features": features[chosen], "label": labels[chosen]}
