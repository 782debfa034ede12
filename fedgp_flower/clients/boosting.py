"""Gradient boosting of all rows in one place (Friedman 2001): what an analyst without Gaussian processes would use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from fedgp_flower.count_scores import count_scores
from fedgp_flower.data.sites import SiteData
from fedgp_flower.options import CLASSES, NUMBERS, SEVERAL
from fedgp_flower.scores import Prediction, Scores, TargetUnits, bernoulli_scores, class_scores
from fedgp_flower.typing import Array, Indices

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

LOSSES = dict.fromkeys(NUMBERS, "squared_error") | dict.fromkeys(CLASSES, "log_loss") | {"poisson": "poisson"}
"""By likelihood; the others have no counterpart among the losses."""
FOLDS, SCORED = 5, 2000
"""A setting is judged on rows out of its folds: on all rows, or on so many where a fold holds more."""
LEAST_LEAF, PATIENCE = 5, 20
"""Rows in a leaf, and trees without gain after which no more are grown."""
LEAST_VARIANCE = 1e-9
"""Of the standardised target."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings of which the one with the lowest loss out of its folds is taken."""

    rates: Sequence[float] = (0.1,)
    leaves: Sequence[int] = (16,)
    trees: int = 400
    """At most; early stopping decides."""


QUICK = Grid()


@dataclass(frozen=True, slots=True)
class Boosted:
    """Trees of all rows, and the mean square of the errors out of fold, of counts beyond that of a Poisson variable."""

    trees: Trees
    variance: float

    def scores(self, rows: SiteData, likelihood: str, units: TargetUnits) -> Scores:
        """Of the held-out rows, in original units; noise has one variance everywhere."""
        if likelihood in CLASSES:
            shares = np.asarray(self.trees.predict_proba(rows.x_test))
            several = likelihood in SEVERAL
            return class_scores(shares, rows.y_test) if several else bernoulli_scores(shares[:, 1], rows.y_test)
        mean = np.asarray(self.trees.predict(rows.x_test), np.float64)
        spread = np.full_like(mean, self.variance)
        if likelihood == "poisson":
            return count_scores(np.log(mean) - spread / 2, spread, rows.y_test)
        return units.gaussian_scores(Prediction(mean, spread), rows.y_test)


def grown(likelihood: str, seed: int, rate: float, leaves: float, trees: float, *, stops: bool) -> Trees:
    """Trees to be fitted, by the loss of a likelihood."""
    from sklearn import ensemble  # noqa: PLC0415 - slow to import, and only a simulation needs it

    kind = "HistGradientBoostingClassifier" if likelihood in CLASSES else "HistGradientBoostingRegressor"
    made = getattr(ensemble, kind)(
        loss=LOSSES[likelihood],
        learning_rate=rate,
        max_leaf_nodes=int(leaves),
        max_iter=int(trees),
        min_samples_leaf=LEAST_LEAF,
        early_stopping=stops,
        n_iter_no_change=PATIENCE,
        random_state=seed,
    )
    return cast("Trees", made)


@dataclass(frozen=True, slots=True)
class Judged:
    """Out of its folds: the loss of a setting, its best number of trees, and the errors."""

    loss: float
    trees: int
    errors: Array
    predicted: Array


def judged(x: Array, y: Array, folds: Sequence[Indices], likelihood: str, seed: int, *setting: float) -> Judged:
    """One setting on every fold, by trees of the other rows that stop when the fold's loss no longer falls."""
    losses, counts, errors, predictions = [], [], [], []
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(y)), fold)
        trees = grown(likelihood, seed, *setting, stops=True)
        trees.fit(x[rest], y[rest], X_val=x[fold], y_val=y[fold])
        course = -np.asarray(trees.validation_score_)
        losses.append(float(course.min()))
        counts.append(int(course.argmin()))
        predictions.append(np.asarray(trees.predict(x[fold]), np.float64))
        errors.append(y[fold] - predictions[-1])
    found = np.concatenate(errors), np.concatenate(predictions)
    return Judged(float(np.mean(losses)), max(round(float(np.mean(counts))), 1), *found)


def boosted(x: Array, y: Array, likelihood: str, seed: int = 0, grid: Grid = QUICK) -> Boosted:
    """Trees of all rows [N, D], with the setting and number of trees that are best out of folds of like targets."""
    shuffled = np.random.default_rng([seed, *b"boosting"]).permutation(len(y))
    order = shuffled[np.argsort(y[shuffled], kind="stable")]
    folds = [order[number::FOLDS] for number in range(FOLDS)][: math.ceil(SCORED * FOLDS / len(y))]
    settings = list(itertools.product(grid.rates, grid.leaves))
    found = [judged(x, y, folds, likelihood, seed, *setting, grid.trees) for setting in settings]
    setting, best = min(zip(settings, found, strict=True), key=lambda pair: pair[1].loss)
    variance = float(np.square(best.errors).mean())
    if likelihood == "poisson":  # var y = r + r² (e^v − 1)
        more = max(variance - float(best.predicted.mean()), 0.0)
        variance = math.log1p(more / float(np.square(best.predicted).mean()))
    trees = grown(likelihood, seed, *setting, best.trees, stops=False).fit(x, y)
    return Boosted(trees, max(variance, LEAST_VARIANCE))
