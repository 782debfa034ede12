"""The stateless client of the hierarchical GP: its deviation follows from its rows and q(Z_G)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.gp.error_law import SCALE, TAILS
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp import messages, rough
from fedgp_flower.methods.hierarchical_gp.options import HierarchicalOptions
from fedgp_flower.methods.hierarchical_gp.rough import FACTORS, RoughDeviation
from fedgp_flower.methods.hierarchical_gp.smooth import SmoothDeviation, shaped_gp
from fedgp_flower.methods.sfvi.client import trend_and_deviation
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.methods.sgpr.messages import ErrorSums
from fedgp_flower.scores import Prediction
from fedgp_flower.shared_messages import Parameters
from fedgp_flower.typing import Array, NamedArrays

MOST_ROWS = 400
"""Longer series are thinned evenly to at most this many rows, because a unit factorises matrices of its rows."""


class HierarchicalClient(SiteClient):
    """Sums of the site's rows with the deviation integrated out, and predictions with it."""

    options: HierarchicalOptions

    def expansion(self, request: Parameters) -> messages.ExpansionShare:
        """P, p and c of the site's rows, and their derivatives by θ."""
        share = self.deviation(request.values).derivatives(GlobalPosterior.of(request.values))
        return replace(share, count=np.array(float(self.num_examples)))

    def calibration(self, request: messages.CalibrationRequest) -> messages.Calibration:
        """Errors of predictions of the unit from its first rows and the other units."""
        total = (torch.tensor(part) for part in (request.precision, request.shift))
        return rough.calibration(self.unit(request.values), GlobalPosterior.of(request.values), *total)

    def errors(self, request: Parameters) -> ErrorSums:
        """Sums over the errors of this site's rows, each predicted from all others."""
        deviation = self.smooth(request.values)
        z, mean = deviation.left_out(GlobalPosterior.of(request.values))
        features = deviation.scale_features(deviation.features, mean)
        return ErrorSums.of(z.numpy(), features.numpy(), request.values)

    def predict(self, request: Parameters, inputs: Array) -> Prediction:
        """Mean and variance of an observation at this site, with the law of its errors."""
        x = self.rescaled(inputs)
        found = self.deviation(request.values).predict(x, GlobalPosterior.of(request.values))
        mean, variance = (part.numpy() for part in found)
        if FACTORS in request.values:
            last = float(self.rescaled(self.rows.x).max())
            variance = rough.widened(variance, x.numpy(), last, request.values[FACTORS])
        if SCALE in request.values:
            features = self.smooth(request.values).scale_features(x, found[0])
            variance = variance * np.exp(features.numpy() @ request.values[SCALE])
        return Prediction(mean, variance, request.values.get(TAILS))

    def held_out_rows(self, request: Parameters) -> NamedArrays:
        """Held-out rows with their predictions, trend and deviation."""
        x, q_global = self.rescaled(self.rows.x_test), GlobalPosterior.of(request.values)
        trend = self.deviation(request.values).trend(x, q_global).numpy()
        whole = self.predict(request, self.rows.x_test).mean
        return super().held_out_rows(request) | trend_and_deviation(self.preparation, trend, whole)

    def deviation(self, values: Mapping[str, ndarray]) -> SmoothDeviation | RoughDeviation:
        """The rows of the site at θ = ``values``."""
        return self.unit(values) if self.options.rough else self.smooth(values)

    def smooth(self, values: Mapping[str, ndarray]) -> SmoothDeviation:
        """The rows of a site with a smooth deviation at θ = ``values``."""
        model = shaped_gp(self.config.model, self.setting.constants[SHARED])
        model.load_theta(values)
        return SmoothDeviation(model, torch.from_numpy(self.rows.x), torch.from_numpy(self.rows.y))

    def unit(self, values: Mapping[str, ndarray]) -> RoughDeviation:
        """The rows of a unit at θ = ``values``, ordered by the input."""
        every = -(-self.num_examples // MOST_ROWS)
        order = np.argsort(self.rows.x[:, 0], kind="stable")[::-1][::every][::-1]
        x, y = self.rescaled(self.rows.x[order]), torch.from_numpy(self.rows.y[order].copy())
        inducing = self.rescaled(self.setting.constants[SHARED])
        return RoughDeviation(x, y, inducing, rough.theta_of(values), self.config.model.jitter)

    def rescaled(self, inputs: Array) -> Tensor:
        """Inputs [N, D], or for rough deviations [N] rescaled to [0, 1]."""
        return rough.rescale(inputs, self.setting.constants[SHARED]) if self.options.rough else torch.from_numpy(inputs)
