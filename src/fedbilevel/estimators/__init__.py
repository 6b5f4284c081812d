"""Estimators with the interface of scikit-learn, for the common cases."""

from fedbilevel.estimators.logistic import FederatedLogistic

__all__ = ["FederatedLogistic"]
