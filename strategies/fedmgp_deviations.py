"""FedMGP with one shared curve and a deviation of every unit: Newton steps on θ, one exchange of sums a step.

Beyond the paper (Chung and Al Kontar, Technometrics 66, 2024). Units whose curves are no exact mixtures of shared ones
have bands that are too narrow when what a unit alone knows is a point. Here nothing is: a unit integrates its deviation
out, also over its roughness (:mod:`fedgp_flower.methods.fedmgp.deviations`), hyperparameters are shared, and the server
needs totals alone. The steps are those of SFVI in closed form. At the end every unit says how well the others and its
own first rows predict the rest of it, and a summed histogram widens the bands beyond a unit's last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from fedgp_flower.errors import RunError
from fedgp_flower.messages import encode, leaves, message
from fedgp_flower.methods.expansions import ExpansionRequest, ExpansionShare
from fedgp_flower.methods.family import initial_global, named, on_the_wire
from fedgp_flower.methods.fedmgp.calibration import CUTS, factors
from fedgp_flower.methods.fedmgp.deviations import PRIOR_SD, beginning, inducing_factor
from fedgp_flower.methods.fedmgp.messages import PSEUDO_INPUTS
from fedgp_flower.methods.fedmgp.options import FedMGPDeviationsOptions
from fedgp_flower.methods.fedmgp.trend_messages import Calibration, CalibrationRequest, TrendCurveRequest, TrendView
from fedgp_flower.methods.messages import Parameters
from fedgp_flower.typing import Array, NamedArrays
from strategies.fedmgp_shared import first_inducing, scaled, unit_curves
from strategies.fsgp_exact import pack
from strategies.server import finalise
from strategies.server.enrolment import Preparation
from strategies.server.questions import Asking, Figures, Roster, Summed, Total
from strategies.server.strategy import FederatedStrategy
from strategies.sfvi_closed import NewtonState
from strategies.sfvi_closed import one_round as newton_round

TOLERANCE = 0.05
"""Nats that a step must promise to be taken."""
EQUATION = (
    "y = aᵀ(x) u + d(x) + noise with u ~ q(u) as for `sfvi`, a(x) = e^amplitude L⁻¹ k(W, x), k the Matérn-3/2 "
    "correlation of lengthscale e^lengthscale, L Lᵀ = k(W, W); d is the unit's own and has covariance "
    "e^(2 spread) k'(x, x') + e^(2 level) + e^(2 slope) x x' + b² min(x, x'), b of five values with softmax("
    "roughness); the noise has sd e^noise. Here x runs from 0 to 1 over the pseudo-inputs."
)


@message()
class DeviationState:
    """Where Newton's method is, and how much wider bands are beyond a unit's last row."""

    newton: NewtonState
    factors: Float[ndarray, " K"] = leaves("by cut")
    calibrated: bool = False
    """Whether the factors belong to the best θ."""

    @property
    def view(self) -> TrendView:
        """What predicts."""
        return TrendView(self.newton.parameters, self.factors)


def start_state(inducing: Array) -> DeviationState:
    """The mode of the prior of θ, with pseudo-inputs [J, 1]; q(u) = p(u)."""
    theta = {f"theta.{name}": own.numpy() for name, own in beginning().items()}
    mode, eta = pack(theta), on_the_wire({}, named(initial_global(len(inducing), scale=1.0, triangular=True)))
    shared = {PSEUDO_INPUTS: inducing}
    sds, none = np.full_like(mode, PRIOR_SD), np.zeros_like(mode)
    newton = NewtonState({**theta, **eta}, shared, mode, sds, none, mode, eta)
    return DeviationState(newton, np.ones(len(CUTS)))


def one_round(
    state: DeviationState, roster: Roster, *, last: bool, jitter: float
) -> Asking[tuple[DeviationState, Figures]]:
    """A Newton step; after the last one, also the factors."""
    inducing = state.newton.shared[PSEUDO_INPUTS][:, 0]
    placed = torch.from_numpy((inducing - inducing.min()) / np.ptp(inducing))

    def factor_at(theta: Mapping[str, ndarray]) -> torch.Tensor:
        named_theta = {name.removeprefix("theta."): torch.from_numpy(own) for name, own in theta.items()}
        return inducing_factor(named_theta, placed, jitter)

    newton, figures = yield from newton_round(state.newton, roster, factor_at)
    state = replace(state, newton=newton, calibrated=False)
    if not (last or ended(newton, roster)):
        return state, figures
    found = yield from judged(newton)
    return replace(state, factors=state.factors if found is None else found, calibrated=True), figures


def judged(newton: NewtonState) -> Asking[Array | None]:
    """The factors: what units add at the best θ and q(u), then how well each is predicted from the others.

    Sums are asked again, because weights of roughness depend on q(u): a unit can only take out what it put in.
    """
    summed: Summed[ExpansionShare] = yield Total(ExpansionShare, ExpansionRequest(newton.parameters))
    if summed.total is None:
        return None
    request = CalibrationRequest(newton.parameters, summed.total.precision, summed.total.shift)
    answered: Summed[Calibration] = yield Total(Calibration, request, summed.sites)
    return None if answered.total is None else factors(answered.total)


def ended(newton: NewtonState, roster: Roster) -> bool:
    """Whether no step promises more than the tolerance, and no healthy site is missing from the total."""
    return newton.promised < TOLERANCE and set(roster.sites) <= set(newton.sites)


def saved(state: DeviationState, jitter: float) -> finalise.Posterior:
    """θ, q(u) and the factors; with a unit's rows they predict it."""
    arrays = {**state.newton.parameters, **state.newton.shared, "factors": state.factors}
    notes = {PSEUDO_INPUTS: "W", "factors": "widths of bands beyond the last row, by cut, over normal ones"}
    return finalise.Posterior(
        arrays,
        {name: notes.get(name, "hyperparameter or part of q(u)") for name in arrays},
        {name: "standardised" if name == PSEUDO_INPUTS else "unconstrained" for name in arrays},
        EQUATION,
        {"family": "deviations", "kernel": "matern32", "jitter": jitter},
    )


