"""Gradient boosting of all rows in one place (Friedman 2001): what an analyst without Gaussian processes would use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from fedgp_flower.count_scores import count_scores
from fedgp_flower.data.sites import SiteData
from fedgp_flower.options import CLASSIFICATION, MULTICLASS, REAL_VALUED
from fedgp_flower.scores import Prediction, Scores, TargetUnits, bernoulli_scores, class_scores
from fedgp_flower.typing import Array

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

LOSSES = (
    dict.fromkeys(REAL_VALUED, "squared_error") | dict.fromkeys(CLASSIFICATION, "log_loss") | {"poisson": "poisson"}
)
"""By likelihood; the others have no counterpart among the losses."""
FOLDS, SCORED = 5, 2000
"""How many trees are best is judged on rows out of their folds: on all rows, or so many where a fold holds more."""
LEAST_LEAF, PATIENCE = 5, 20
"""Rows in a leaf, and trees without gain after which no more are grown."""
LEAST_VARIANCE = 1e-9
"""Of the standardised target."""


@dataclass(frozen=True, slots=True)
class Boosted:
    """Trees of all rows, and the mean square of the errors out of fold, of counts beyond that of a Poisson variable."""

    trees: Trees
    variance: float
    loss: float
    """Out of the folds, by which settings are compared."""

    def scores(self, rows: SiteData, likelihood: str, units: TargetUnits) -> Scores:
        """Of the held-out rows, in original units; noise has one variance everywhere."""
        if likelihood in CLASSIFICATION:
            shares = np.asarray(self.trees.predict_proba(rows.x_test))
            several = likelihood in MULTICLASS
            return class_scores(shares, rows.y_test) if several else bernoulli_scores(shares[:, 1], rows.y_test)
        mean = np.asarray(self.trees.predict(rows.x_test), np.float64)
        spread = np.full_like(mean, self.variance)
        if likelihood == "poisson":
            return count_scores(np.log(mean) - spread / 2, spread, rows.y_test)
        return units.gaussian_scores(Prediction(mean, spread), rows.y_test)


def grown(likelihood: str, seed: int, rate: float, leaves: int, trees: int, *, stops: bool) -> Trees:
    """Trees to be fitted, by the loss of a likelihood."""
    from sklearn import ensemble  # noqa: PLC0415 - slow to import, and only a simulation needs it

    kind = "HistGradientBoostingClassifier" if likelihood in CLASSIFICATION else "HistGradientBoostingRegressor"
    made = getattr(ensemble, kind)(
        loss=LOSSES[likelihood],
        learning_rate=rate,
        max_leaf_nodes=leaves,
        max_iter=trees,
        min_samples_leaf=LEAST_LEAF,
        early_stopping=stops,
        n_iter_no_change=PATIENCE,
        random_state=seed,
    )
    return cast("Trees", made)


def boosted(
    x: Array, y: Array, likelihood: str, seed: int = 0, *, rate: float = 0.1, leaves: int = 16, most: int = 400
) -> Boosted:
    """Trees of all rows [N, D], as many as are best out of folds of like targets and ``most`` at most.

    A fold is predicted by trees of the other rows, which stop when its loss no longer falls.
    """
    shuffled = np.random.default_rng([seed, *b"boosting"]).permutation(len(y))
    order = shuffled[np.argsort(y[shuffled], kind="stable")]
    folds = [order[number::FOLDS] for number in range(FOLDS)][: math.ceil(SCORED * FOLDS / len(y))]
    courses, predictions = [], []
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(y)), fold)
        trees = grown(likelihood, seed, rate, leaves, most, stops=True)
        trees.fit(x[rest], y[rest], X_val=x[fold], y_val=y[fold])
        courses.append(-np.asarray(trees.validation_score_))
        predictions.append(np.asarray(trees.predict(x[fold]), np.float64))
    predicted = np.concatenate(predictions)
    variance = float(np.square(y[np.concatenate(folds)] - predicted).mean())
    if likelihood == "poisson":  # var y = r + r² (e^v − 1)
        more = max(variance - float(predicted.mean()), 0.0)
        variance = math.log1p(more / float(np.square(predicted).mean()))
    best = max(round(float(np.mean([course.argmin() for course in courses]))), 1)
    trees = grown(likelihood, seed, rate, leaves, best, stops=False).fit(x, y)
    return Boosted(trees, max(variance, LEAST_VARIANCE), float(np.mean([course.min() for course in courses])))
