"""The site's half of FedMGP with one shared curve and deviations; it keeps nothing, for all follows from its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from fedgp_flower.clients.numpy_client import Prediction, SiteClient
from fedgp_flower.data.sites import RawSite
from fedgp_flower.methods.closed_form import Sums
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.family import GlobalPosterior
from fedgp_flower.methods.fedmgp.calibration import calibration, widened
from fedgp_flower.methods.fedmgp.client import drawn
from fedgp_flower.methods.fedmgp.deviations import DeviatingUnit, Theta
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS, Curve
from fedgp_flower.methods.fedmgp.posterior import UnitPredictor, setting, standard_deviations
from fedgp_flower.methods.fedmgp.trend_messages import Calibration, CalibrationRequest, TrendCurveRequest, TrendView
from fedgp_flower.run.artefacts import RunData
from fedgp_flower.run.config import RunConfig
from fedgp_flower.typing import Array, NamedArrays

MOST_ROWS = 400
"""Of a longer series every so many-th row counts, so that no more are left: a unit factorises matrices of its rows."""


class DeviatingClient(SiteClient):
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
        return drawn(self, request.view, request.grid)

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


def site_model(run: RunData, config: RunConfig, site: RawSite, state: NamedArrays) -> UnitPredictor | None:
    """The shared curve and the deviation that the unit's rows show, whether it took part or not."""
    del state
    if run.posterior is None:
        return None
    arrays = {name: np.array(array) for name, array in run.posterior.arrays.items()}
    view, client = TrendView(arrays, arrays["factors"]), DeviatingClient(setting(run, config, site, {}))
    return lambda inputs: standard_deviations(client.predict(view, inputs))