def told(state: DeviationState) -> dict[str, Any]:
    """The bound in nats, θ, and the factors by the share of the range that was seen."""
    theta = {name: own for name, own in state.newton.theta.items() if name != "theta.roughness"}
    logits = state.newton.theta["theta.roughness"]
    return {
        "bound": state.newton.bound,
        "promised_rise": state.newton.rise,
        "hyperparameters": {name.removeprefix("theta."): float(np.exp(own[0])) for name, own in theta.items()},
        "roughness": (np.exp(logits) / np.exp(logits).sum()).tolist(),
        "widened": {f"{cut:.1f}": factor for cut, factor in zip(CUTS, state.factors.tolist(), strict=True)},
    }


class FedMGPDeviations(FederatedStrategy[DeviationState]):
    """One shared curve and deviations; for numbers with Gaussian noise along one input."""

    method = "fedmgp-deviations"
    options_class = FedMGPDeviationsOptions
    state_class = DeviationState
    options: FedMGPDeviationsOptions

    def adjusted(self, preparation: Preparation) -> Preparation:
        """Targets are divided by their root mean square, and not centred."""
        return scaled(preparation, self.config)

    def initialise(self, roster: Roster) -> Asking[DeviationState]:
        """The mode of the prior, and pseudo-inputs from where inputs lie.

        Raises:
            RunError: there are several inputs.
        """
        if self.preparation.num_inputs > 1:
            raise RunError(
                f"`method` = 'fedmgp-deviations' needs one input, here are {self.preparation.num_inputs}: take "
                "'fedmgp-exact', or pick one with `features`"
            )
        return start_state((yield from first_inducing(self.config, roster)))

    def one_round(self, state: DeviationState, roster: Roster) -> Asking[tuple[DeviationState, Figures]]:
        """One exchange, and one more at the end."""
        last, jitter = roster.round >= self.config.num_server_rounds, self.config.model.jitter
        return (yield from one_round(state, roster, last=last, jitter=jitter))

    def predictive(self, state: DeviationState, roster: Roster) -> Asking[TrendView]:
        """The shared curve, θ, and the factors."""
        yield from ()
        return state.view

    def constants(self, state: DeviationState) -> NamedArrays:
        """The pseudo-inputs."""
        return dict(state.newton.shared)

    def finished(self, state: DeviationState) -> bool:
        """Whether no step promises more, and the factors are those of the end."""
        return state.calibrated and ended(state.newton, self.roster())

    def public(self, state: DeviationState) -> NamedArrays:
        """θ and q(u)."""
        return encode(Parameters(state.newton.parameters))

    def converged(self, state: DeviationState) -> bool:
        """Whether another step would promise less than the tolerance."""
        return state.newton.bound is not None and state.newton.rise < TOLERANCE

    def posterior_of(self, state: DeviationState) -> finalise.Posterior:
        """θ, q(u) and the factors; with a unit's rows they predict it."""
        return saved(state, self.config.model.jitter)

    def details_of(self, state: DeviationState) -> dict[str, Any]:
        """The bound in nats, θ, and the factors by the share of the range that was seen."""
        return told(state)

    def final(self, state: DeviationState, roster: Roster) -> Asking[dict[str, Any]]:
        """Curves of the first simulated units."""
        inducing, view = state.newton.shared[PSEUDO_INPUTS], state.view
        return (yield from unit_curves(self, inducing, roster, lambda site, at: TrendCurveRequest(view, at)))
