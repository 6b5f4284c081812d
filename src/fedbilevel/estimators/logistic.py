"""A federated logistic regression that learns its penalties and how much each site counts.

The problem is that of `fb.linear_model`, with one weight per site on the simplex (`fb.weighted`) if
there are several sites.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedbilevel.core.client_data import ClientData
from fedbilevel.core.weighting import WEIGHTS, weighted
from fedbilevel.data.clients import Clients, clients
from fedbilevel.data.frames import Missing
from fedbilevel.diagnostics.check import check
from fedbilevel.runs.solver import solve
from fedbilevel.tasks.linear_model import held_out_metrics, linear_model

Array = NDArray[np.float64]


class FederatedLogistic(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Logistic regression over sites that keep their rows, as a classifier of scikit-learn.

    One penalty per feature, and one weight per site, are learnt on validation rows of all sites by
    UniFBO, with the settings that `fb.check` suggests. Without `by`, all rows are at one site.

    Args:
        by: The column that says at which site a row is.
        target: The column that is predicted, for `fit(frame)` without y.
        features: The columns that become features; by default all others.
        group: The column of what rows belong together, such as the person.
        weigh_sites: Whether weights of the sites are learnt; otherwise all count the same.
        validation: The rows that the upper level uses: a fraction of each site's rows, or the
            column that says which are trusted; see `fb.clients`.
        test: The fraction of each site's rows that is held out, of the trusted ones if `validation`
            says which these are; `history_` has the loss and the accuracy on them.
        missing: What happens to missing values: "refuse", "drop" or "impute"; see `fb.clients`.
        rounds: The number of communication rounds.
        random_state: The seed of the split.

    Attributes:
        classes_: The classes.
        coef_: The weights of the features, in units of the columns as they were given; one row for
            two classes, else one per class.
        intercept_: The intercepts.
        penalty_: The penalty of each feature, for features with standard deviation 1.
        sites_: The names of the sites.
        site_weights_: The share of each site in the training loss, whatever its number of rows;
            they sum to 1.
        feature_names_: The name of each feature.
        history_: The metrics of the run, one dict per evaluation; with `test`, the last one has
            `test_loss` and `test_accuracy` of the fitted model.

    Examples:
        >>> import numpy as np
        >>> from fedbilevel.estimators import FederatedLogistic
        >>> rng = np.random.default_rng(0)
        >>> age = rng.normal(50, 10, 200)
        >>> table = {"age": age, "site": np.arange(200) % 4, "sick": age > 50}
        >>> model = FederatedLogistic(by="site", target="sick", rounds=50).fit(table)
        >>> model.sites_, model.predict({"age": [30.0, 70.0]}).tolist()
        (['0', '1', '2', '3'], [False, True])
    """

    def __init__(
        self,
        by: str | None = None,
        *,
        target: str | None = None,
        features: Sequence[str] | None = None,
        group: str | None = None,
        weigh_sites: bool = True,
        validation: float | str = 0.25,
        test: float = 0.0,
        missing: Missing = "refuse",
        rounds: int = 200,
        random_state: int = 0,
    ) -> None:
        self.by = by
        self.target = target
        self.features = features
        self.group = group
        self.weigh_sites = weigh_sites
        self.validation = validation
        self.test = test
        self.missing = missing
        self.rounds = rounds
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the model.

        Args:
            X: A table with the columns `by` and, without y, `target`; see `fb.clients`. Without
                `by` and with y, an array of numbers.
            y: The classes; by default the column `target`.

        Returns:
            This estimator.

        Raises:
            ValueError: If the table lacks a column, or there is only one class.
        """
        if y is None and self.target is None:
            raise ValueError(
                "This FederatedLogistic estimator requires y to be passed, but the target y is "
                "None, and no target column is named; give y, or target='...' when it is made"
            )
        if self._takes_arrays():
            X, y = validate_data(self, X, y, ensure_min_samples=2)
        target = self.target if y is None else y
        if not isinstance(target, str):
            check_classification_targets(target)
            target = np.asarray(target)
            self.classes_, target = np.unique(target, return_inverse=True)
        count = None if self.by else 1
        federation = clients(
            X,
            target=target,
            by=self.by,
            count=count,
            features=self.features,
            group=self.group,
            validation=self.validation,
            test=self.test,
            missing=self.missing,
            seed=self.random_state,
        )
        if federation.classes is None:
            raise ValueError(f"the target {target!r} holds floats; they must be classes")
        if isinstance(target, str):
            self.classes_ = np.asarray(federation.classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class, {self.classes_[0]!r}; there must be at least two")
        self._solve(federation)
        return self

    def _takes_arrays(self) -> bool:
        """Whether rows are arrays of numbers, which scikit-learn validates."""
        return self.by is None and self.target is None and self.features is None

    def _solve(self, federation: Clients) -> None:
        """Learn penalties and weights of sites, and set the attributes of the fit."""
        problem = linear_model(federation)
        data: Sequence[ClientData] = list(federation)
        if self.weigh_sites and len(data) > 1:
            problem, data = weighted(problem, data)
        algorithm = check(problem, data, rounds=self.rounds).algorithm("unifbo")
        result = solve(
            problem,
            data,
            algorithm,
            rounds=self.rounds,
            evaluate=lambda x, y: held_out_metrics(federation, y),
            every=max(1, self.rounds // 20),
            progress=False,
        )
        if result.status == "diverged":
            warnings.warn(
                f"the fit has diverged: {result.reason}", ConvergenceWarning, stacklevel=3
            )
        weight = result.y["weight"].double().numpy()
        intercept = result.y["intercept"].double().numpy()
        if len(self.classes_) == 2:  # two opposite rows say the same as their difference
            weight = weight[:, 1:] - weight[:, :1]
            intercept = intercept[1:] - intercept[:1]
        assert federation.columns is not None
        centres, scales = federation.columns.scales()
        self.coef_: Array = (weight / scales[:, None]).T
        self.intercept_: Array = intercept - centres @ self.coef_.T
        self.penalty_: Array = result.x["log_penalty"].double().exp().numpy()
        uniform = torch.full((len(data),), 1 / len(data))
        self.site_weights_: Array = result.x.get(WEIGHTS, uniform).double().numpy()
        self.sites_ = federation.names
        self.feature_names_ = federation.features
        self.history_ = result.history
        self._columns = federation.columns

    def decision_function(self, X: Any) -> Array:
        """Return the scores of the classes: for two classes, the log odds of the second.

        Args:
            X: The rows.

        Returns:
            One score per row, or one per row and class.

        Warns:
            UserWarning: A row holds a category that no row of the fitted table held.
        """
        check_is_fitted(self)
        if self._takes_arrays():
            X = validate_data(self, X, reset=False)
        rows = self._columns.encode_table(X, standardise=False)
        scores = rows @ self.coef_.T + self.intercept_
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class.

        Args:
            X: The rows.

        Returns:
            One row per row, whose entries sum to 1.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row.

        Args:
            X: The rows.

        Returns:
            The classes.
        """
        scores = self.decision_function(X)
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[best])
