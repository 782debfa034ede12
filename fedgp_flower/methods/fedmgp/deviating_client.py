"""The site's half of FedMGP with one shared curve and deviations; it keeps nothing, for all follows from its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.numpy_client import Prediction
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.fedmgp.calibration import calibration, widened
from fedgp_flower.methods.fedmgp.deviations import DeviatingUnit, Theta
from fedgp_flower.methods.fedmgp.messages import (
    PSEUDO_INPUTS,
    Calibration,
    CalibrationRequest,
    Curve,
    TrendCurveRequest,
    TrendView,
)
from fedgp_flower.methods.fedmgp.unit_client import UnitClient
from fedgp_flower.methods.hierarchical_gp.messages import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.hierarchical_gp.newton import Sums
from fedgp_flower.typing import Array

MOST_ROWS = 400
"""Of a longer series every so many-th row counts, so that no more are left: a unit factorises matrices of its rows."""


class DeviatingClient(UnitClient):
    """One unit: its deviation is integrated out, and predicted from its own rows."""

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """P, p and c at the unit's best weights of its roughness, and their derivatives by θ."""
        theta, q = read_values(request.values)
        found = self.unit().derivatives(theta, q)
        precision, shift, constant = (own.numpy() for own in found.sums.parts())
        slopes, curvature = found.slopes.numpy(), found.curvature.numpy()
        rows, shape = np.array(float(self.num_examples)), np.zeros(0)
        return ExpansionShare(precision, shift, constant, slopes, curvature, rows, shape, shape)

    def calibration(self, request: CalibrationRequest) -> Calibration:
        """How well the unit is predicted from its first rows and the others."""
        precision, shift = (torch.from_numpy(np.array(own)) for own in (request.precision, request.shift))
        return calibration(self.unit(), *read_values(request.values), Sums(precision, shift, shift.new_zeros(())))

    def predict(self, request: TrendView, inputs: Array) -> Prediction:
        """An observation of this unit."""
        unit, x = self.unit(), self._placed(inputs)
        mean, variance = (own.numpy() for own in unit.predict(x, *read_values(request.values)))
        return Prediction(mean, widened(variance, x.numpy(), float(unit.x.max()), request.factors))

    def curve(self, request: TrendCurveRequest) -> Curve:
        """The unit as a report shows it; a real unit refuses."""
        return self.drawn(request.view, request.grid)

    def unit(self) -> DeviatingUnit:
        """The training rows, in the order of the input."""
        every = -(-self.num_examples // MOST_ROWS)
        order = np.argsort(self.rows.x[:, 0], kind="stable")[::-1][::every][::-1]
        x, y = self._placed(self.rows.x[order]), torch.from_numpy(self.rows.y[order].copy())
        inducing = self._placed(self.setting.constants[PSEUDO_INPUTS])
        return DeviatingUnit(x, y, inducing, jitter=self.config.model.jitter)

    def _placed(self, inputs: Array) -> Tensor:
        """Inputs [N, 1] as shares of the pseudo-inputs' range."""
        inducing = self.setting.constants[PSEUDO_INPUTS]
        return torch.from_numpy((inputs[:, 0] - inducing.min()) / np.ptp(inducing))


def read_values(values: Mapping[str, ndarray]) -> tuple[Theta, GlobalPosterior]:
    """θ and q(u) of a message."""
    theta = {n.removeprefix("theta."): torch.from_numpy(np.array(v)) for n, v in values.items() if n[:6] == "theta."}
    return theta, GlobalPosterior.of({name: np.array(own) for name, own in values.items()})
