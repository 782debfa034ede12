"""Gradient boosting of the rows of all sites (Friedman 2001), a baseline without Gaussian processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedgp_flower.data.sites import SiteData
from fedgp_flower.gp.error_law import with_law
from fedgp_flower.gp.likelihoods.counts import Counts
from fedgp_flower.gp.likelihoods.point import NONE
from fedgp_flower.options import CLASSIFICATION, MULTICLASS, REAL_VALUED
from fedgp_flower.scores import Prediction, Scores, TargetUnits, bernoulli_scores, class_scores
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

LOSSES = (
    dict.fromkeys(REAL_VALUED, "squared_error") | dict.fromkeys(CLASSIFICATION, "log_loss") | {"poisson": "poisson"}
)
"""scikit-learn losses by likelihood; other likelihoods have no loss."""
FOLDS, SCORED = 5, 2000
"""Number of folds, and approximate number of validation rows that select the number of trees."""
LEAST_LEAF, PATIENCE = 5, 20
"""Smallest number of rows of a leaf, and number of trees without improvement before early stopping."""
LEAST_VARIANCE = 1e-9
"""Lower bound of the predictive variance of the standardised target."""


@dataclass(frozen=True, slots=True)
class Boosted:
    """Trees of all rows, with the cross-validated loss and variance: of the target, or of the log rate of counts."""

    trees: Trees
    variance: float
    loss: float
    """Mean validation loss over the folds, to compare settings."""
    residuals: Array
    """Errors out of fold in standard deviations; of counts in units of the outcome."""

    def scores(self, rows: SiteData, likelihood: str, units: TargetUnits) -> Scores:
        """Scores of the held-out rows in original units, with one predictive variance for all rows."""
        if likelihood in CLASSIFICATION:
            p = np.asarray(self.trees.predict_proba(rows.x_test))
            several = likelihood in MULTICLASS
            return class_scores(p, rows.y_test) if several else bernoulli_scores(p[:, 1], rows.y_test)
        mean = np.asarray(self.trees.predict(rows.x_test), np.float64)
        spread = np.full_like(mean, self.variance)
        if likelihood == "poisson":
            return Counts().scores(np.log(mean) - spread / 2, spread, rows.y_test, NONE, units)
        return units.gaussian_scores(with_law(Prediction(mean, spread), self.residuals, units), rows.y_test)


def boosted(
    x: Array, y: Array, likelihood: str, seed: int = 0, *, rate: float = 0.1, leaves: int = 16, most: int = 400
) -> Boosted:
    """Boosted trees of inputs [N, D] and targets [N]; cross-validation selects their number, at most ``most``.

    The folds are stratified by target. Trees of the other rows stop when the loss of a fold no longer falls.
    """
    from sklearn import ensemble  # noqa: PLC0415 - slow to import, and only a simulation needs it

    kind = "HistGradientBoostingClassifier" if likelihood in CLASSIFICATION else "HistGradientBoostingRegressor"
    grow = partial(
        getattr(ensemble, kind),
        loss=LOSSES[likelihood],
        learning_rate=rate,
        max_leaf_nodes=leaves,
        min_samples_leaf=LEAST_LEAF,
        n_iter_no_change=PATIENCE,
        random_state=seed,
    )
    shuffled = np.random.default_rng([seed, *b"boosting"]).permutation(len(y))
    order = shuffled[np.argsort(y[shuffled], kind="stable")]
    folds = [order[number::FOLDS] for number in range(FOLDS)][: math.ceil(SCORED * FOLDS / len(y))]
    losses, predictions = [], []
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(y)), fold)
        trees = grow(max_iter=most, early_stopping=True).fit(x[rest], y[rest], X_val=x[fold], y_val=y[fold])
        losses.append(-np.asarray(trees.validation_score_))
        predictions.append(np.asarray(trees.predict(x[fold]), np.float64))
    predicted = np.concatenate(predictions)
    errors = y[np.concatenate(folds)] - predicted
    variance = float(np.square(errors).mean())
    if likelihood == "poisson":  # var y = r + r² (e^v − 1)
        more = max(variance - float(predicted.mean()), 0.0)
        variance = math.log1p(more / float(np.square(predicted).mean()))
    best = max(round(float(np.mean([loss.argmin() for loss in losses]))), 1)
    trees = grow(max_iter=best, early_stopping=False).fit(x, y)
    variance, loss = max(variance, LEAST_VARIANCE), float(np.mean([loss.min() for loss in losses]))
    return Boosted(trees, variance, loss, errors / math.sqrt(variance))
