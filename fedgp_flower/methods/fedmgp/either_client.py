"""The site's half of FedMGP while two covariances are compared: each one's client answers what it is asked."""

from __future__ import annotations

from fedgp_flower.clients.numpy_client import Prediction, Said, Setting
from fedgp_flower.methods.fedmgp.client import FedMGPClient
from fedgp_flower.methods.fedmgp.deviating_client import DeviatingClient
from fedgp_flower.methods.fedmgp.latents import Latents
from fedgp_flower.methods.fedmgp.messages import (
    AlignedStatistics,
    Calibration,
    CalibrationRequest,
    Curve,
    Directions,
    EitherCurveRequest,
    EitherView,
    FirstStatistics,
    Towards,
    Trials,
    TrialStatistics,
)
from fedgp_flower.methods.fedmgp.unit_client import UnitClient
from fedgp_flower.methods.hierarchical_gp.messages import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.messages import Nothing
from fedgp_flower.typing import Array


class EitherClient(UnitClient):
    """One unit, as a view of shared latent functions and as a shared curve with a deviation."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.convolved, self.deviating = FedMGPClient(setting), DeviatingClient(setting)

    def first(self, request: Latents) -> FirstStatistics:
        """Statistics at the parameters that every unit starts from."""
        return self.convolved.first(request)

    def directions(self, request: Latents) -> Directions:
        """Where the unit's first look at g points."""
        return self.convolved.directions(request)

    def aligned(self, request: Towards) -> AlignedStatistics:
        """Its first statistics with the sign of a direction."""
        return self.convolved.aligned(request)

    def exact(self, request: Trials) -> TrialStatistics:
        """One exact round of the convolved model."""
        return self.convolved.exact(request)

    def expansion(self, request: ExpansionRequest) -> ExpansionShare:
        """What a Newton step of the model with deviations needs."""
        return self.deviating.expansion(request)

    def calibration(self, request: CalibrationRequest) -> Calibration:
        """How well deviations predict the unit from its first rows and the others."""
        return self.deviating.calibration(request)

    def predict(self, request: EitherView, inputs: Array) -> Prediction:
        """An observation of this unit, by the covariance that the request is of."""
        if request.trend is not None:
            return self.deviating.predict(request.trend, inputs)
        return self.convolved.predict(request.convolved, inputs)

    def curve(self, request: EitherCurveRequest) -> Curve:
        """The unit as a report shows it; a real unit refuses."""
        return self.drawn(request.view, request.grid)

    def pooled(self, request: Nothing) -> Said:
        """The convolved model with the rows of all units in one place; only a simulation can do that."""
        return self.convolved.pooled(request)
