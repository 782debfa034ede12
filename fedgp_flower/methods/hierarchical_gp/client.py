"""The site's half of the hierarchical GP. It keeps nothing: its deviation follows from its rows and q(Z_G)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.numpy_client import SiteClient
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.hierarchical_gp.messages import (
    Calibration,
    CalibrationRequest,
    ExpansionRequest,
    ExpansionShare,
    HierarchicalView,
)
from fedgp_flower.methods.hierarchical_gp.newton import Derivatives, Sums
from fedgp_flower.methods.hierarchical_gp.options import HierarchicalOptions
from fedgp_flower.methods.hierarchical_gp.rough import RoughDeviation, calibration, widened
from fedgp_flower.methods.hierarchical_gp.smooth import ShapedGP, SmoothDeviation
from fedgp_flower.methods.sfvi.client import trend_and_deviation
from fedgp_flower.methods.sfvi.options import SHARED
from fedgp_flower.scores import Prediction
from fedgp_flower.typing import Array, NamedArrays

MOST_ROWS = 400
"""Every so many-th row of a longer series counts, so that no more are left: a unit factorises matrices of its rows."""


class HierarchicalClient(SiteClient):
    """Sums of the site's rows with the deviation integrated out, and predictions with it."""

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """P, p and c of the site's rows, and their derivatives by θ."""
        found = self.deviation(request.values).derivatives(GlobalPosterior.of(request.values))
        return share_of(found, self.num_examples)

    def calibration(self, request: CalibrationRequest) -> Calibration:
        """How well the unit is predicted from its first rows and the other units."""
        precision, shift = (torch.from_numpy(np.array(part)) for part in (request.precision, request.shift))
        total = Sums(precision, shift, shift.new_zeros(()))
        return calibration(self.unit(request.values), GlobalPosterior.of(request.values), total)

    def predict(self, request: HierarchicalView, inputs: Array) -> Prediction:
        """An observation at this site."""
        site, x = self.deviation(request.values), self.placed(inputs)
        mean, variance = (part.numpy() for part in site.predict(x, GlobalPosterior.of(request.values)))
        if isinstance(site, RoughDeviation) and request.factors is not None:
            variance = widened(variance, x.numpy(), float(site.x.max()), request.factors)
        return Prediction(mean, variance)

    def shown(self, request: HierarchicalView) -> NamedArrays:
        """Held-out rows with their predictions, and the trend and the deviation that add up to them."""
        arrays, x = super().shown(request), self.placed(self.rows.x_test)
        site = self.deviation(request.values)
        trend = site.trend(x, GlobalPosterior.of(request.values)).numpy()
        return arrays | trend_and_deviation(self.preparation, trend, self.predict(request, self.rows.x_test).mean)

    # What the handlers work with.

    @property
    def rough(self) -> bool:
        """Whether the site is a unit along one input."""
        assert isinstance(self.config.options, HierarchicalOptions)
        return self.config.options.rough

    def deviation(self, values: Mapping[str, ndarray]) -> SmoothDeviation | RoughDeviation:
        """The rows of the site at a θ."""
        if self.rough:
            return self.unit(values)
        x, y = (torch.from_numpy(rows) for rows in (self.rows.x, self.rows.y))
        points = torch.as_tensor(self.setting.constants[SHARED])
        model = ShapedGP(self.config.model, points)
        model.load_theta(theta_of(values))
        return SmoothDeviation(model, x, y)

    def unit(self, values: Mapping[str, ndarray]) -> RoughDeviation:
        """The rows of a unit at a θ, in the order of the input."""
        every = -(-self.num_examples // MOST_ROWS)
        order = np.argsort(self.rows.x[:, 0], kind="stable")[::-1][::every][::-1]
        x, y = self.placed(self.rows.x[order]), torch.from_numpy(self.rows.y[order].copy())
        inducing = self.placed(self.setting.constants[SHARED])
        return RoughDeviation(x, y, inducing, theta_of(values), self.config.model.jitter)

    def placed(self, inputs: Array) -> Tensor:
        """Inputs [N, D]; of units as shares [N] of the range of the pseudo-inputs."""
        if not self.rough:
            return torch.from_numpy(inputs)
        inducing = self.setting.constants[SHARED]
        return torch.from_numpy((inputs[:, 0] - inducing.min()) / np.ptp(inducing))


def share_of(found: Derivatives, rows: int) -> ExpansionShare:
    """What a site sends of its derivatives."""
    parts = (found.sums.precision, found.sums.shift, found.sums.constant, found.slopes, found.curvature)
    arrays = (*(part.numpy() for part in parts), np.array(float(rows)), found.squares.numpy(), found.known.numpy())
    return ExpansionShare(*arrays)


def theta_of(values: Mapping[str, ndarray]) -> dict[str, Tensor]:
    """θ of a message, without its prefix."""
    theta = {name.removeprefix("theta."): array for name, array in values.items() if name.startswith("theta.")}
    return {name: torch.from_numpy(np.array(array)) for name, array in theta.items()}
