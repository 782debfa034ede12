"""Answers that are the same whatever the method: what a table is like, and the sums behind linear baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedgp_flower.data.standardisation import column_squares, column_sums
from fedgp_flower.gp.sums import input_shape
from fedgp_flower.lazy import special
from fedgp_flower.scores import Prediction, Scores, bernoulli_scores, count_scores
from fedgp_flower.shared_messages import (
    Centres,
    Coefficients,
    ColumnSquares,
    ColumnSums,
    LinearPredictor,
    LinearScoreSums,
    LogisticSums,
    Moments,
    Nothing,
    Shape,
    TargetMoments,
    TargetPowers,
    with_ones,
)
from fedgp_flower.transforms import TRANSFORMS

if TYPE_CHECKING:
    from fedgp_flower.clients.numpy_client import SiteClient

CERTAIN = 30.0
"""Log odds beyond which a linear predictor goes no further: a wrong certainty would have an infinite NLL."""


class CommonAnswers:
    """Handlers of messages that every method answers in the same way, over the rows of a client."""

    def __init__(self, client: SiteClient) -> None:
        self.client = client

    def target(self, request: TargetPowers) -> TargetMoments:
        """Sums of the transformed training targets, for each power that it could have."""
        site = self.client.site
        y = site.train[site.target].to_numpy(dtype=np.float64)
        family = TRANSFORMS[self.client.config.transform.target]
        moved = np.stack([family.forward(y, power) for power in request.powers]) - request.centres[:, None]
        slopes = np.array([family.log_slope(y, power).sum() for power in request.powers])
        return TargetMoments(moved.sum(axis=1), np.square(moved).sum(axis=1), slopes, np.array(float(len(y))))

    def column_sums(self, request: Nothing) -> ColumnSums:
        """Sums for the means of columns."""
        del request
        sums = column_sums(self.client.site.train, self.client.preparation)
        return ColumnSums(**sums, dropped=np.array(float(self.client.site.dropped)))

    def column_squares(self, request: Centres) -> ColumnSquares:
        """Sums of squares for the spreads of columns."""
        train, preparation = self.client.site.train, self.client.preparation
        return ColumnSquares(*column_squares(train, preparation, request.centre, request.scale))

    def shape(self, request: Nothing) -> Shape:
        """Where the standardised inputs lie, and the initial hyperparameters of the configured model."""
        del request
        rows = self.client.rows
        arrays, start = input_shape(rows.x), self.client.start(rows.x.shape[1])
        return Shape(arrays["input.histogram"], arrays["input.products"], np.array(rows.y @ rows.y), start)

    def moments(self, request: Nothing) -> Moments:
        """Sums for linear regression."""
        del request
        design, y = with_ones(self.client.rows.x), self.client.rows.y
        return Moments(design.T @ design, design.T @ y, np.array(y @ y))

    def logistic(self, request: Coefficients) -> LogisticSums:
        """Log likelihood, gradient and information of a logistic regression."""
        design, y = with_ones(self.client.rows.x), self.client.rows.y
        log_odds = design @ request.values
        p = special.expit(log_odds)
        value = -np.logaddexp(0, (1 - 2 * y) * log_odds).sum()
        return LogisticSums(np.array(value), design.T @ (y - p), design.T * (p * (1 - p)) @ design)

    def linear_scores(self, request: LinearPredictor) -> LinearScoreSums:
        """Scores of a linear predictor on the held-out rows."""
        return LinearScoreSums.of(self._scores(request))

    def _scores(self, request: LinearPredictor) -> Scores:
        rows, likelihood = self.client.rows, self.client.config.model.likelihood
        x, y = rows.x_test - request.centre, rows.y_test
        mean, variance = request.intercept + x @ request.weights, np.full(len(x), request.variance)
        if likelihood == "bernoulli":
            return bernoulli_scores(special.expit(np.clip(mean, -CERTAIN, CERTAIN)), y)
        if likelihood == "poisson":
            return count_scores(mean, variance, y)
        if request.spread is not None:
            variance += np.square(x @ request.spread.T).sum(axis=1)
        return self.client.units.gaussian_scores(Prediction(mean, variance), y)
